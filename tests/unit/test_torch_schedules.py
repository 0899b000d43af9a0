"""Schedules of torch.distributed.pipelining as lists: its orders, those that are ours, errors."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from torch.distributed.pipelining import schedules

from pipeplan.baselines import flush, interleaved
from pipeplan.baselines.listed import ListedOp, Lists
from pipeplan.baselines.timed import Setting
from pipeplan.cluster import uniform
from pipeplan.compare.families import listed
from pipeplan.compare.rows import check
from pipeplan.errors import InputError
from pipeplan.plan import OpKind
from pipeplan.torch_schedules import TORCH_SCHEDULES, torch_lists
from tests.baselines import AMPLE, chain, judged_step, setting

SHAPES = [(2, 4), (3, 6), (4, 8), (4, 16)]
"""(GPUs, micro-batches)."""


def text(lists: Lists) -> list[str]:
    """`0F0 1I2` per rank, as torch writes its actions."""
    return [" ".join(f"{s}{kind}{m}" for kind, s, m in each) for each in lists]


@pytest.mark.parametrize(("gpus", "microbatches"), SHAPES)
def test_ours_are_torchs(gpus: int, microbatches: int) -> None:
    """GPipe, 1F1B and interleaved 1F1B of two to four stages per GPU: op by op."""

    def torchs(name: str, stages: int) -> list[list[ListedOp]]:
        return torch_lists(gpus, microbatches, name, stages)

    assert torchs("GPipe", 1) == flush.gpipe(gpus, microbatches)
    assert torchs("1F1B", 1) == flush.one_f_one_b(gpus, microbatches)
    for chunks in (2, 3, 4):
        ours = interleaved.looped(gpus, microbatches, chunks=chunks)
        assert torchs("Interleaved1F1B", chunks) == ours


@pytest.mark.parametrize(("gpus", "microbatches"), [(4, 2), (4, 6), (4, 10), (3, 8), (2, 5)])
def test_rounds_of_interleaved_1f1b_are_torchs(gpus: int, microbatches: int) -> None:
    """Of more or fewer micro-batches than GPUs, too; what torch refuses is refused."""
    try:
        torchs = torch_lists(gpus, microbatches, "Interleaved1F1B", 2)
    except InputError:
        with pytest.raises(InputError, match="need a multiple of"):
            interleaved.looped(gpus, microbatches, chunks=2)
    else:
        assert interleaved.looped(gpus, microbatches, chunks=2) == torchs


def test_lists_are_in_the_order_that_torch_prints() -> None:
    """Two ranks: what `pipeline_order` of torch 2.13 prints, overlaps as F then B."""
    assert text(torch_lists(2, 4, "ZBVZeroBubble", 2)) == [
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3"
        " 0I2 0W2 0I3 0W3",
        "1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3"
        " 1I3 1W2 2W3 1W3",
    ]
    assert text(torch_lists(2, 4, "DualPipeV", 2)) == [
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0 3B2 3F3 0B1 3B3 0I2 0W2 0I3 0W3",
        "1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 2B2 1B2 2I3 1I3 2W3 1W3",
    ]
    assert text(torch_lists(2, 2, "InterleavedZeroBubble", 2)) == [
        "0F0 0F1 2F0 2F1 2I0 2W0 2I1 2W1 0I0 0W0 0I1 0W1",
        "1F0 1F1 3F0 3I0 3F1 3I1 3W0 1I0 3W1 1I1 1W0 1W1",
    ]


def test_backwards_of_looped_bfs_come_in_the_order_of_micro_batches() -> None:
    """Torch runs the last micro-batch's backward first, (R5) asks for the first one's."""
    assert text(torch_lists(2, 3, "LoopedBFS", 2)) == [
        "0F0 0F1 0F2 2F0 2F1 2F2 2B0 2B1 2B2 0B0 0B1 0B2",
        "1F0 1F1 1F2 3F0 3F1 3F2 3B0 3B1 3B2 1B0 1B1 1B2",
    ]


@pytest.mark.parametrize("name", sorted(TORCH_SCHEDULES.keys() - {"torch, looped BFS"}))
@pytest.mark.parametrize(("gpus", "microbatches"), SHAPES)
def test_elsewhere_numbers_are_torchs(name: str, gpus: int, microbatches: int) -> None:
    """Numbered by order or by torch, the lists are the same."""
    for schedule in TORCH_SCHEDULES[name]:
        stages = len(schedule.place(gpus)) // gpus
        made = schedule.lists.keywords["name"]  # type: ignore[attr-defined]
        shown = [" ".join(_flat(rank)) for rank in _orders(made, gpus, stages, microbatches)]
        assert text(schedule.lists(gpus, microbatches)) == shown


def _orders(name: str, gpus: int, stages: int, microbatches: int) -> list[list[Any]]:
    """Torch's own order, each rank from a schedule that is made for it."""
    orders = []
    for rank in range(gpus):
        own = [_Stage(gpus * stages, gpus, rank) for _ in range(stages)]
        made = getattr(schedules, f"Schedule{name}")(own, microbatches)
        orders.append(made.pipeline_order[rank])
    return orders


class _Stage:
    """What a schedule reads of a stage when it is made."""

    submod = None

    def __init__(self, num_stages: int, group_size: int, group_rank: int) -> None:
        self.num_stages, self.group_size, self.group_rank = num_stages, group_size, group_rank


def _flat(actions: list[Any]) -> list[str]:
    """Printed computes; those that overlap one after the other."""
    found: list[str] = []
    for action in actions:
        if action is not None:
            found += _flat(action.sub_actions) if action.sub_actions else [str(action)]
    return found


@pytest.mark.parametrize("name", TORCH_SCHEDULES)
def test_every_voice_accepts_them_as_step_plans(name: str) -> None:
    """On an uneven chain over slow links, 3 GPUs: rules, period and peaks."""
    loads = [(2, 4), (1, 5), (3, 3), (2, 6)] * 4
    of = chain(loads, sizes=[5, 1, 3, 0] * 4, saved=9, weight_ns=2, saved_for_weight=4)
    cluster = uniform(3, AMPLE, bandwidth_bytes_per_s=10**9, duplex="half")
    rows = list(listed(*TORCH_SCHEDULES[name])(Setting(of, cluster), name, 6))
    assert len(rows) >= len(TORCH_SCHEDULES[name])
    for row in rows:
        check(row)
        split = [stage.split_backward for stage in row.plan.stages]
        assert split[0] is False
        assert any(split) == (name != "torch, looped BFS")


def test_steps_on_equal_stages() -> None:
    """4 GPUs, 8 micro-batches, f = i = w = 2 per stage, two stages per GPU: 96 of work.

    Looped BFS idles (P - 1)(f + b) like GPipe of stages of half the size; ZBV at most P - 1 units.
    """
    of = setting(chain([(2, 4)] * 8, weight_ns=2, saved_for_weight=0), 4)
    loop, v = interleaved.looped_gpus(4, 2), interleaved.v_gpus(4)
    bfs = judged_step(of, torch_lists(4, 8, "LoopedBFS", 2), 8, loop)
    zbv = judged_step(of, torch_lists(4, 8, "ZBVZeroBubble", 2), 8, v)
    assert bfs.step_ns == 96 + 3 * 6
    assert zbv.step_ns == 96 + 3 * 2
    assert OpKind.W in {op.kind for op in zbv.ops}


def test_what_a_class_is_not_made_for_is_its_own_reason() -> None:
    """DualPipeV wants as many micro-batches as stages, in torch's words."""
    with pytest.raises(InputError, match=r"DualPipeV: .*at least as many microbatches"):
        torch_lists(4, 4, "DualPipeV", 2)


def test_without_torch_the_reason_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """No torch: what is missing and what installs it."""
    monkeypatch.setitem(sys.modules, "torch.distributed.pipelining", None)
    with pytest.raises(InputError, match=r"got no torch here .*pip install"):
        torch_lists(2, 4, "ZBVZeroBubble", 2)


def test_another_interface_of_torch_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class that is gone, or one without an order: the name, what came, what is needed."""
    with pytest.raises(InputError, match=r"Zigzag: .*ScheduleZigzag.* torch 2\.13"):
        torch_lists(2, 4, "Zigzag", 2)
    monkeypatch.delattr(schedules.ScheduleGPipe, "_get_pipeline_order")
    with pytest.raises(InputError, match=r"GPipe: got .* need its classes"):
        torch_lists(2, 4, "GPipe", 1)
