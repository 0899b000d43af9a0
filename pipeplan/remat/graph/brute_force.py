"""All orders of a small graph: what other solvers are compared with in tests."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, combinations, product

from pipeplan.errors import InputError
from pipeplan.remat.graph.intervals.slots import Slots
from pipeplan.remat.graph.ledger import Order
from pipeplan.remat.graph.orders import fits, time_of

LARGEST = 7
"""Operations of a graph that is enumerated."""


def all_orders(slots: Slots) -> Iterator[Order]:
    """Every order of the slots: each operation again at any set of as many slots as it may."""
    operations = range(len(slots.ledger.graph.operations))
    choices = [
        list(
            chain.from_iterable(
                combinations([(slot, at) for slot in slots.again(at)], count)
                for count in range(slots.runs[at])
            )
        )
        for at in operations
    ]
    for chosen in product(*choices):
        yield slots.order(list(chain.from_iterable(chosen)))


def best_order(slots: Slots, peak: int, saved: int | None = None) -> Order | None:
    """The order of least time within `peak` and `saved` bytes; None where there is none.

    Raises:
        InputError: if the graph has more than `LARGEST` operations.
    """
    ledger = slots.ledger
    count = len(ledger.graph.operations)
    if count > LARGEST:
        raise InputError(
            f"graph {ledger.graph.name!r}: got {count} operations, need at most {LARGEST} to"
            " enumerate all orders. Use method intervals."
        )
    best, least = None, None
    for order in all_orders(slots):
        time = time_of(ledger, order)
        if least is not None and time >= least:
            continue
        if fits(ledger, order, peak, saved):
            best, least = order, time
    return best
