"""Other planners and schedules, each as a `Plan` that our own verifier and simulator judge.

A baseline decides stages, GPUs and order as its authors publish it; times and bytes then follow
from docs/reference/model.md like those of any plan. None of them looks at `ilp`.
"""
