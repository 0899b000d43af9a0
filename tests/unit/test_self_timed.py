"""Eager execution settles into the cycle that pencil and paper give."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest

from pipeplan.plan import OpKind
from pipeplan.self_timed import Order, Step, eager_cycle, eager_pace, staircase

ORDERS: tuple[Order, ...] = ("alternate", "backward")


def _line(durations: list[int], transfer: int | None = None) -> list[Step]:
    """Stages on GPUs 0, 1, ... with F = B = duration; full duplex links if `transfer` is given."""
    count = len(durations)
    steps: list[Step] = []
    for stage, length in enumerate(durations):
        steps.append(Step(OpKind.F, stage, stage, length))
        if transfer is not None and stage + 1 < count:
            steps.append(Step(OpKind.SEND_F, stage, (stage, stage + 1), transfer))
    for stage in reversed(range(count)):
        steps.append(Step(OpKind.B, stage, stage, durations[stage]))
        if transfer is not None and stage:
            steps.append(Step(OpKind.SEND_B, stage, (stage, stage - 1), transfer))
    return steps


def test_one_stage_alternates() -> None:
    """One stage of F = B = 3 repeats every 6 ns, one micro-batch at a time."""
    cycle = eager_cycle(_line([3]), (1,))
    assert cycle is not None
    assert (cycle.k, cycle.period) == (1, 6)
    assert cycle.times[1][0] - cycle.times[0][0] == 3


@pytest.mark.parametrize(("caps", "period"), [((4, 3, 2, 1), 6), ((3, 3, 2, 1), 8)])
def test_figure_four_needs_its_copies(caps: tuple[int, ...], period: int) -> None:
    """Durations 3, 2, 2, 2: the load 6 is reached with four copies in front; three need 18 / 3."""
    cycle = eager_cycle(_line([3, 2, 2, 2]), caps)
    assert cycle is not None
    assert cycle.period >= cycle.k * 6
    assert cycle.period <= cycle.k * period


def test_cap_of_one_serializes() -> None:
    """One micro-batch at a time takes the sum of everything, transfers included."""
    cycle = eager_cycle(_line([3, 2, 2], transfer=1), (1, 1, 1))
    assert cycle is not None
    assert (cycle.k, cycle.period) == (1, 2 * (3 + 2 + 2) + 4 * 1)


def test_cycle_keeps_every_rule() -> None:
    """Within and across periods: order of the chain, one step at a time on each resource, caps."""
    steps, caps = _line([5, 3, 4], transfer=2), (3, 2, 1)
    cycle = eager_cycle(steps, caps)
    assert cycle is not None
    turns = range(4)
    times = [[t + n * cycle.period for n in turns for t in row] for row in cycle.times]
    for before, after, step in zip(times, times[1:], steps, strict=False):
        assert all(a >= b + step.duration for b, a in zip(before, after, strict=True))
    for place in {step.resource for step in steps}:
        used = sorted(
            (time, time + step.duration)
            for row, step in zip(times, steps, strict=True)
            if step.resource == place
            for time in row
        )
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(used))
    forward = next(i for i, s in enumerate(steps) if (s.kind, s.stage) == (OpKind.F, 0))
    for number in range(caps[0], len(times[0])):
        freed = times[-1][number - caps[0]] + steps[-1].duration
        assert times[forward][number] >= freed


def test_caps_between_the_most_in_flight_and_those_given_change_nothing() -> None:
    """The cycle's `most` are reached, and with them as caps the execution is the same."""
    steps, lower = _line([3, 2, 2, 4], transfer=1), 0
    for caps in ((9, 9, 9, 9), (4, 4, 4, 4), (9, 3, 2, 2), (5, 1, 4, 4)):
        for order in ORDERS:
            cycle = eager_cycle(steps, caps, order)
            assert cycle is not None
            assert all(most <= cap for most, cap in zip(cycle.most, caps, strict=True))
            assert eager_cycle(steps, cycle.most, order) == cycle
            lower += cycle.most != caps
    assert lower >= 4


def test_a_pace_is_about_the_period() -> None:
    """Over many micro-batches the pace of the later half comes near to the cycle's period."""
    steps = _line([3, 2, 2, 4], transfer=1)
    for caps in ((9, 9, 9, 9), (2, 2, 2, 2), (4, 3, 2, 1)):
        cycle = eager_cycle(steps, caps)
        pace = eager_pace(steps, caps, "alternate", 200)
        assert cycle is not None
        assert pace is not None
        assert abs(pace - Fraction(cycle.period, cycle.k)) < Fraction(1, 5)


def test_what_stops_has_no_pace() -> None:
    """An execution that comes to a stand tells nothing about periods."""
    assert eager_pace(_line([1, 1]), (1, 2), "strict", 10) is None


def test_strict_order_that_stops_is_no_cycle() -> None:
    """Stage 1 waits for a second forward that stage 0's cap forbids: no cycle, and no hang."""
    assert eager_cycle(_line([1, 1]), (1, 2), "strict") is None


def test_staircase_is_never_below_one() -> None:
    """1F1B's caps fall by one a stage and stay at least one."""
    assert staircase(4, 3) == (3, 2, 1, 1)


def test_no_time_at_all_ends() -> None:
    """Where every step lasts no time there is no period, and the execution still ends."""
    assert eager_cycle(_line([0, 0]), (2, 1)) is None
