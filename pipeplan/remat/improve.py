"""Local search on the set of units to offload, by the time of its no-wait schedule."""

from __future__ import annotations

from collections.abc import Iterator

from pipeplan.remat.channel import Channel
from pipeplan.remat.choices import Units
from pipeplan.remat.line import Line
from pipeplan.remat.nowait import Timed, no_wait

_NEAR = 8
"""How far apart in the line two units may be that change places."""


def improve(
    line: Line, start: Units, budget: int, channel: Channel, most: int = 400
) -> Timed | None:
    """The no-wait schedule of a set that no flip and no swap of near units makes faster.

    Args:
        line: the operations.
        start: the set to begin with.
        budget: bytes of the device.
        channel: the way to the host.
        most: sets to try at most.

    Returns:
        None where the schedule of `start` itself does not fit.
    """
    best, chosen, tried = no_wait(line, start, budget, channel), start, 0
    if best is None:
        return None
    better = True
    while better and tried < most and best.makespan_ns > line.compute:
        better = False
        for each in _neighbours(line, chosen):
            tried += 1
            found = no_wait(line, each, budget, channel)
            if found is not None and found.makespan_ns < best.makespan_ns:
                best, chosen, better = found, each, True
            if better or tried >= most:
                break
    return best


def _neighbours(line: Line, chosen: Units) -> Iterator[Units]:
    """One unit more or less; one in for another near it."""
    units = [unit.index for unit in line.units]
    for unit in units:
        yield chosen ^ {unit}
    for at, unit in enumerate(units):
        for other in units[at + 1 : at + 1 + _NEAR]:
            if (unit in chosen) != (other in chosen):
                yield chosen ^ {unit, other}
