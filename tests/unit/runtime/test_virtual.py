"""On the virtual clock the executor does what the simulator says, to the nanosecond."""

from __future__ import annotations

from fractions import Fraction

import pytest

from pipeplan import lowering
from pipeplan.plan import Plan
from pipeplan.testing import plans
from pipeplan.testing.in_process import run_ranks
from tests import dry_runs, grids
from tests.host_updates import beside

SIZES = (1, 2, 3, 4, 5, 8, 12, 16)


def drawn(seed: int) -> Plan:
    """A random valid plan for up to 16 GPUs, k up to 3, both semantics, both duplexes."""
    gpus = SIZES[seed % len(SIZES)]
    return plans.random_plan(seed, gpus=gpus, layers=max(3, gpus + seed % 7))


@grids.first(24, seed=range(42))
def test_every_action_ends_when_the_simulator_says(seed: int) -> None:
    """All ends of all actions of all ranks over three steps: difference 0."""
    plan = drawn(seed)
    pattern = lowering.lower(plan)
    got = run_ranks(len(plan.cluster.gpus), lambda rank: dry_runs.ran(plan, pattern, 3, rank))
    assert got == dry_runs.simulated(plan, pattern, 3)


@grids.first(12, seed=range(300, 324))
def test_copies_to_the_host_keep_the_simulators_time(seed: int) -> None:
    """OFFLOAD, FREE_O and PREFETCH of plans that offload, on both duplexes: difference 0."""
    gpus = SIZES[seed % len(SIZES)]
    plan = plans.random_plan(seed, gpus=gpus, layers=gpus + 4, memory_model="exact", offload=True)
    pattern = lowering.lower(plan)
    got = run_ranks(gpus, lambda rank: dry_runs.ran(plan, pattern, 3, rank))
    assert got == dry_runs.simulated(plan, pattern, 3)


@pytest.mark.parametrize("seed", range(8))
def test_updates_beside_keep_the_simulators_time(seed: int) -> None:
    """(U7): what the host does behind an update, and who waits for it: difference 0."""
    gpus = SIZES[seed % 4]
    plan = beside(seed, gpus)
    pattern = lowering.lower(plan)
    got = run_ranks(gpus, lambda rank: dry_runs.ran(plan, pattern, 3, rank))
    assert got == dry_runs.simulated(plan, pattern, 3)


@grids.first(8, seed=range(100, 116))
def test_steady_period_is_never_above_the_planned_one(seed: int) -> None:
    """No action ends later than planned, and the last periods take at most the planned one."""
    plan, pattern = dry_runs.without_updates(drawn(seed), 12)
    got = run_ranks(
        len(plan.cluster.gpus),
        lambda rank: dry_runs.ran(plan, pattern, 1, rank, updates=False),
    )
    assert got == dry_runs.simulated(plan, pattern, 1, updates=False)
    ends = {name: end for rank in got for name, end in rank}
    for op in plan.ops:
        if not op.kind.is_compute:
            continue
        flow = [ends[f"{op.stage}{op.kind}{m}"] for m in range(plan.microbatches)]
        for microbatch, end in enumerate(flow):
            if microbatch % plan.k == op.copy_:
                begin = (microbatch // plan.k + op.shift) * plan.period_ns + op.start_ns
                assert end <= begin + op.duration_ns
        half = plan.microbatches // plan.k // 2
        period = Fraction(flow[-1] - flow[-1 - half * plan.k], half)
        assert period <= plan.period_ns


def test_a_wrong_order_is_noticed() -> None:
    """The comparison can fail: with one op a nanosecond longer, ends differ."""
    plan = drawn(3)
    pattern = lowering.lower(plan)
    ops = [
        op.model_copy(update={"duration_ns": op.duration_ns + (op.label == "0F0")})
        for op in plan.ops
    ]
    slower = plan.model_copy(update={"ops": tuple(ops)})
    got = run_ranks(len(plan.cluster.gpus), lambda rank: dry_runs.ran(slower, pattern, 3, rank))
    assert got != dry_runs.simulated(plan, pattern, 3)
