"""The planner beside everyone else: same chain, same clusters, one judge.

`compare` plans every point of (GPUs, memory), executes every baseline there, and puts period,
idle time by cause and bytes of each into one row. All of them are judged by
docs/reference/model.md. `launch_point` then runs the plans of a point on this machine, in turns.
"""

from pipeplan.compare.launched import (
    LaunchedPlan,
    LaunchedPoint,
    LaunchRequest,
    OrderedPairs,
    launch_point,
)
from pipeplan.compare.points import Comparison, ComparisonPoint, Request, compare
from pipeplan.compare.rows import Absent, Bubble, Row

__all__ = [
    "Absent",
    "Bubble",
    "Comparison",
    "ComparisonPoint",
    "LaunchRequest",
    "LaunchedPlan",
    "LaunchedPoint",
    "OrderedPairs",
    "Request",
    "Row",
    "compare",
    "launch_point",
]
