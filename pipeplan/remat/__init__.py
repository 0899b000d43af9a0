"""Rematerialization of a chain on one device: which layers run twice, and when.

Every planner returns a `Schedule`, and `judge` says what it does; docs/remat.md is the contract.
"""

from pipeplan.remat.channel import Channel
from pipeplan.remat.costs import Costs, from_chain
from pipeplan.remat.judge import Outcome, Step, judge
from pipeplan.remat.methods import METHODS, Rematerialization, rematerialize_chain
from pipeplan.remat.schedule import Op, OpKind, Schedule

__all__ = [
    "METHODS",
    "Channel",
    "Costs",
    "Op",
    "OpKind",
    "Outcome",
    "Rematerialization",
    "Schedule",
    "Step",
    "from_chain",
    "judge",
    "rematerialize_chain",
]
