"""`torchrun --nproc-per-node P -m pipeplan.launch`: train a task as a plan says.

Composes what strangers make: plan, verifier, lowering, capture, runtime. Everything that can be
wrong is checked before a process group exists (`checks`); then `train` runs to the end.
"""
