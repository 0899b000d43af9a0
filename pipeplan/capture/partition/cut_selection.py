"""Coarsening of a chain to fewer, larger layers: which cuts remain."""

from __future__ import annotations

from collections.abc import Sequence


def select_cuts(work: Sequence[int], sizes: Sequence[int], layers: int) -> list[int]:
    """Indices of the cuts that stay when layers are merged until there are at most `layers`.

    Cuts are given up one by one in the order of least loss. The loss of a cut is the work of the
    layer that it leaves behind, since no stage can be smaller than a layer. It counts less, in
    proportion, where a neighbouring cut carries fewer bytes and would be chosen instead.

    Args:
        work: of each layer.
        sizes: bytes that each cut carries; cut i lies behind layer i.
        layers: at least 1.
    """
    stay = list(range(len(sizes)))
    while len(stay) >= layers:
        edges = [0, *(cut + 1 for cut in stay), len(work)]
        losses = []
        for place, cut in enumerate(stay):
            merged = sum(work[edges[place] : edges[place + 2]])
            beside = [sizes[c] for c in stay[max(0, place - 1) : place + 2] if c != cut]
            share = min(1.0, min(beside, default=sizes[cut]) / max(1, sizes[cut]))
            losses.append((merged * share, place))
        del stay[min(losses)[1]]
    return stay
