"""Rematerialization of a chain on one device: which layers run twice, and when.

Every planner returns a `Schedule`, and `judge` says what it does; docs/reference/remat-rules.md is
the contract.
"""

from pipeplan.remat.channel import Channel
from pipeplan.remat.costs import Costs, from_chain
from pipeplan.remat.curve import CURVE, budgets, curve
from pipeplan.remat.judge import Outcome, Step, judge
from pipeplan.remat.methods import METHODS, OFFLOADING, Rematerialization, rematerialize_chain
from pipeplan.remat.schedule import Op, OpKind, Schedule

__all__ = [
    "CURVE",
    "METHODS",
    "OFFLOADING",
    "Channel",
    "Costs",
    "Op",
    "OpKind",
    "Outcome",
    "Rematerialization",
    "Schedule",
    "Step",
    "budgets",
    "curve",
    "from_chain",
    "judge",
    "rematerialize_chain",
]
