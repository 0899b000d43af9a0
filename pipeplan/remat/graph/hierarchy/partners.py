"""Which forward a backward operation belongs to."""

from __future__ import annotations

from collections.abc import Sequence

from pipeplan.remat.graph.ledger import Ledger


def partners(ledger: Ledger, order: Sequence[int]) -> dict[int, int]:
    """Per backward operation the place in `order` of the forward that it is grouped with.

    It belongs to the forward that reads or makes all that it reads of the forward: weights say
    which. It is grouped with none that runs later than those of what it depends on, so that
    groups that follow each other in the forward do so in the reverse in the backward (Property 1
    of X. Zhao's thesis). A sum of gradients is grouped with the forward of its latest summand:
    all summands of a value that many read would else wait for it.

    Args:
        ledger: the graph.
        order: its forwards as they run.
    """
    graph = ledger.graph
    touched = [
        frozenset((*graph.operations[at].reads, *graph.operations[at].writes)) for at in order
    ]
    touching: dict[int, list[int]] = {}
    for place, storages in enumerate(touched):
        for storage in storages:
            touching.setdefault(storage, []).append(place)
    latest = {s: place for place, at in enumerate(order) for s in ledger.writes[at]}
    maker: dict[int, int] = {}
    found: dict[int, int] = {}
    random: int | None = None
    for at in range(graph.forwards, len(graph.operations)):
        operation = graph.operations[at]
        before = [found[maker[s]] for s in operation.reads if s in maker]
        if operation.random:
            before += [found[random]] if random is not None else []
            random = at
        bound = min(before, default=len(order) - 1)
        forward = frozenset(s for s in operation.reads if s in touching)
        own = bound
        if forward:
            fitting = set.intersection(*(set(touching[s]) for s in forward))
            own = max(
                (place for place in fitting if place <= bound),
                default=max((latest[s] for s in forward if s in latest), default=bound),
            )
        found[at] = min(bound, own)
        maker.update(dict.fromkeys(operation.writes, at))
    return found


def backward_order(ledger: Ledger, found: dict[int, int]) -> list[int]:
    """The backward, later forwards' operations first, else in the graph's order."""
    return sorted(found, key=lambda at: (-found[at], at))
