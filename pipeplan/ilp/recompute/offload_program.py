"""Cuts, recomputation and offloading decided at once: contiguous 1F1B plans.

`RecomputeDP` with offloading counts no messages, or all of them. Between the two answers each
period is judged by an exact count: the partition is scheduled, and offloads what does not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import ceil

from pipeplan.ilp.clock import OutOfTimeError
from pipeplan.ilp.contiguous.dynamic_program import ContiguousPartition
from pipeplan.ilp.contiguous.partition_schedule import schedule_partition
from pipeplan.ilp.contiguous.small_stages import SmallStages
from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.incumbent import Incumbent
from pipeplan.ilp.recompute.contracted_chain import ContractedChain, contract
from pipeplan.ilp.recompute.dynamic_program import RecomputeDP
from pipeplan.ilp.recompute.joint_incumbent import JointIncumbent
from pipeplan.ilp.recompute.options import StageOptions
from pipeplan.ilp.schedule import Schedule
from pipeplan.plan import Stage

PARTS = 4096
"""The period is found to this part of it."""

Found = tuple[ContractedChain, Schedule]


def shortest_with_offload(
    joint: JointIncumbent, offered: StageOptions, high: int | None, *, needed: bool, small: bool
) -> Found | None:
    """The shortest 1F1B schedule found that fits, with the chain of its runs; None if none does.

    Args:
        joint: costs and limits; it takes what is found on the way.
        offered: what stages may choose, with what can leave of each.
        high: a period that is possible; only shorter ones count. None: any.
        needed: whether no plan is known, so that one is sought beyond the end of the time.
        small: whether GPUs that lack memory have small stages.
    """
    state = joint.state
    solvers = [
        RecomputeDP(
            state.costs,
            state.most_in_flight,
            messages=messages,
            offload=True,
            small=small,
            options=offered,
        )
        for messages in (False, True)
    ]
    low, high = max(1, int(state.bounds["any"])) - 1, high or solvers[0].serial_ns
    best: Found | None = None
    clock, limit = state.options.clock, state.options.time_limit_s

    def over() -> bool:
        return not needed and clock.spent >= limit

    while high - low > max(1, low // PARTS) and (state.remaining > 0 or (needed and best is None)):
        middle = (low + high) // 2
        try:
            found = _found(state, solvers, middle, over)
        except OutOfTimeError:
            break
        if found is None:
            low = middle
        else:
            # Where one k was asked for, the schedule's period is that of k micro-batches.
            high, best = min(middle, ceil(found[1].per_microbatch)), found
            joint.offer(found[0], found[0].of(state.costs), found[1])
    return best


def _found(
    state: Incumbent, solvers: Sequence[RecomputeDP], period: int, over: Callable[[], bool]
) -> Found | None:
    """A schedule of this period that fits.

    Raises:
        OutOfTimeError: if it was over before the answer was found.
    """
    for solver in solvers:
        partition = solver.solve(period, over=over)
        if partition is None:
            # The others ask for more.
            return None
        found = _judged(state, solver, partition, over)
        if found is not None:
            return found
    return None


def _judged(
    state: Incumbent,
    solver: RecomputeDP,
    partition: ContiguousPartition,
    over: Callable[[], bool],
) -> Found | None:
    """The partition as a schedule of the contracted chain, if it fits."""
    chain = contract(state.costs.chain, solver.runs(partition))
    first = {piece[0]: number for number, piece in enumerate(chain.pieces)}
    last = {piece[1]: number for number, piece in enumerate(chain.pieces)}
    stages = tuple(
        Stage(id=stage.id, layers=(first[stage.first], last[stage.last]), gpu=stage.gpu)
        for stage in partition.stages
    )
    mine = ContiguousPartition(partition.period, stages, partition.spans)
    costs = chain.of(state.costs)
    inner = Incumbent(costs, state.options)
    schedules = (
        SmallStages(costs, state.options.clock.charge, over).schedules(mine)
        if solver.small
        else _in_whole_stages(costs, mine)
    )
    if any(map(inner.offer, schedules)):
        assert inner.best is not None
        return chain, inner.best
    return None


def _in_whole_stages(costs: CostModel, partition: ContiguousPartition) -> Iterator[Schedule]:
    for gradients_wait in (True, False):
        yield schedule_partition(costs, partition, gradients_wait=gradients_wait)
