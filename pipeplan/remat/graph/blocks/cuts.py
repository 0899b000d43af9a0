"""Where a graph may be cut into blocks: both passes at once, few storages across.

Section 2.3 of X. Zhao's thesis cuts the forward where one value crosses; here the backward must
part there as well, in the graph's own order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pipeplan.remat.graph.ledger import END_F, Ledger

MOST_ACROSS = 1
"""Storages that may cross a cut in the forward, and gradients in the backward."""


@dataclass(frozen=True)
class BlockCut:
    """Between two blocks.

    Attributes:
        forward: the number of forwards before it.
        backward: index of the first operation behind it in the backward, of the earlier block.
        values: storages that cross in the forward.
        gradients: storages that cross in the backward.
    """

    forward: int
    backward: int
    values: tuple[int, ...]
    gradients: tuple[int, ...]


def cuts(ledger: Ledger, most: int = MOST_ACROSS) -> list[BlockCut]:
    """All cuts that may be taken together, in the forward's order."""
    found: list[BlockCut] = []
    flow = _Flow(ledger)
    end = len(ledger.graph.operations)
    for forward in range(1, ledger.graph.forwards):
        values = flow.across(forward)
        if not values or len(values) > most:
            continue
        first, last = flow.gap(forward, set(values))
        best = min(
            (
                (len(flow.gradients(place)), -place, place)
                for place in range(first, min(last, end) + 1)
            ),
            default=None,
        )
        if best is None or best[0] > most:
            continue
        cut = BlockCut(forward, best[2], values, flow.gradients(best[2]))
        if found and cut.backward > found[-1].backward:
            continue
        found.append(cut)
    return found


class _Flow:
    """Who makes a storage first, and who reads it."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger, self.forwards = ledger, ledger.graph.forwards
        self.made: dict[int, int] = dict.fromkeys(ledger.received, -1)
        self.read: dict[int, list[int]] = {}
        for at in ledger.first_order():
            for storage in ledger.made(at):
                self.made.setdefault(storage, self.forwards - 0.5 if at == END_F else at)  # type: ignore[arg-type]
            for storage in ledger.needed(at):
                self.read.setdefault(storage, []).append(self.forwards if at == END_F else at)

    def across(self, forward: int) -> tuple[int, ...]:
        """Storages made by the first `forward` forwards and read by later ones or handed out."""
        late = set(self.ledger.outputs)
        return tuple(
            storage
            for storage, made in self.made.items()
            if made < forward
            and (
                storage in late
                or any(forward <= at < self.forwards for at in self.read.get(storage, ()))
            )
        )

    def gap(self, forward: int, across: set[int]) -> tuple[int, int]:
        """First and last place in the backward that keep both sides' storages apart."""
        first, last = self.forwards, len(self.ledger.graph.operations)
        for storage, made in self.made.items():
            readers = [at for at in self.read.get(storage, ()) if at >= self.forwards]
            if made >= self.forwards - 0.5 or storage in across or not readers:
                continue
            if made < forward:
                last = min(last, readers[0])
            else:
                first = max(first, readers[-1] + 1)
        return first, last

    def gradients(self, place: int) -> tuple[int, ...]:
        """What the backward makes before `place` and reads from there on."""
        return tuple(
            storage
            for storage, made in self.made.items()
            if self.forwards - 0.5 <= made < place
            and any(at >= place for at in self.read.get(storage, ()))
        )


def parts(ledger: Ledger, chosen: list[BlockCut]) -> Iterator[tuple[range, range]]:
    """Forwards and backwards of the blocks between cuts, in the forward's order."""
    count = len(ledger.graph.operations)
    forward = [0, *(cut.forward for cut in chosen), ledger.graph.forwards]
    backward = [count, *(cut.backward for cut in chosen), ledger.graph.forwards]
    for index in range(len(forward) - 1):
        yield (
            range(forward[index], forward[index + 1]),
            range(backward[index + 1], backward[index]),
        )
