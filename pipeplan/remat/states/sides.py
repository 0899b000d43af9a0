"""Which tensors the host updates, where O-ILP said which part of a group.

X. Zhao's thesis, section 4.6, chooses them once for each group, by the same knapsack as Algorithm
8. What a group's tensors are too coarse for is carried to the next group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pipeplan.remat.states.problem import ParameterGroup, StateProblem
from pipeplan.remat.states.whole_tensors import largest_within


def with_sides(problem: StateProblem, parts: Sequence[float], nearest: bool) -> StateProblem:
    """The problem with groups that are updated whole, on the device or on the host.

    Args:
        problem: whose groups are cut.
        parts: of each group's trained bytes: what the host updates.
        nearest: whether it may update more than that, if that is nearer; a full host has no room
            for more.
    """
    groups: list[ParameterGroup] = []
    carried = 0.0
    for group, part in zip(problem.groups, parts, strict=True):
        wanted = carried + part * group.trained_bytes
        chosen = _chosen(group, max(0.0, wanted), nearest) if part else set()
        carried = wanted - sum(group.tensors[each].bytes for each in chosen)
        for on_host, name in ((False, group.name), (True, f"{group.name} on the host")):
            own = tuple(each for at, each in enumerate(group.tensors) if (at in chosen) is on_host)
            if own:
                groups.append(replace(group, name=name, tensors=own, on_host=on_host))
    return replace(problem, groups=tuple(groups))


def _chosen(group: ParameterGroup, wanted: float, nearest: bool) -> set[int]:
    """Trained tensors whose bytes are as near to `wanted` as possible, or below."""
    sizes = {at: each.bytes for at, each in enumerate(group.tensors) if each.trained}
    below = largest_within(sizes, int(wanted))
    if not nearest:
        return below
    above = set(sizes) - largest_within(sizes, int(sum(sizes.values()) - wanted))

    def off(chosen: set[int]) -> float:
        return abs(sum(sizes[each] for each in chosen) - wanted)

    return min((below, above), key=off)
