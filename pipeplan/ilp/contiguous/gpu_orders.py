"""Which GPUs the stages may be on, from the last one on: the states of the dynamic program.

GPUs that are alike make a class; a state says how many of each class are used. Where there are too
many states GPUs keep the cluster's order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

State = tuple[tuple[int, ...], int]
"""(how many GPUs of each class are used, class of the stage that comes first)."""


@dataclass(frozen=True, slots=True)
class GpuOrders:
    """All states, those with fewer GPUs first.

    Attributes:
        states: by number.
        behind: numbers of the states that each may stand in front of; none for a last stage.
        complete: whether every order of GPUs is covered.
    """

    states: list[State]
    behind: list[list[int]]
    complete: bool

    @property
    def transitions(self) -> int:
        """How often a stage is put in front of a state."""
        return sum(max(1, len(behind)) for behind in self.behind)


def gpu_orders(classes: Sequence[Sequence[int]], most: int) -> GpuOrders:
    """The states of some classes of GPUs; of the cluster's order alone where there are more.

    Args:
        classes: GPUs that are alike.
        most: states.
    """
    sizes = [len(members) for members in classes]
    complete = len(classes) == 1 or len(classes) * prod(size + 1 for size in sizes) <= most
    states = _all_states(sizes) if complete else _in_order(sizes)
    number = {state: n for n, state in enumerate(states)}
    behind = [
        [number[before] for before in _predecessors(state) if before in number] for state in states
    ]
    return GpuOrders(states, behind, complete)


def _all_states(sizes: Sequence[int]) -> list[State]:
    counts = sorted(
        product(*(range(size + 1) for size in sizes)), key=lambda used: (sum(used), used)
    )
    return [(used, kind) for used in counts for kind, count in enumerate(used) if count]


def _in_order(sizes: Sequence[int]) -> list[State]:
    order = [kind for kind, size in enumerate(sizes) for _ in range(size)]
    states: list[State] = []
    used = [0] * len(sizes)
    for kind in reversed(order):
        used[kind] += 1
        states.append((tuple(used), kind))
    return states


def _predecessors(state: State) -> Iterator[State]:
    used, kind = state
    fewer = tuple(count - (other == kind) for other, count in enumerate(used))
    return ((fewer, other) for other, count in enumerate(fewer) if count)
