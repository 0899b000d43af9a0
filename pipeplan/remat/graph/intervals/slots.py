"""Slots: where an operation may run, in the order of Checkmate's stages.

Stage t ends with the first run of the t-th entry of the graph's order; before it, any earlier
operation may run again, in the graph's order and once. Slot t (t + 1) / 2 + i is that of entry i
in stage t (Checkmate's (t, i); Bartan et al., Moccasin, section 2.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from pipeplan.remat.graph.ledger import END_F, Ledger, Order


def slot(stage: int, entry: int) -> int:
    """The number of entry `entry` in stage `stage`."""
    return stage * (stage + 1) // 2 + entry


@dataclass(frozen=True)
class Slots:
    """Slots of a graph's operations.

    Attributes:
        ledger: the graph's figures.
        runs: how often each operation may run.
        behind: whether operations may run again only behind the end of the forward.
    """

    ledger: Ledger
    runs: tuple[int, ...]
    behind: bool = False

    @cached_property
    def heads(self) -> Order:
        """Entry t is what stage t ends with: an operation, or the end of the forward."""
        return self.ledger.first_order()

    @cached_property
    def place(self) -> dict[int, int]:
        """The entry that an operation or `END_F` is."""
        return {at: index for index, at in enumerate(self.heads)}

    @cached_property
    def end(self) -> int:
        """The slot of the end of the forward."""
        return self.first(END_F)

    @cached_property
    def horizon(self) -> int:
        """A slot behind all others."""
        return slot(len(self.heads), 0)

    def first(self, at: int) -> int:
        """The slot of the first run."""
        return slot(self.place[at], self.place[at])

    def again(self, at: int) -> list[int]:
        """The slots of all further runs of an operation."""
        place = self.place[at]
        begin = max(place, self.place[END_F]) if self.behind else place
        return [slot(stage, place) for stage in range(begin + 1, self.latest[at] + 1)]

    @cached_property
    def latest(self) -> list[int]:
        """Per operation the last stage in which anything may need it to run."""
        ledger, last = self.ledger, [0] * len(self.runs)
        wanted = {s: len(self.heads) - 1 for s in ledger.handed_back}
        for at in reversed(self.heads):
            if at >= 0:
                last[at] = max((wanted.get(s, 0) for s in ledger.writes[at]), default=0)
            mine = self.place[at]
            stage = max(mine, last[at]) if at >= 0 and self.runs[at] > 1 else mine
            for storage in ledger.needed(at):
                wanted[storage] = max(wanted.get(storage, 0), stage)
        return last

    def order(self, runs: Sequence[tuple[int, int]]) -> Order:
        """The order of pairs of slot and operation, first runs and the end included."""
        first = [(self.first(at), at) for at in self.heads]
        return tuple(at for _, at in sorted([*first, *runs]))

    def reruns(self, order: Order) -> dict[int, list[int]]:
        """Per operation the slots of its further runs in an order; the reverse of `order`."""
        found: dict[int, list[int]] = {}
        stage = 0
        for at in order:
            if at == self.heads[stage]:
                stage += 1
            else:
                found.setdefault(at, []).append(slot(stage, self.place[at]))
            if stage == len(self.heads):
                break
        return found


def runs_of(ledger: Ledger, most: int, backward: int = 1) -> tuple[int, ...]:
    """How often each operation may run: `most` times, backwards `backward` times.

    An operation that may run `once` does, and so does one whose storages nothing reads.
    """
    read = {s for at in ledger.first_order() for s in ledger.needed(at)} | set(ledger.handed_back)
    return tuple(
        1
        if each.once or not read.intersection(ledger.writes[index])
        else most
        if index < ledger.graph.forwards
        else backward
        for index, each in enumerate(ledger.graph.operations)
    )
