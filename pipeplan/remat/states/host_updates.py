"""When the host updates which tensor: earliest deadline first, as long as steps have time.

X. Zhao's thesis, section 4.6, takes blocks in ascending order of index, which are those whose
values are read again soonest; deadlines say the same of single tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class UpdateOnHost:
    """An update on the host; steps count from those of one step of training into the next.

    Attributes:
        key: whose it is.
        ready: the step from which its gradient is on the host.
        due: the step in which the new value is fetched.
        time_ns: what the host takes for it.
    """

    key: tuple[int, int]
    ready: int
    due: int
    time_ns: int


def place_updates(
    updates: Iterable[UpdateOnHost], times: Sequence[float], management_ns: int
) -> dict[tuple[int, int], int]:
    """By key, in order: the step before whose run an update is issued.

    Args:
        updates: none is due before it is ready.
        times: planned ns of each step of training.
        management_ns: what the host takes for each step besides.
    """
    left = sorted(updates, key=lambda each: (each.due, each.ready, each.key))
    found: dict[tuple[int, int], int] = {}
    clock = begin = 0.0
    for step in range(2 * len(times)):
        end = begin + times[step % len(times)]
        clock = max(clock, begin) + management_ns
        for each in [job for job in left if job.ready <= step]:
            if each.due == step or clock < end:
                found[each.key] = step
                clock += each.time_ns
                left.remove(each)
        begin = end
    return found
