"""One GPU that recomputes: what the per-device planner decides, counted as plans are.

Without offloading the chain is one stage, whose runs are those of persistent schedules
(`persistent`): the first that fits is the shortest. With it, sets that need more than the GPU has
are tried as well, and what does not fit leaves (`one_gpu`). Source: ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from operator import itemgetter
from typing import Final

from pipeplan.ilp import one_gpu
from pipeplan.ilp.contiguous.dynamic_program import ContiguousPartition
from pipeplan.ilp.contiguous.partition_schedule import schedule_partition
from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.incumbent import Incumbent
from pipeplan.ilp.offload.byte_options import inner_bytes
from pipeplan.ilp.offload.copy_placement import transfer_ns
from pipeplan.ilp.recompute.contracted_chain import ContractedChain, contract
from pipeplan.ilp.recompute.joint_incumbent import JointIncumbent
from pipeplan.ilp.recompute.options import StageOptions
from pipeplan.ilp.recompute.persistent import persistent_runs, work_s
from pipeplan.ilp.recompute.search_result import SearchResult
from pipeplan.ilp.runs import Runs
from pipeplan.ilp.schedule import Schedule
from pipeplan.plan import Stage

NAME: Final = "one device"
MORE_ROOM: Final = 1.2
"""The largest budget of a persistent schedule, in those that the GPU has: sizes are rounded up."""
COUNT_S: Final = 1e-3
"""What counting the bytes of a set of runs counts for, where work is counted."""
LAYER_S: Final = 2.5e-3
"""What deciding what leaves counts for, for each layer, where work is counted."""
LOOK_S: Final = 4e-4
"""A first look at that."""
BEST: Final = 6
"""Sets that have more than a look."""
MOST: Final = 64
"""Persistent schedules, evenly spread over all budgets, that are considered there."""


def run(joint: JointIncumbent, offered: StageOptions) -> None:
    """The best plan of one stage, or of several where layers may leave.

    Args:
        joint: hears of it.
        offered: sets of runs that are listed anyway.
    """
    whole = joint.state
    whole.set_phase(NAME)
    room = whole.costs.budgets[0] - whole.costs.segment(0, whole.costs.layers - 1).states
    if room <= 0:
        return
    whole.options.clock.charge(work_s(whole.costs.chain))
    _stay(joint, persistent_runs(whole.costs.chain, int(MORE_ROOM * room)))
    if one_gpu.applies(whole) and whole.uses(one_gpu.NAME):
        _leave(joint, offered)


def _stay(joint: JointIncumbent, sets: Iterator[Runs]) -> None:
    """The first that fits."""
    whole = joint.state
    for runs in sets:
        whole.options.clock.charge(COUNT_S)
        contracted = contract(whole.costs.chain, runs)
        costs = contracted.of(whole.costs)
        schedule = in_one_stage(costs)
        if joint.period is not None and schedule.per_microbatch >= joint.period:
            return
        inner = Incumbent(costs, whole.options, joint.on_report)
        if inner.offer(schedule):
            joint.take(SearchResult(inner, contracted))
            return


def in_one_stage(costs: CostModel) -> Schedule:
    """F, then B, of the whole chain."""
    last = costs.layers - 1
    work = _busy(costs)
    stages = (Stage(id=0, layers=(0, last), gpu=0),)
    return schedule_partition(costs, ContiguousPartition(max(1, work), stages, (work,)))


def _leave(joint: JointIncumbent, offered: StageOptions) -> None:
    """What the GPU recomputes; the rest that does not fit leaves: a look at all, then the best."""
    looked = [(_left(joint, each, quick=True), each) for each in _sets(joint.state.costs, offered)]
    looked.sort(key=itemgetter(0))
    for period, contracted in looked[:BEST]:
        if period < inf:
            _left(joint, contracted, quick=False)


def _left(joint: JointIncumbent, contracted: ContractedChain, *, quick: bool) -> float:
    """The period of a set of runs; infinite where none is found, or none can be the best."""
    whole, costs = joint.state, contracted.of(joint.state.costs)
    known = joint.period is not None
    if joint.interrupted or (known and whole.remaining <= 0):
        return inf
    better = joint.period is None or _busy(costs) < joint.period
    if not better or _least(costs) > costs.budgets[0]:
        return inf
    whole.options.clock.charge((LOOK_S if quick else LAYER_S) * costs.layers)
    inner = Incumbent(costs, whole.options, joint.on_report)
    if not one_gpu.offer(inner, quick=quick) or inner.best is None:
        return inf
    joint.take(SearchResult(inner, contracted))
    return float(inner.best.per_microbatch)


def _sets(costs: CostModel, offered: StageOptions) -> list[ContractedChain]:
    """Of persistent schedules of all budgets, and of the options of one stage.

    Those come first whose work and transfers of what does not fit, both ways, promise most.
    """
    chain, last = costs.chain, costs.layers - 1
    every = list(persistent_runs(chain, _peak(costs)))
    spread = every[:: 1 + len(every) // MOST]
    listed = (offered.runs(0, last, n) for n in range(offered.counts[0, last]))
    chains = [contract(chain, runs) for runs in dict.fromkeys([*spread, *listed])]
    return sorted(chains, key=lambda each: max(_busy(each.of(costs)), _away(each.of(costs))))


def _busy(costs: CostModel) -> int:
    return costs.load_ns(0, costs.layers - 1, 0)


def _peak(costs: CostModel) -> int:
    """Beside the states, in one stage."""
    size = costs.segment(0, costs.layers - 1)
    return max(size.running, size.saved + size.backward)


def _least(costs: CostModel) -> int:
    """Bytes that a layer at work needs at least, if all leaves that may: what runs keep stays."""
    stays = costs.segment(0, costs.layers - 1).states
    least = stays
    for layer, each in enumerate(costs.chain.layers):
        size = costs.segment(layer, layer, layer > 0)
        least = max(least, stays + max(size.running, size.saved + size.backward))
        if layer in costs.recomputed:
            leaves = 0
        else:
            leaves = each.saved_bytes + (inner_bytes(costs.chain, layer) if layer else 0)
        stays += max(0, size.saved - leaves)
    return least


def _away(costs: CostModel) -> int:
    """Ns to the host and back of what one stage lacks."""
    states = costs.segment(0, costs.layers - 1).states
    return 2 * transfer_ns(costs, max(0, states + _peak(costs) - costs.budgets[0]))
