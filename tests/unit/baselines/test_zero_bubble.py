"""Schedules that split backwards: known steps and bytes on equal stages, hand-worked cases."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import pytest

from pipeplan import verifier
from pipeplan.baselines import flush, interleaved, splits, zerobubble
from pipeplan.baselines.building_blocks import v_half, v_min, zb_v
from pipeplan.baselines.listed import ListedOp, Lists, listed_plan
from pipeplan.baselines.timed import Setting
from pipeplan.chain import Chain
from pipeplan.errors import InputError
from pipeplan.plan import OpKind, Plan
from tests import grids
from tests.baselines import chain, judged_step, random_chain, setting

SHAPES = [(2, 2), (2, 6), (3, 9), (4, 4), (4, 8), (5, 7), (8, 16)]
"""(GPUs, micro-batches)."""
GBYTES = 10**9
KEPT = {OpKind.F: 1, OpKind.I: 0, OpKind.W: -1, OpKind.B: -1}
"""Stages' micro-batches that an op adds to what a GPU keeps."""


def thirds(stages: int, *, saved: int = 0) -> Chain:
    """Equal layers of f = i = w = 2 ns that keep `saved` bytes from F to W."""
    return chain([(2, 4)] * stages, weight_ns=2, saved=saved, saved_for_weight=saved)


def most_kept(lists: Lists) -> int:
    """The most stages' micro-batches that a GPU has between F and W."""
    return max(max(accumulate(KEPT[kind] for kind, _, _ in each)) for each in lists)


def spans(plan: Plan) -> list[int]:
    """Per GPU, from the start of its first compute to the end of its last one."""
    ops = [[op for op in plan.ops if op.gpu == gpu] for gpu in range(len(plan.cluster.gpus))]
    return [
        max(op.start_ns + op.duration_ns for op in own) - min(op.start_ns for op in own)
        for own in ops
    ]


@pytest.mark.parametrize(("gpus", "microbatches"), SHAPES)
def test_zb_h1_takes_the_known_time_within_the_bytes_of_1f1b(gpus: int, microbatches: int) -> None:
    """A step takes m * (f + i + w) + (P - 1) * (f + i - w); no GPU keeps more than P copies."""
    of = setting(thirds(gpus, saved=100), gpus)
    lists = zerobubble.zb_h1(gpus, microbatches)
    plan = judged_step(of, lists, microbatches, range(gpus))
    assert plan.step_ns == microbatches * 6 + (gpus - 1) * 2
    assert most_kept(lists) == min(gpus, microbatches)
    assert max(row.peak_bytes for row in plan.memory) == 100 * min(gpus, microbatches)


@pytest.mark.parametrize(("gpus", "microbatches"), [(2, 3), (2, 6), (3, 9), (4, 8), (8, 16)])
def test_zb_h2_leaves_no_gpu_idle_between_its_first_and_its_last_op(
    gpus: int, microbatches: int
) -> None:
    """Each GPU takes m * (f + i + w), the source's step; the last one begins (P - 1) * f late.

    That holds from 2 P - 1 micro-batches on, of which no GPU keeps more.
    """
    of = setting(thirds(gpus), gpus)
    lists = zerobubble.zb_h2(gpus, microbatches)
    plan = judged_step(of, lists, microbatches, range(gpus))
    assert spans(plan) == [microbatches * 6] * gpus
    assert plan.step_ns == microbatches * 6 + (gpus - 1) * 2
    assert most_kept(lists) == 2 * gpus - 1


@pytest.mark.parametrize(("gpus", "microbatches"), SHAPES)
@pytest.mark.parametrize(
    ("lists", "kept", "idle"),
    [
        (zb_v, lambda gpus: 2 * gpus, lambda gpus: gpus - 1),
        (v_half, lambda gpus: 2 * ((gpus + 2) // 2), lambda gpus: 3 * (gpus - 1)),
        (v_min, lambda gpus: 2 * ((gpus + 4) // 3), lambda gpus: 4 * gpus - 3),
    ],
)
def test_vs_keep_and_idle_what_their_source_says(
    gpus: int,
    microbatches: int,
    lists: Callable[[int, int], list[list[ListedOp]]],
    kept: Callable[[int], int],
    idle: Callable[[int], int],
) -> None:
    """Kept: P, (P + 2) // 2, (P + 4) // 3; idle units: P - 1, at most 3 (P - 1), 4 P - 3."""
    of = setting(thirds(2 * gpus, saved=100), gpus)
    found = lists(gpus, microbatches)
    plan = judged_step(of, found, microbatches, interleaved.v_gpus(gpus))
    load = microbatches * 12
    assert plan.step_ns <= load + 2 * idle(gpus)
    if lists is zb_v and microbatches >= gpus:
        assert plan.step_ns == load + 2 * idle(gpus)
    if microbatches >= 2 * gpus:
        assert most_kept(found) == kept(gpus)
    assert most_kept(found) <= kept(gpus)


def test_less_memory_takes_more_time() -> None:
    """On 8 GPUs with 16 micro-batches: ZB-V, V-Half, V-Min in this order, all before 1F1B."""
    steps = []
    for lists in (zb_v, v_half, v_min):
        of = setting(thirds(16), 8)
        steps.append(judged_step(of, lists(8, 16), 16, interleaved.v_gpus(8)).step_ns)
    of = setting(chain([(4, 8)] * 8), 8)
    steps.append(judged_step(of, flush.one_f_one_b(8, 16), 16, range(8)).step_ns)
    assert steps == [192 + 14, 192 + 42, 192 + 54, 192 + 84]


@grids.each_value(seed=range(8), name=["h1", "h2", "v", "half", "min"])
def test_the_voices_agree_on_uneven_chains(seed: int, name: str) -> None:
    """Random loads, sizes and bytes over slow links: every rule holds, period and peaks agree."""
    gpus, microbatches = 3, 2 + seed % 5
    lists, places = {
        "h1": (zerobubble.zb_h1, range(gpus)),
        "h2": (zerobubble.zb_h2, range(gpus)),
        "v": (zb_v, interleaved.v_gpus(gpus)),
        "half": (v_half, interleaved.v_gpus(gpus)),
        "min": (v_min, interleaved.v_gpus(gpus)),
    }[name]
    of = random_chain(seed, len(places))
    layers = tuple(
        layer.model_copy(
            update={
                "backward_weight_ns": layer.backward_ns * (index % 4) // 3,
                "saved_for_weight_bytes": layer.saved_bytes // 2,
            }
        )
        for index, layer in enumerate(of.layers)
    )
    split = setting(of.model_copy(update={"layers": layers}), gpus, bandwidth=GBYTES)
    plan = judged_step(split, lists(gpus, microbatches), microbatches, places)
    for stage in plan.stages:
        assert stage.split_backward == (stage.id > 0 and layers[stage.id].backward_weight_ns != 0)
    assert all(op.shift == 0 for op in plan.ops), "a step plan (T6)"


def test_weight_gradients_of_no_length_leave_1f1b() -> None:
    """No stage but one is split, and I stands where B would: the plan of the 1F1B lists."""
    of = chain([(2, 3), (1, 4), (3, 3)], sizes=[5, 3, 0], weight=7, saved=11, weight_ns=0)
    last = of.layers[2].model_copy(update={"backward_weight_ns": 1, "saved_for_weight_bytes": 0})
    first = of.model_copy(update={"layers": (*of.layers[:2], last)})
    split = setting(first, 3, bandwidth=GBYTES)
    whole = judged_step(split, flush.one_f_one_b(3, 6), 6, range(3))
    plan = judged_step(split, zerobubble.zb_h1(3, 6), 6, range(3))
    assert [stage.split_backward for stage in plan.stages] == [False, False, True]
    kinds = {(op.kind, op.stage) for op in plan.ops if op.kind.is_compute}
    assert kinds == {(OpKind(kind), s) for s in (0, 1) for kind in "FB"} | {
        (OpKind(kind), 2) for kind in "FIW"
    }
    assert plan.step_ns <= whole.step_ns


def test_bytes_from_i_to_w_are_what_weights_need() -> None:
    """Two stages: stage 1 keeps 100 from F to I and 40 from I to W, stage 0 all until B.

    Two micro-batches. Stage 1: F0 1-2, I0 2-3, F1 3-4, I1 4-5, W0 5-6, W1 6-7: at I1 it has 100
    of micro-batch 1 and 40 of micro-batch 0. Stage 0: F0 0-1, F1 1-2, B0 3-5, B1 5-7.
    """
    of = setting(chain([(1, 2), (1, 2)], weight_ns=1, saved=100, saved_for_weight=40), 2)
    plan = judged_step(of, zerobubble.zb_h1(2, 2), 2, range(2))
    assert plan.step_ns == 7
    starts = {op.label: op.start_ns for op in plan.ops if op.kind.is_compute}
    assert starts == {
        **{"0F0": 0, "0F1": 1, "0B0": 3, "0B1": 5},
        **{"1F0": 1, "1I0": 2, "1F1": 3, "1I1": 4, "1W0": 5, "1W1": 6},
    }
    assert [row.peak_bytes for row in plan.memory] == [200, 140]


def test_the_first_stage_is_whole_where_w_is_listed() -> None:
    """Nobody waits for I of the first stage: B stands where its W does."""
    listed: Lists = [
        [(OpKind(kind), int(s), 0) for s, kind in ("0F", "3F", "3I", "0I", "3W", "0W")],
        [(OpKind.F, 1, 0), (OpKind.F, 2, 0), (OpKind.B, 2, 0), (OpKind.B, 1, 0)],
    ]
    plan = judged_step(setting(thirds(4), 2), listed, 1, interleaved.v_gpus(2))
    order = sorted((op.start_ns, op.label) for op in plan.ops if op.gpu == 0)
    assert [label for _, label in order] == ["0F0", "3F0", "3I0", "3W0", "0B0"]


@pytest.mark.parametrize(
    ("why", "words"),
    [
        ("no halves", "all tell backward_weight_ns"),
        ("paper", "need the exact one"),
    ],
)
def test_chains_that_tell_no_halves_are_refused(why: str, words: str) -> None:
    """What a split backward takes is unknown: the schedule says why and gives no plan."""
    of = chain([(1, 2)] * 2) if why == "no halves" else thirds(2)
    model = "paper" if why == "paper" else "exact"
    outline = Setting(of, setting(of, 2).cluster, model).outline(
        splits.to_stages((1, 2)), "flush", "test"
    )
    with pytest.raises(InputError, match=words):
        listed_plan(outline, zerobubble.zb_h1(2, 2), 2)


def test_a_layer_without_halves_keeps_its_stage_whole() -> None:
    """Profiled chains tell no halves of layer 0: the first stage is whole, the others split."""
    of = thirds(4)
    bare = of.layers[0].model_copy(
        update={"backward_weight_ns": None, "saved_for_weight_bytes": None}
    )
    profiled = of.model_copy(update={"layers": (bare, *of.layers[1:])})
    plan = judged_step(setting(profiled, 4), zerobubble.zb_h1(4, 8), 8, range(4))
    assert [stage.split_backward for stage in plan.stages] == [False, True, True, True]
    assert plan.step_ns == 8 * 6 + 3 * 2
    assert verifier.audit(plan).in_flight[0] == 4
