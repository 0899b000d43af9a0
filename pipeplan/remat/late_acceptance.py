"""Late acceptance hill climbing over a set of offloaded units and the orders of their copies.

E. Burke, Y. Bykov, *The late acceptance hill-climbing heuristic* (2017); the moves are ours.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pipeplan.remat.bounds import phase_bound
from pipeplan.remat.offloading.compute_order import ComputeOrder
from pipeplan.remat.offloading.no_wait import NoWaitSchedule, no_wait_in_order
from pipeplan.remat.offloading.selection import UnitSet
from pipeplan.remat.schedules.host_link import HostLink

TRIES, SPAN = 3000, 300_000
"""Changes to try, and changes times operations, at most."""
LOOK = 16
"""Changes between two questions whether to go on."""
_NEAR = 8
"""How far apart in the line two units may be that change places."""
_LATE = 50
"""A change is taken where it is no slower than what was held so many tries ago."""
_ORDERS = 0.4
"""Share of changes that leave the set as it is."""


GoOn = Callable[[], bool]


def always() -> bool:
    """No limit of time."""
    return True


class CopyOrders(NamedTuple):
    """Units in the orders in which they leave and come back."""

    out: tuple[int, ...]
    back: tuple[int, ...]


def late_acceptance(
    line: ComputeOrder,
    start: UnitSet,
    budget: int,
    channel: HostLink,
    more: int = 1,
    go_on: GoOn = always,
) -> NoWaitSchedule | None:
    """The fastest no-wait schedule found by changes to a set and to the orders of its copies.

    Late acceptance hill climbing (E. Burke, Y. Bykov, 2017) with seeded changes: one unit more or
    less, one in for another near it, one copy earlier or later among those of its way.

    Args:
        line: the operations.
        start: the set to begin with.
        budget: bytes of the device.
        channel: the way to the host.
        more: times as many changes as usual; what fewer find is found by more, too.
        go_on: whether there is time for a few more changes.

    Returns:
        None where the schedule of `start` itself does not fit.
    """
    order = tuple(sorted(start))
    held = CopyOrders(order, order[::-1])
    best = no_wait_in_order(line, *held, budget, channel)
    if best is None:
        return None
    bound = phase_bound(line, budget, channel)
    now, past = best.makespan_ns, [best.makespan_ns] * _LATE
    units, rng = [unit.index for unit in line.units], random.Random(0)
    for at in range(more * min(TRIES, SPAN // len(line.ops))):
        if best.makespan_ns <= bound or (at % LOOK == 0 and not go_on()):
            break
        same = rng.random() < _ORDERS
        other = _reordered(held, rng) if same else _other_set(held, units, rng)
        most = max(now, past[at % _LATE])
        found = no_wait_in_order(line, *other, budget, channel, most_ns=most)
        if found is not None and found.makespan_ns <= most:
            held, now = other, found.makespan_ns
            best = min(best, found, key=lambda each: each.makespan_ns)
        past[at % _LATE] = now
    return best


def _reordered(held: CopyOrders, rng: random.Random) -> CopyOrders:
    """One unit elsewhere among those that leave, or among those that come back."""
    if not held.out:
        return held
    if rng.random() < 0.5:
        return held._replace(out=_moved(held.out, rng))
    return held._replace(back=_moved(held.back, rng))


def _moved(order: tuple[int, ...], rng: random.Random) -> tuple[int, ...]:
    unit = rng.choice(order)
    rest = [each for each in order if each != unit]
    rest.insert(rng.randrange(len(order)), unit)
    return tuple(rest)


def _other_set(held: CopyOrders, units: Sequence[int], rng: random.Random) -> CopyOrders:
    """One unit more, in its place by the line, or less; or one in for another near it."""
    unit = rng.choice(units)
    if unit not in held.out:
        return CopyOrders(_with(held.out, unit, 1), _with(held.back, unit, -1))
    near = units.index(unit) + rng.randint(-_NEAR, _NEAR)
    other = units[min(max(near, 0), len(units) - 1)]
    if other in held.out:
        out, back = ([each for each in way if each != unit] for way in held)
    else:
        out, back = ([other if each == unit else each for each in way] for way in held)
    return CopyOrders(tuple(out), tuple(back))


def _with(order: tuple[int, ...], unit: int, sign: int) -> tuple[int, ...]:
    at = next((at for at, each in enumerate(order) if sign * each > sign * unit), len(order))
    return (*order[:at], unit, *order[at:])
