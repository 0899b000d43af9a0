"""The planner beside everyone else: same chain, same clusters, one judge.

`compare` plans every point of (GPUs, memory), executes every baseline there, and puts period,
idle time by cause and bytes of each into one row. All of them are judged by
docs/reference/model.md.
"""

from pipeplan.compare.points import Comparison, ComparisonPoint, Request, compare
from pipeplan.compare.rows import Absent, Bubble, Row

__all__ = ["Absent", "Bubble", "Comparison", "ComparisonPoint", "Request", "Row", "compare"]
