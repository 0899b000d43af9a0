"""Joins of chains against exhaustive search, and the paper's figures."""

from __future__ import annotations

import heapq
import time
from functools import cache
from itertools import combinations_with_replacement, count
from math import inf

import pytest

from pipeplan.errors import InfeasibleError, InputError, InvalidPlanError
from pipeplan.remat.checkpointing.join_network import JoinProgram, JoinTimes, least_slots
from pipeplan.remat.checkpointing.join_replay import JoinKind, JoinStep, effect, replay_join
from pipeplan.remat.checkpointing.revolve import opt_0

TIMES = (JoinTimes(1, 1, 1), JoinTimes(3, 1, 2), JoinTimes(2, 5, 0))
SMALL = [
    lengths
    for branches, most, total in ((1, 4, 4), (2, 3, 6), (3, 2, 4))
    for lengths in combinations_with_replacement(range(most + 1), branches)
    if sum(lengths) <= total
]


def _time(step: JoinStep, times: JoinTimes) -> float:
    if step.kind in (JoinKind.KEEP_INPUT, JoinKind.KEEP_NOTHING):
        return times.forward
    return {JoinKind.BACKWARD: times.backward, JoinKind.TURN: times.turn}.get(step.kind, 0)


def fastest(lengths: tuple[int, ...], slots: int, times: JoinTimes) -> float | None:
    """Least time over all orders of steps, where any tensor may be given up."""
    ticket = count()
    start = frozenset(("x", branch, 0) for branch in range(len(lengths)))
    heap = [(0.0, next(ticket), start, False, lengths)]
    soonest: dict[object, float] = {(start, False, lengths): 0}
    if len(start) > slots:
        return None
    steps = {
        turned: [(step, *effect(lengths, step)) for step in _possible(lengths, turned)]
        for turned in (False, True)
    }

    def reach(at: float, held: frozenset[object], turned: bool, left: tuple[int, ...]) -> None:
        if at < soonest.get((held, turned, left), inf):
            soonest[held, turned, left] = at
            heapq.heappush(heap, (at, next(ticket), held, turned, left))

    while heap:
        now, _, held, turned, left = heapq.heappop(heap)
        if turned and not any(left):
            return now
        if now > soonest[held, turned, left]:
            continue
        # Giving up a tensor can wait until its place is needed.
        for each in held if len(held) == slots else ():
            reach(now, held - {each}, turned, left)
        for step, gone, made in steps[turned]:
            after = held - gone | made
            if gone <= held and len(after) <= slots:
                rest = tuple(
                    step.index
                    if step.kind is JoinKind.BACKWARD and branch == step.branch
                    else size
                    for branch, size in enumerate(left)
                )
                turn = turned or step.kind is JoinKind.TURN
                reach(now + _time(step, times), after, turn, rest)
    return None


def _possible(lengths: tuple[int, ...], turned: bool) -> list[JoinStep]:
    found = [] if turned else [JoinStep(JoinKind.TURN, 0, 0)]
    kinds = (JoinKind.KEEP_INPUT, JoinKind.KEEP_NOTHING, JoinKind.BACKWARD)
    for branch, length in enumerate(lengths):
        found += [JoinStep(kind, branch, index) for kind in kinds for index in range(length)]
    return found


@pytest.mark.parametrize(
    "lengths",
    [pytest.param(each, marks=[pytest.mark.long] * (each == (3, 3))) for each in SMALL],
)
def test_join_equals_exhaustive_search(lengths: tuple[int, ...]) -> None:
    """Least slots, times and steps agree with the search: nine slots and times of each."""
    least = least_slots(lengths)
    assert fastest(lengths, least - 1, TIMES[0]) is None
    for slots in range(least, least + 3):
        for times in TIMES:
            join = JoinProgram(lengths, slots, times)
            assert join.time == fastest(lengths, slots, times)
            steps = join.steps()
            assert replay_join(lengths, steps) <= slots
            assert sum(_time(step, times) for step in steps) == join.time


def test_the_papers_figures() -> None:
    """Two and three long chains need 5 and 7 slots; half the memory costs 25 % more time."""
    assert least_slots((10, 20)) == 5
    assert least_slots((4, 10, 12)) == 7
    toy = JoinProgram((4, 10, 12), 9)
    assert (toy.time, toy.span) == (74, 53)
    assert replay_join(toy.lengths, toy.steps()) == 9
    assert sum(_time(step, toy.times) for step in toy.steps()) == 74
    for lengths, ratio in (((15, 75), 1.254), ((10, 10, 10), 1.279)):
        enough = sum(lengths) + len(lengths)
        half = JoinProgram(lengths, enough // 2)
        assert half.time / half.span == pytest.approx(ratio, abs=0.001)


ALONE = opt_0(12, 9)
Flags = tuple[int, ...]


@cache
def as_printed(lengths: tuple[int, ...], slots: int, kept: Flags) -> float:
    """Opt_b-multi of Theorem 3 with all times 1, Lemma 4 tested at every call."""
    if slots < _fewest(lengths, kept):
        return inf
    return min(first_choices(lengths, slots, kept).values()) if any(lengths) else 1


def first_choices(
    lengths: tuple[int, ...], slots: int, kept: Flags
) -> dict[tuple[int, int], float]:
    """(5): the least time that begins with i forwards on branch m, by (m, i), m from 0."""
    return {
        (m, i): i
        + as_printed(_put(lengths, m, length - i), slots - 1, _put(kept, m, 1))
        + float(ALONE[i - 1, slots - sum(kept) + kept[m]])
        for m, length in enumerate(lengths)
        for i in range(1, length + 1)
    }


def _put(values: tuple[int, ...], at: int, value: int) -> tuple[int, ...]:
    return (*values[:at], value, *values[at + 1 :])


def _fewest(lengths: tuple[int, ...], kept: Flags) -> int:
    early = any(
        length == 1 or (length == 0 and not keep)
        for length, keep in zip(lengths, kept, strict=True)
    )
    return len(lengths) + sum(length > 0 for length in lengths) + (any(lengths) and not early)


def test_the_toys_optimum_is_not_the_papers() -> None:
    """Theorem 3 on (4, 10, 12), c = 9: the least is 74; the choices of Figure 6 take 75.

    Figure 6 begins with nine forwards on the third branch, then seven on the second.
    """
    toy = first_choices((4, 10, 12), 9, (0, 0, 0))
    assert min(toy.values()) == 74
    assert {choice for choice, time in toy.items() if time == 74} == {(1, 8), (2, 7), (2, 8)}
    assert toy[2, 9] == 75
    then = first_choices((4, 10, 3), 8, (0, 0, 1))
    assert 9 + then[1, 7] + ALONE[8, 9] == 75


def test_a_slot_more_is_never_slower() -> None:
    """Times fall with slots and the steps keep them, for branches of the toy example."""
    times = []
    for slots in range(7, 17, 3):
        join = JoinProgram((4, 10, 12), slots)
        assert replay_join(join.lengths, join.steps()) <= slots
        times.append(join.time)
    assert times == sorted(times, reverse=True)
    assert times[0] > times[-1] >= join.span


@pytest.mark.long
@pytest.mark.parametrize(("lengths", "most_s"), [((15, 75), 10), ((30, 30, 30), 5)])
def test_join_is_fast_enough(lengths: tuple[int, ...], most_s: float) -> None:
    """With 40 slots, seconds of CPU as accepted."""
    start = time.process_time()
    join = JoinProgram(lengths, 40, JoinTimes(1, 2, 1))
    assert replay_join(join.lengths, join.steps()) <= 40
    assert time.process_time() - start < most_s


def test_refusals() -> None:
    """Too few slots and impossible lengths are refused; so are steps without their inputs."""
    with pytest.raises(InfeasibleError, match="need at least 7"):
        JoinProgram((4, 10, 12), 6)
    for lengths in ((), (3, -1)):
        with pytest.raises(InputError, match="none negative"):
            JoinProgram(lengths, 9)
    with pytest.raises(InvalidPlanError, match="needs"):
        replay_join((1,), [JoinStep(JoinKind.BACKWARD, 0, 0)])
    with pytest.raises(InvalidPlanError, match="left"):
        replay_join((1,), [])
