"""From an order of operations to a device program: what is held is what is used again.

Once the order is given in which operations run, and run again, the best moment to free a storage
is known: right behind its last reader before it is made anew, if it is at all. So the solvers of
this package decide orders and nothing else. Bytes are those of docs/reference/device-programs.md;
`Ledger` counts them for solvers, and the judge of programs says what a program does.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pipeplan.remat.graph.ledger import END_F, Ledger, Order


@dataclass(frozen=True)
class Frees:
    """What goes behind each entry of an order.

    Attributes:
        read: of what the entry reads.
        made: of what it makes.
    """

    read: tuple[tuple[int, ...], ...]
    made: tuple[tuple[int, ...], ...]


def frees(ledger: Ledger, order: Order) -> Frees:
    """The earliest moments at which storages may go."""
    wanted = set(ledger.handed_back)
    read: list[tuple[int, ...]] = []
    made: list[tuple[int, ...]] = []
    for at in reversed(order):
        makes, needs = ledger.made(at), ledger.needed(at)
        made.append(tuple(s for s in makes if s not in wanted))
        wanted.difference_update(makes)
        read.append(tuple(s for s in needs if s not in wanted))
        wanted.update(needs)
    return Frees(tuple(reversed(read)), tuple(reversed(made)))


def bytes_during(ledger: Ledger, order: Order, going: Frees | None = None) -> list[int]:
    """Bytes during each entry of an order, static ones and inputs among them (B1)-(B4).

    Args:
        ledger: what operations read and make.
        order: of operations.
        going: its `frees`, where they are known.
    """
    size, held, found = ledger.size, ledger.constant, []
    going = going or frees(ledger, order)
    for at, read, made in zip(order, going.read, going.made, strict=True):
        found.append(held + ledger.comes(at))
        held += sum(size[s] for s in ledger.made(at))
        held -= sum(size[s] for s in read) + sum(size[s] for s in made)
    return found


def peak_bytes(ledger: Ledger, order: Order) -> int:
    """The most bytes during an order."""
    return max(bytes_during(ledger, order))


def saved_bytes(ledger: Ledger, order: Order, going: Frees | None = None) -> int:
    """What is held at the end of the forward, without static bytes, inputs and outputs (B5).

    Args:
        ledger: what operations read and make.
        order: of operations.
        going: its `frees`, where they are known.
    """
    held = set[int]()
    going = going or frees(ledger, order)
    for at, read, made in zip(order, going.read, going.made, strict=True):
        if at == END_F:
            break
        held.update(ledger.made(at))
        held.difference_update(read, made)
    return sum(ledger.size[s] for s in held - ledger.unsaved)


def time_of(ledger: Ledger, order: Iterable[int]) -> int:
    """Time of all runs, ns."""
    return sum(ledger.time[at] for at in order if at >= 0)


def further(ledger: Ledger, order: Order) -> int:
    """Time of an order beyond that of every operation once, ns."""
    return time_of(ledger, order) - sum(ledger.time)


def fits(ledger: Ledger, order: Order, peak: int, saved: int | None = None) -> bool:
    """Whether an order keeps budgets in bytes."""
    going = frees(ledger, order)
    within = saved is None or saved_bytes(ledger, order, going) <= saved
    return within and max(bytes_during(ledger, order, going)) <= peak


def tidy(ledger: Ledger, order: Order) -> Order:
    """An order without further runs of which nothing is used."""
    while True:
        seen: set[int] = set()
        made = frees(ledger, order).made
        left = []
        for position, at in enumerate(order):
            useless = at in seen and len(made[position]) == len(ledger.made(at))
            if not useless:
                left.append(at)
            seen.add(at)
        if len(left) == len(order):
            return order
        order = tuple(left)
