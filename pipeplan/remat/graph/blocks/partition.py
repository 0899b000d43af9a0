"""Which cuts to take: blocks that repeat, as large as their solver likes them (ours)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipeplan.remat.graph.blocks.block import GraphBlock, blocks
from pipeplan.remat.graph.blocks.cuts import BlockCut, cuts
from pipeplan.remat.graph.ledger import Ledger

MOST_OPERATIONS = 64
"""Operations of a block that is joined from smaller ones."""
LARGEST_BLOCK = 130
"""Operations of a block: of larger ones hardly an option is found."""
ACROSS = (1, 2, 3, 4, 6, 8)
"""Storages that may cross a cut, tried in turn."""


def partition(ledger: Ledger, most: int = MOST_OPERATIONS) -> list[GraphBlock]:
    """The graph as a chain of blocks; one block where it cannot be cut.

    One storage may cross a cut, and as many more as it takes for blocks that can be solved: a mask
    or an encoder's output crosses all layers behind it, and so does its gradient.
    """
    best: list[GraphBlock] = []
    for across in ACROSS:
        found = _partition(ledger, most, across)
        if not best or _largest(found) < _largest(best):
            best = found
        if _largest(best) <= LARGEST_BLOCK:
            break
    return best


def _largest(chain: Sequence[GraphBlock]) -> int:
    return max(len(each.operations) for each in chain)


def _partition(ledger: Ledger, most: int, across: int) -> list[GraphBlock]:
    """With cuts that at most `across` storages cross.

    Pieces between neighbouring cuts that repeat with a period are joined by periods, as many as
    `most` operations hold, so that identical layers give identical blocks; the others are joined
    with their neighbours.
    """
    all_cuts = cuts(ledger, across)
    pieces = blocks(ledger, all_cuts)
    begin, period, count = repetition([piece.key for piece in pieces])
    sizes = [len(piece.operations) for piece in pieces]
    if count:
        together = most // sum(sizes[begin : begin + period])
        period, count = period * together, count // max(1, together) if together else 0
    bounds = _bounds(sizes, begin, period, count, most)
    return blocks(ledger, [_cut(all_cuts, bound) for bound in bounds])


def _cut(all_cuts: Sequence[BlockCut], piece: int) -> BlockCut:
    return all_cuts[piece - 1]


def _bounds(sizes: list[int], begin: int, period: int, count: int, most: int) -> list[int]:
    """Pieces before which a block begins, the first one apart."""
    end = begin + period * count
    found = [
        *joined(sizes[:begin], most, 0),
        *(begin + period * index for index in range(count)),
        *([end] if count else []),
        *joined(sizes[end:], most, end),
    ]
    return sorted({bound for bound in found if 0 < bound < len(sizes)})


def joined(sizes: Sequence[int], most: int, offset: int) -> Iterator[int]:
    """Pieces before which a block begins when neighbours are joined up to `most` operations."""
    together = 0
    for index, size in enumerate(sizes):
        if together and together + size > most:
            yield offset + index
            together = 0
        together += size


def repetition(keys: Sequence[str]) -> tuple[int, int, int]:
    """Begin, period and number of repetitions of what repeats most; (0, 0, 0) if nothing does."""
    best = (0, 0, 0)
    for period in range(1, len(keys) // 2 + 1):
        begin = 0
        while begin + period < len(keys):
            end = begin
            while end + period < len(keys) and keys[end] == keys[end + period]:
                end += 1
            count = (end - begin) // period + 1
            if count > 1 and count * period > best[1] * best[2]:
                best = (begin, period, count)
            begin = max(end, begin + 1)
    return best
