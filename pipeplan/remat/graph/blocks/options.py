"""What a block may do: the best orders for a grid of peaks and saved bytes, each proven or not.

Section 2.6 of X. Zhao's thesis: peaks evenly between the least and that of every operation once,
saved bytes evenly below those of every operation once.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

from pipeplan.operator_graph import OperatorGraph
from pipeplan.remat.graph.intervals.search import IntervalAnswer, SearchLimits, search
from pipeplan.remat.graph.intervals.slots import Slots, runs_of
from pipeplan.remat.graph.ledger import END_F, START, Ledger, Order
from pipeplan.remat.graph.orders import bytes_during, fits, further, saved_bytes, time_of


@dataclass(frozen=True)
class BlockOption:
    """One way to run a block forward and backward.

    Bytes are those that come and go; what comes in is not counted.

    Attributes:
        order: of the block's own operations.
        forward_peak: bytes up to the end of the forward.
        backward_peak: bytes from there on.
        saved: bytes held at the end of the forward, outputs not counted.
        time_ns: of all runs.
    """

    order: Order
    forward_peak: int
    backward_peak: int
    saved: int
    time_ns: int

    @classmethod
    def of(cls, ledger: Ledger, order: Order) -> BlockOption:
        """The figures of an order."""
        used = [each - ledger.constant for each in bytes_during(ledger, order)]
        end = order.index(END_F)
        return cls(
            order,
            max(used[:end], default=0),
            max(used[end:]),
            saved_bytes(ledger, order),
            time_of(ledger, order),
        )

    @property
    def forward(self) -> tuple[int, ...]:
        """Runs before the end of the forward."""
        return tuple(at for at in self.order[: self.order.index(END_F)] if at != START)

    @property
    def backward(self) -> tuple[int, ...]:
        """Runs behind it."""
        return self.order[self.order.index(END_F) + 1 :]

    def beats(self, other: BlockOption) -> bool:
        """Whether it is as good in everything."""
        return (
            self.time_ns <= other.time_ns
            and self.saved <= other.saved
            and self.forward_peak <= other.forward_peak
            and self.backward_peak <= other.backward_peak
        )


@dataclass
class OptionSet:
    """All that is known of a block.

    Attributes:
        graph: the block.
        runs: how often a forward may run.
        answers: what was found at pairs of peak and saved bytes.
    """

    graph: OperatorGraph
    runs: int = 2
    answers: dict[tuple[int, int], IntervalAnswer] = field(default_factory=dict)

    @cached_property
    def slots(self) -> Slots:
        """Where operations may run: again behind the end of the forward only."""
        ledger = Ledger(self.graph)
        return Slots(ledger, runs_of(ledger, self.runs), behind=True)

    @property
    def ledger(self) -> Ledger:
        """The block's figures."""
        return self.slots.ledger

    @cached_property
    def first(self) -> BlockOption:
        """Every operation once."""
        return BlockOption.of(self.ledger, self.ledger.first_order())

    @property
    def options(self) -> list[BlockOption]:
        """What no other one beats, cheapest first."""
        orders = {each.order for each in self.answers.values() if each.order is not None}
        found = [self.first, *(BlockOption.of(self.ledger, order) for order in sorted(orders))]
        found.sort(key=lambda each: (each.time_ns, each.saved, each.backward_peak))
        left: list[BlockOption] = []
        for each in found:
            if not any(other.beats(each) for other in left):
                left.append(each)
        return left

    @property
    def proven(self) -> bool:
        """Whether each answer is the best one or none."""
        return all(each.proven for each in self.answers.values())

    def solve(self, peak: int, saved: int, limits: SearchLimits) -> IntervalAnswer:
        """The best order within a pair of budgets, from what is known of others where that is all.

        Args:
            peak: bytes that come and go.
            saved: bytes, outputs not counted.
            limits: of one search.
        """
        key = (peak, saved)
        if key not in self.answers:
            known = self._known(peak, saved)
            self.answers[key] = known or search(
                self.slots,
                peak + self.ledger.constant,
                saved,
                limits,
                self._hint(peak, saved),
                self._least(peak, saved),
            )
        return self.answers[key]

    def _larger(self, peak: int, saved: int) -> Iterable[IntervalAnswer]:
        """Answers at budgets that are as large or larger in both."""
        return (each for key, each in self.answers.items() if key[0] >= peak and key[1] >= saved)

    def _known(self, peak: int, saved: int) -> IntervalAnswer | None:
        """What larger budgets say: nothing fits, or their best fits here as well."""
        if self._fits(self.first.order, peak, saved):
            return IntervalAnswer(self.first.order, 0, True)
        for each in self._larger(peak, saved):
            if each.proven and (each.order is None or self._fits(each.order, peak, saved)):
                return each
        return None

    def _fits(self, order: Order, peak: int, saved: int) -> bool:
        return fits(self.ledger, order, peak + self.ledger.constant, saved)

    def _hint(self, peak: int, saved: int) -> Order | None:
        """The best known order that fits."""
        orders = [each.order for each in self.answers.values() if each.order is not None]
        fitting = [each for each in orders if self._fits(each, peak, saved)]
        return min(fitting, key=lambda each: further(self.ledger, each), default=None)

    def _least(self, peak: int, saved: int) -> int:
        bounds = [each.bound_ns for each in self._larger(peak, saved)]
        return max((each for each in bounds if each is not None), default=0)


def grid(options: OptionSet, count: int) -> list[tuple[int, int]]:
    """`count` times `count` pairs of peak and saved bytes, the largest first."""
    highest = max(options.first.forward_peak, options.first.backward_peak)
    during = max(options.ledger.comes(at) for at in options.ledger.first_order())
    peaks = [highest - (highest - during) * each // count for each in range(count)]
    kept = options.first.saved
    return [(peak, kept - kept * each // count) for peak in peaks for each in range(count)]


def solve_grid(
    options: OptionSet, count: int, limits: SearchLimits, deadline: float | None = None
) -> None:
    """Answers at all pairs of the grid, until the deadline on `time.monotonic`."""
    for peak, saved in grid(options, count):
        left = limits.seconds if deadline is None else deadline - time.monotonic()
        if left <= 0:
            return
        seconds = min(limits.seconds, left)
        options.solve(peak, saved, SearchLimits(seconds, limits.workers, limits.deterministic))
