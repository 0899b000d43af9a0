"""How many bytes are alive at each event of one period, in closed form.

An interval [alloc, release) of copy c repeats every period. Write alloc = q_a * T + r_a and
release = q_r * T + r_r. The number of its repetitions alive right after a point x of period 0 is

    (q_r - q_a) + [r_a <= x] - [r_r <= x]

where r and x are compared by (O5), micro-batch numbers relative to the period. Summing over all
intervals and sorting the folded ends gives every count of the period.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from pipeplan.verifier.moments import Moment


class Terms(NamedTuple):
    """Bytes by purpose, the columns of a plan's memory table."""

    states: int = 0
    saved: int = 0
    working: int = 0
    direct: int = 0
    message: int = 0

    @property
    def total(self) -> int:
        """Their sum."""
        return sum(self)

    def add(self, other: Terms, times: int = 1) -> Terms:
        """Term by term: self + times * other."""
        states, saved, working, direct, message = other
        return Terms(
            self.states + times * states,
            self.saved + times * saved,
            self.working + times * working,
            self.direct + times * direct,
            self.message + times * message,
        )


_NONE = Terms()


class GpuLedger:
    """All intervals of one GPU."""

    def __init__(self, period: int, k: int) -> None:
        self._period, self._k = period, k
        self._opening = _NONE
        self._changes: dict[Moment, Terms] = {}

    def _fold(self, moment: Moment) -> tuple[int, Moment]:
        """(q, the same event in period 0): micro-batch c of q periods later is c - q * k here."""
        periods, time = divmod(moment.time, self._period)
        if not periods:
            return 0, moment
        number = moment.microbatch - periods * self._k
        return periods, moment._replace(time=time, microbatch=number)

    def touch(self, moment: Moment) -> Moment:
        """Notes an event that may change nothing; returns it folded into period 0."""
        _, folded = self._fold(moment)
        self._changes.setdefault(folded, _NONE)
        return folded

    def hold(self, terms: Terms, alloc: Moment, release: Moment) -> None:
        """Counts `terms` from `alloc` to `release`, both of the same copy in absolute time."""
        (q_alloc, r_alloc), (q_release, r_release) = self._fold(alloc), self._fold(release)
        if q_release != q_alloc:
            self._opening = self._opening.add(terms, q_release - q_alloc)
        for moment, sign in ((r_alloc, 1), (r_release, -1)):
            self._changes[moment] = self._changes.get(moment, _NONE).add(terms, sign)

    def states(self) -> Iterator[tuple[Moment, Terms]]:
        """(event of period 0, bytes right after it), in the order (O5)."""
        alive = self._opening
        for moment in sorted(self._changes):
            alive = alive.add(self._changes[moment])
            yield moment, alive


def first_peak(states: Iterable[Terms]) -> Terms:
    """The first of the largest totals; zeros if there are none."""
    return max(states, key=lambda terms: terms.total, default=Terms())


def most_at_once(intervals: Iterable[tuple[int, int]], period: int) -> int:
    """Largest number alive at once of half-open intervals [start, end) that repeat every period.

    Only times count here: where an interval ends as another starts, they never meet.
    """
    opening, ends = 0, []
    for start, end in intervals:
        opening += end // period - start // period
        ends += [(end % period, -1), (start % period, 1)]
    most = alive = opening
    for _, change in sorted(ends):
        alive += change
        most = max(most, alive)
    return most
