"""Rematerialization of a chain on one device: which layers run twice, and when.

Every planner returns a `DeviceSchedule`, and `judge` says what it does;
docs/reference/remat-rules.md is the contract.
"""

from pipeplan.remat.curve import CURVE, budgets, curve
from pipeplan.remat.methods import METHODS, OFFLOADING, Rematerialization, rematerialize_chain
from pipeplan.remat.schedules.costs import Costs, from_chain
from pipeplan.remat.schedules.host_link import HostLink
from pipeplan.remat.schedules.replay import Outcome, ReplayedOp, judge
from pipeplan.remat.schedules.schedule import DeviceOp, DeviceOpKind, DeviceSchedule

__all__ = [
    "CURVE",
    "METHODS",
    "OFFLOADING",
    "Costs",
    "DeviceOp",
    "DeviceOpKind",
    "DeviceSchedule",
    "HostLink",
    "Outcome",
    "Rematerialization",
    "ReplayedOp",
    "budgets",
    "curve",
    "from_chain",
    "judge",
    "rematerialize_chain",
]
