"""The best stage that begins at each layer: the inner loop of the dynamic program, compiled.

A stage of layers i..j takes the first of its options, cheapest first, that fits; of all j the one
of the smallest V is taken.
"""

from __future__ import annotations

from math import ceil
from typing import Final

from pipeplan.ilp.compiled import Bools, Ints, compiled

UNUSED: Final = 2**60
"""`more` of an option that is none."""

Asked = tuple[int, bool, int, bool, int, int]
"""The period T in ns; whether a real number just below it is meant; the largest load in ns;
whether nothing waits, so that V is a plain sum; the most micro-batches a stage may keep, or -1;
V where nothing fits."""
Options = tuple[Ints, Ints, Ints]
"""[i, j, n] -> ns that option n of layers i..j takes more, bytes kept by each micro-batch, bytes
needed beside those of all but one."""
Gpu = tuple[Ints, Bools, float, int]
"""[i, j] -> ns of forward and backward; [i, j] -> whether layers i..j may be no stage; the speed,
by which what options take is divided; bytes."""


@compiled
def best_stages(
    asked: Asked, gpu: Gpu, options: Options, behind: Ints, spans: Ints, ends: Ints, chosen: Ints
) -> None:
    """Fill in the smallest V of a stage in front, its last layer and option, by its first layer.

    Args:
        asked: what fits.
        gpu: where the stage is.
        options: of every stage, cheapest first.
        behind: [j] -> V of what is behind a stage that ends with layer j, the transfers included.
        spans: [i] -> V.
        ends: [i] -> the last layer.
        chosen: [i] -> the option.
    """
    period, just_below, limit, adds, most, infinite = asked
    loads, closed, speed, budget = gpu
    more, saved, need = options
    whole, rest = behind // period, behind % period
    for first in range(len(behind)):
        spans[first], ends[first], chosen[first] = infinite, first, -1
        for last in range(first, len(behind)):
            if loads[first, last] > limit:
                break
            if closed[first, last] or behind[last] >= infinite:
                continue
            for option in range(more.shape[2]):
                extra = more[first, last, option]
                if extra == UNUSED:
                    break
                load = loads[first, last] + (extra if speed == 1 else ceil(extra / speed))
                if load > limit:
                    break
                begun = _begun(rest[last], load, period, adds)
                copies = whole[last] + _copies(begun, period, just_below)
                room, kept = budget - need[first, last, option], saved[first, last, option]
                if (most < 0 or copies <= most) and _fits(copies - 1, kept, room):
                    span = whole[last] * period + begun
                    if span < spans[first]:
                        spans[first], ends[first], chosen[first] = span, last, option
                    break


@compiled
def _begun(rest: int, load: int, period: int, adds: bool) -> int:
    """V with a load in front, less whole periods: `rest` and `load` are no longer than one."""
    passes = rest > 0 and rest + load > period and not adds
    return period + load if passes else rest + load


@compiled
def _copies(begun: int, period: int, just_below: bool) -> int:
    """Micro-batches in flight at least, of a V of at most two periods."""
    if just_below:
        return 1 + int(begun >= period) + int(begun >= 2 * period)
    return int(begun > 0) + int(begun > period)


@compiled
def _fits(others: int, kept: int, room: int) -> bool:
    """Whether there is room for what so many others keep; products of both may be too large."""
    return room >= 0 and (others <= 0 or kept == 0 or others <= room // kept)
