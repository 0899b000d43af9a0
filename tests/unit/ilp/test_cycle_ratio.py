"""Shortest period and earliest times for given orders."""

from __future__ import annotations

import pytest

from pipeplan.cluster import uniform
from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.cpsat.extract import fuse
from pipeplan.ilp.cycle_ratio import instant_ops, minimize_period_for_order
from pipeplan.ilp.schedule import Schedule, chain_ops, to_ops, unrolled
from pipeplan.plan import OpKind, Stage
from tests import handmade

F, B = OpKind.F, OpKind.B


def one_gpu(period: int, times: dict[tuple[OpKind, int], tuple[int, ...]]) -> Schedule:
    """Two stages on one GPU."""
    stages = tuple(Stage(id=i, layers=(i, i), gpu=0) for i in range(2))
    return Schedule(stages, period, 1, times)


def costs() -> CostModel:
    """Two layers of 2 + 3 ns."""
    return CostModel(handmade.chain([(2, 3), (2, 3)]), uniform(1, 100), "2bw", "exact")


def test_tighten_removes_idle_time() -> None:
    """A lazy schedule of 10 ns of work per period of 50 tightens to 10, orders kept."""
    lazy = one_gpu(50, {(F, 0): (0,), (F, 1): (10,), (B, 1): (20,), (B, 0): (30,)})
    tight = minimize_period_for_order(costs(), lazy, 1)
    assert tight.period == 10
    assert tight.times == {(F, 0): (0,), (F, 1): (2,), (B, 1): (4,), (B, 0): (7,)}


def test_tighten_respects_the_lowest_period() -> None:
    """A bound given is not undercut."""
    lazy = one_gpu(50, {(F, 0): (0,), (F, 1): (10,), (B, 1): (20,), (B, 0): (30,)})
    assert minimize_period_for_order(costs(), lazy, 13).period == 13


def test_tighten_lengthens_where_needed() -> None:
    """Orders made with too short durations get the period they need."""
    rough = one_gpu(4, {(F, 0): (0,), (F, 1): (1,), (B, 1): (2,), (B, 0): (3,)})
    assert minimize_period_for_order(costs(), rough, 1).period == 10


def test_orders_that_contradict_each_other_are_refused() -> None:
    """A forward two periods before the one that it needs: no period is long enough."""
    times = {(F, 0): (25,), (F, 1): (0,), (B, 1): (2,), (B, 0): (7,)}
    with pytest.raises(ValueError, match="contradict"):
        minimize_period_for_order(costs(), one_gpu(10, times), 1)


def test_order_across_periods_is_kept() -> None:
    """A backward of the last micro-batch between two forwards stays there."""
    times = {(F, 0): (0,), (F, 1): (5,), (B, 1): (7,), (B, 0): (12,)}
    tight = minimize_period_for_order(costs(), one_gpu(10, times), 1)
    assert tight.period == 10
    assert (tight.times[B, 0][0] - tight.times[F, 0][0]) % 10 == 2


def test_fuse_joins_back_to_back_stages() -> None:
    """Neighbouring stages with nothing in between become one; interleaved ones do not."""
    close = one_gpu(10, {(F, 0): (0,), (F, 1): (2,), (B, 1): (4,), (B, 0): (7,)})
    joined = fuse(close, ())
    assert joined is not None
    assert [stage.layers for stage in joined.stages] == [(0, 1)]
    assert joined.times == {(F, 0): (0,), (B, 0): (4,)}
    apart = one_gpu(10, {(F, 0): (0,), (F, 1): (5,), (B, 1): (7,), (B, 0): (12,)})
    assert fuse(apart, ()) is None


@pytest.mark.parametrize(("last", "joins"), [(40, False), (48, True)])
def test_what_begins_with_an_op_of_no_length_is_behind_it(last: int, joins: bool) -> None:
    """B of stage 3 takes no time: where F of stage 0 begins with it, B of stage 2 is apart."""
    chain = handmade.chain([(8, 14), (5, 0), (6, 12), (0, 0)])
    stages = tuple(Stage(id=i, layers=(i, i), gpu=gpu) for i, gpu in enumerate((0, 1, 0, 0)))
    starts = {(F, 0): 0, (F, 1): 11, (F, 2): 20, (F, 3): 26}
    starts |= {(B, 3): last, (B, 2): 48, (B, 1): 62, (B, 0): 66}
    split = Schedule(stages, 40, 1, {op: (time,) for op, time in starts.items()})
    of = CostModel(chain, uniform(2, 100), "2bw", "exact")
    fused = fuse(split, instant_ops(of, stages))
    assert (fused is not None) == joins
    if fused is not None:
        assert [stage.layers for stage in fused.stages] == [(0, 0), (1, 1), (2, 3)]


def test_unrolled_doubles_the_period() -> None:
    """The same plan with two micro-batches a period has copies one old period apart."""
    two = unrolled(one_gpu(10, {(F, 0): (0,), (F, 1): (2,), (B, 1): (4,), (B, 0): (7,)}), 2)
    assert (two.period, two.k) == (20, 2)
    assert two.times[B, 0] == (7, 17)


def test_normal_form() -> None:
    """Ops of a plan start within the period; the smallest shift is 0."""
    late = one_gpu(10, {(F, 0): (30,), (F, 1): (32,), (B, 1): (44,), (B, 0): (47,)})
    ops = to_ops(costs(), late)
    assert {op.label: (op.shift, op.start_ns) for op in ops} == {
        "0F0": (0, 0),
        "1F0": (0, 2),
        "1B0": (1, 4),
        "0B0": (1, 7),
    }


def test_chain_order() -> None:
    """Sends stand between stages of different GPUs only, in both directions."""
    stages = tuple(Stage(id=i, layers=(i, i), gpu=g) for i, g in enumerate((0, 1, 1)))
    labels = [f"{stage}{kind}" for kind, stage in chain_ops(stages)]
    assert labels == ["0F", "0SEND_F", "1F", "2F", "2B", "1B", "1SEND_B", "0B"]
