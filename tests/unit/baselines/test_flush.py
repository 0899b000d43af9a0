"""Schedules with a flush: known bubble formulas, hand-worked cases, every voice's consent."""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import ceil

import pytest

from pipeplan import verifier
from pipeplan.baselines import flush, interleaved, splits
from pipeplan.baselines.listed import listed_plan
from pipeplan.errors import DeadlockError, InputError
from pipeplan.plan import OpKind, Plan
from tests.baselines import chain, judged_step, random_chain, runs, setting, splits_of

SHAPES = [(2, 2), (2, 6), (3, 9), (4, 4), (4, 8), (8, 16)]
"""(GPUs, micro-batches)."""
GBYTES = 10**9


@pytest.mark.parametrize(("gpus", "microbatches"), SHAPES)
def test_gpipe_and_1f1b_take_the_known_time(gpus: int, microbatches: int) -> None:
    """A step takes (m + P - 1) * (f + b) on equal stages; GPipe keeps m copies, 1F1B P - s."""
    of = setting(chain([(2, 4)] * gpus), gpus)
    gpipe = judged_step(of, flush.gpipe(gpus, microbatches), microbatches, range(gpus))
    one = judged_step(of, flush.one_f_one_b(gpus, microbatches), microbatches, range(gpus))
    assert gpipe.step_ns == one.step_ns == (microbatches + gpus - 1) * 6
    assert verifier.audit(gpipe).in_flight == (microbatches,) * gpus
    caps = tuple(min(microbatches, gpus - stage) for stage in range(gpus))
    assert verifier.audit(one).in_flight == caps


@pytest.mark.parametrize(("gpus", "microbatches"), SHAPES)
@pytest.mark.parametrize("chunks", [2, 3])
def test_interleaving_divides_the_bubble(gpus: int, microbatches: int, chunks: int) -> None:
    """A step takes m * (f + b) + (P - 1) * (f + b) / v, where a GPU's f + b is v stages of 6."""
    of = setting(chain([(2, 4)] * (gpus * chunks)), gpus)
    plan = judged_step(
        of,
        interleaved.looped(gpus, microbatches, chunks=chunks),
        microbatches,
        interleaved.looped_gpus(gpus, chunks),
    )
    assert plan.step_ns == microbatches * 6 * chunks + (gpus - 1) * 6


@pytest.mark.parametrize(("gpus", "microbatches"), [(2, 6), (3, 9), (4, 8), (8, 16)])
def test_a_v_is_as_short_as_a_loop_with_two_rounds_in_flight(gpus: int, microbatches: int) -> None:
    """With 2 P micro-batches in flight, m * (f + b) + (P - 1) * (f + b) / 2; with P it waits."""
    of = setting(chain([(2, 4)] * (2 * gpus)), gpus)
    places = interleaved.v_gpus(gpus)
    full = judged_step(
        of, interleaved.v_shaped(gpus, microbatches, rounds=2), microbatches, places
    )
    half = judged_step(
        of, interleaved.v_shaped(gpus, microbatches, rounds=1), microbatches, places
    )
    assert full.step_ns == microbatches * 12 + (gpus - 1) * 6
    assert half.step_ns > full.step_ns
    assert max(verifier.audit(half).in_flight) <= gpus


def test_transfers_fill_and_drain_too() -> None:
    """GPipe on 2 stages (f = 2, b = 4) with transfers of 3 ns, 2 micro-batches, worked by hand.

    F0 0-2 2-4, sends 2-5 5-8, F1 5-7 8-10, B1 10-14 14-18, sends 14-17 18-21, B0 17-21 21-25.
    """
    of = setting(chain([(2, 4), (2, 4)], sizes=[3, 0]), 2, bandwidth=GBYTES)
    plan = judged_step(of, flush.gpipe(2, 2), 2, range(2))
    assert plan.step_ns == 25
    starts = {(op.kind, op.stage, op.copy_): op.start_ns for op in plan.ops if op.kind.is_compute}
    assert [starts[OpKind.F, 1, m] for m in range(2)] == [5, 8]
    assert [starts[OpKind.B, 0, m] for m in range(2)] == [17, 21]


def test_1f1b_with_a_flush_on_unequal_stages() -> None:
    """Stages of (2, 3) and (1, 2), three micro-batches, worked by hand.

    Stage 0: F 0-2 2-4, B 5-8, F 8-10, B 10-13 13-16. Stage 1: F 2-3, B 3-5, F 5-6, B 6-8, F 10-11,
    B 11-13: it idles 8-10, when stage 0 has done a backward first.
    """
    of = setting(chain([(2, 3), (1, 2)]), 2)
    plan = judged_step(of, flush.one_f_one_b(2, 3), 3, range(2))
    assert plan.step_ns == 16
    assert starts_of(plan, 0) == ([0, 2, 8], [5, 10, 13])
    assert starts_of(plan, 1) == ([2, 5, 10], [3, 6, 11])


def test_a_loop_of_unequal_stages() -> None:
    """Stages (1, 1) (2, 2) (1, 2) (1, 3) on GPUs 0, 1, 0, 1, two micro-batches, worked by hand.

    GPU 0: F0 0-1 1-2, F2 3-4 5-6, B2 9-11 13-15, B0 15-16 17-18.
    GPU 1: F1 1-3 3-5, F3 5-6, B3 6-9, F3 9-10, B3 10-13, B1 13-15 15-17.
    """
    of = setting(chain([(1, 1), (2, 2), (1, 2), (1, 3)]), 2)
    plan = judged_step(of, interleaved.looped(2, 2, chunks=2), 2, interleaved.looped_gpus(2, 2))
    assert plan.step_ns == 18
    assert [starts_of(plan, stage) for stage in range(4)] == [
        ([0, 1], [15, 17]),
        ([1, 3], [13, 15]),
        ([3, 5], [9, 13]),
        ([5, 9], [6, 10]),
    ]


def test_a_v_with_one_round_in_flight() -> None:
    """Stages of (1, 2) on GPUs 0, 1, 1, 0, two micro-batches at once, worked by hand.

    GPU 0: F0 0-1 1-2, F3 3-4, B3 4-6, F3 6-7, B3 7-9, B0 10-12 14-16.
    GPU 1: F1 1-2, F2 2-3, F1 3-4, F2 4-5, B2 6-8, B1 8-10, B2 10-12, B1 12-14.
    """
    of = setting(chain([(1, 2)] * 4), 2)
    plan = judged_step(of, interleaved.v_shaped(2, 2, rounds=1), 2, interleaved.v_gpus(2))
    assert plan.step_ns == 16
    assert [starts_of(plan, stage) for stage in range(4)] == [
        ([0, 1], [10, 14]),
        ([1, 3], [8, 12]),
        ([2, 4], [6, 10]),
        ([3, 6], [4, 7]),
    ]


def starts_of(plan: Plan, stage: int) -> tuple[list[int], list[int]]:
    """When the forwards and the backwards of a stage start, by micro-batch."""
    of = {(op.kind, op.copy_): op.start_ns for op in plan.ops if op.stage == stage}
    forwards, backwards = (
        [of[kind, copy] for copy in range(plan.k)] for kind in (OpKind.F, OpKind.B)
    )
    return forwards, backwards


def test_lists_that_wait_for_each_other_are_refused() -> None:
    """Backwards before forwards deadlock; lists that leave out an op or too many are refused."""
    of = setting(chain([(1, 1), (1, 1)]), 2)
    outline = of.outline(splits.to_stages((1, 2)), "flush", "test")
    lists = [[*reversed(steps)] for steps in flush.gpipe(2, 1)]
    with pytest.raises(DeadlockError):
        listed_plan(outline, lists, 1)
    with pytest.raises(InputError, match="1 to 1024"):
        listed_plan(outline, flush.gpipe(2, 1), 1025)
    with pytest.raises(InputError, match="multiple"):
        interleaved.looped(2, 5, chunks=2)


def test_splits_are_balanced() -> None:
    """Equal counts, equal parameters, equal times, each by hand; as many runs as asked for."""
    of = chain([(1, 1), (1, 1), (4, 4), (1, 1), (1, 1)])
    heavy = of.model_copy(
        update={
            "layers": tuple(
                layer.model_copy(update={"weight_bytes": size})
                for layer, size in zip(of.layers, (9, 1, 1, 1, 6), strict=True)
            )
        }
    )
    assert splits.uniform_split(of, 2) == [3, 5]
    assert splits.time_balanced(of, (1, 1, 1)) == [2, 3, 5]
    assert splits.parameter_balanced(heavy, 2) == [1, 5]
    ends = splits.balanced([0, 0, 0, 5], 3)
    assert len(ends) == 3
    assert ends[-1] == 4
    assert sorted(set(ends)) == ends
    with pytest.raises(InputError, match="1 to 5"):
        splits.uniform_split(of, 6)


@pytest.mark.parametrize("seed", range(20))
def test_no_split_is_more_balanced(seed: int) -> None:
    """Of all splits into as many runs none has a smaller largest sum."""
    source = random.Random(seed)
    sizes = [source.choice((0, 1, 2, 5, 9)) for _ in range(8)]
    for parts in range(1, 9):
        ends = splits.balanced(sizes, parts)
        assert ends in [list(every) for every in splits_of(8, parts)]
        assert largest(sizes, ends) == min(largest(sizes, every) for every in splits_of(8, parts))


@pytest.mark.parametrize("seed", range(6))
def test_no_split_is_more_balanced_on_gpus_that_differ(seed: int) -> None:
    """Times count on the GPU of the stage: half as many on one of half the speed."""
    source = random.Random(seed)
    of = random_chain(seed, 7)
    times = [layer.forward_ns + layer.backward_ns for layer in of.layers]
    for parts in range(2, 8):
        speeds = [source.choice((0.5, 1.0, 2.0)) for _ in range(parts - 1)] + [3.0]

        def longest(ends: Sequence[int], speeds: Sequence[float] = speeds) -> int:
            pairs = zip(runs(ends), speeds, strict=True)
            return max(ceil(sum(times[slice(*run)]) / speed) for run, speed in pairs)

        ends = splits.time_balanced(of, speeds)
        assert longest(ends) == min(map(longest, splits_of(7, parts)))


def largest(sizes: Sequence[int], ends: Sequence[int]) -> int:
    """The largest sum of a run."""
    return max(sum(sizes[begin:end]) for begin, end in runs(ends))
