"""Rematerialization of a chain on one device: which layers run twice, and when.

Every planner returns a `DeviceSchedule`, and `judge` says what it does;
docs/reference/remat-rules.md is the contract.
"""

from pipeplan.remat.curve import CURVE, budgets, curve
from pipeplan.remat.late_acceptance import always
from pipeplan.remat.methods import (
    METHODS,
    OFFLOADING,
    Rematerialization,
    local_search,
    rematerialize_chain,
)
from pipeplan.remat.offloading.compute_order import ComputeOrder, OffloadUnit
from pipeplan.remat.offloading.no_wait import NoWaitSchedule, no_wait_in_order
from pipeplan.remat.schedules.costs import Costs, from_chain
from pipeplan.remat.schedules.host_link import HostLink, Lanes, Transfer
from pipeplan.remat.schedules.replay import Outcome, ReplayedOp, judge
from pipeplan.remat.schedules.schedule import DeviceOp, DeviceOpKind, DeviceSchedule

__all__ = [
    "CURVE",
    "METHODS",
    "OFFLOADING",
    "ComputeOrder",
    "Costs",
    "DeviceOp",
    "DeviceOpKind",
    "DeviceSchedule",
    "HostLink",
    "Lanes",
    "NoWaitSchedule",
    "OffloadUnit",
    "Outcome",
    "Rematerialization",
    "ReplayedOp",
    "Transfer",
    "always",
    "budgets",
    "curve",
    "from_chain",
    "judge",
    "local_search",
    "no_wait_in_order",
    "rematerialize_chain",
]
