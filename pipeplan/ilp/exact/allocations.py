"""Allocations of single layers to GPUs, and the period that each needs at least.

For every k an allocation needs a period of at least

    bound = max( load of a GPU, load of a link, max over layers l of R(l) / c(l),
                 max over GPUs of H / room ),

R(l) = work and transfers of one micro-batch from the start of F_l to the end of B_l, c(l) = the
most micro-batches in flight at l for which its GPU has room beside l at work (`bounds.counting`
says why). H = bytes times ns that one micro-batch takes on the GPU: over its layers, A for R(l)
and what F and B need beside it while they run; messages while they are on their way. Room is the
memory beside the states; what is there on average is at most the peak (exact model). Source: ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import islice
from typing import Final

from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.symmetry import gpu_classes

Assignment = tuple[int, ...]
"""GPU of each layer."""

FEW: Final = 3000
"""Allocations up to which CP-SAT looks at each that orders leave open."""
VISITS: Final = 10
"""Beginnings of allocations that are looked at, for each allocation that may be listed."""
NODE_S: Final = 7e-5
"""What listing an allocation and its lower bound count for, where work is counted."""


def allocations(costs: CostModel, most: int = FEW) -> list[Assignment] | None:
    """Allocations of single layers in which a micro-batch may fit, of equal GPUs in order.

    Args:
        costs: Durations and bytes.
        most: How many may be listed.

    Returns:
        None if they are too many, or too many beginnings had to be looked at.
    """
    listing = _Listing(costs, most * VISITS)
    found = list(islice(listing.behind(()), most + 1))
    return found if len(found) <= most and listing.visits else None


class _Listing:
    """Depth-first, layer by layer, with what each GPU holds already."""

    def __init__(self, costs: CostModel, visits: int) -> None:
        self.visits = visits
        """Beginnings that may still be looked at; at 0 the listing ended early."""
        self._costs = costs
        self._classes = gpu_classes(costs)
        self._sizes = [costs.segment(layer, layer, layer > 0) for layer in range(costs.layers)]
        self._held = [(0, 0, 0)] * costs.gpus
        """Of each GPU: states, what a micro-batch keeps, the most that it needs at once."""

    def behind(self, start: Assignment) -> Iterator[Assignment]:
        """What begins like `start`."""
        if len(start) == self._costs.layers:
            yield start
            return
        size = self._sizes[len(start)]
        beside = max(size.forward - size.saved, size.backward)
        for gpu in next_places(self._costs, self._classes, start):
            if not self.visits:
                return
            self.visits -= 1
            before = states, kept, need = self._held[gpu]
            kept += size.saved
            states, need = states + size.states, max(need, kept + beside)
            if states + need <= self._costs.budgets[gpu]:
                self._held[gpu] = states, kept, need
                yield from self.behind((*start, gpu))
                self._held[gpu] = before


def next_places(costs: CostModel, classes: list[list[int]], start: Assignment) -> Iterator[int]:
    """GPUs that may take the layer behind `start`: by ties and pins, of equal unused ones one."""
    layer = len(start)
    tied = next((group[0] for group in costs.tied_groups if layer in group[1:]), None)
    given = start[tied] if tied is not None else costs.pinned_gpus[layer]
    for members in classes:
        for gpu in members:
            if given in (None, gpu):
                yield gpu
            if gpu not in start:
                break  # its equals behind it are as good


def lower_bound(costs: CostModel, home: Assignment, most: int | None) -> Fraction | None:
    """The period per micro-batch that an allocation needs at least; None if it does not fit.

    Args:
        costs: Durations and bytes.
        home: GPU of each layer.
        most: No layer may keep more micro-batches (R6); None for no limit.
    """
    busy: dict[tuple[int, ...], int] = {}
    room, kept = room_beside(costs, home), _kept(costs, home)
    spans = [0] * costs.layers
    span, bound = 0, Fraction(0)
    for layer in reversed(range(costs.layers)):
        gpu = home[layer]
        for length, place in _behind(costs, home, layer):
            busy[place] = busy.get(place, 0) + length
            span += length
        work = costs.load_ns(layer, layer, gpu) - 2 * costs.cluster.action_overhead_ns
        busy[(gpu,)] = busy.get((gpu,), 2 * costs.cluster.action_overhead_ns) + work
        span += work
        spans[layer] = span
        size = costs.segment(layer, layer, layer > 0)
        left = room[gpu] - max(size.forward - size.saved, size.backward)
        if left < kept[layer]:
            return None
        count = left // kept[layer] if kept[layer] else most
        if most is not None:
            count = min(most, count if count is not None else most)
        if count is not None:
            bound = max(bound, Fraction(span, count))
    if costs.exact:
        bound = max([bound, *_averages(costs, home, spans, room)])
    return max(bound, Fraction(max(busy.values())))


def _averages(
    costs: CostModel, home: Assignment, spans: Sequence[int], room: Sequence[int]
) -> Iterator[Fraction]:
    """H / room of each GPU with room."""
    held = [0] * costs.gpus
    overhead = costs.cluster.action_overhead_ns
    for layer, gpu in enumerate(home):
        size = costs.segment(layer, layer, layer > 0)
        forward = costs.forward_ns(layer, layer, gpu) - overhead
        backward = costs.backward_ns(layer, layer, gpu) - overhead
        held[gpu] += size.saved * spans[layer]
        held[gpu] += (size.forward - size.saved) * forward + size.backward * backward
        there = home[min(layer + 1, costs.layers - 1)]
        for (length, _), (source, target), back in zip(
            _behind(costs, home, layer), ((gpu, there), (there, gpu)), (False, True), strict=False
        ):
            held[source] += costs.unsaved_bytes(layer, backward=back) * length
            held[target] += costs.tensor_bytes(layer, backward=back) * length
    return (Fraction(size, left) for size, left in zip(held, room, strict=True) if left > 0)


def _behind(
    costs: CostModel, home: Assignment, layer: int
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """(ns, link) of both transfers of the cut behind a layer, if there is one."""
    here, there = home[layer], home[min(layer + 1, costs.layers - 1)]
    if here != there:
        links = costs.cluster.links
        yield costs.send_forward_ns(layer, here, there), links.resource(here, there)
        yield costs.send_backward_ns(layer, there, here), links.resource(there, here)


def room_beside(costs: CostModel, home: Assignment) -> list[int]:
    """Memory of each GPU beside its states and the paper's permanent buffers, (P5) at least."""
    room = list(costs.budgets)
    for layer, gpu in enumerate(home):
        room[gpu] -= costs.segment(layer, layer, layer > 0).states
        if not costs.exact and layer + 1 < costs.layers and home[layer + 1] != gpu:
            buffers = 2 * costs.tensor_bytes(layer, backward=False)
            room[gpu] -= buffers
            room[home[layer + 1]] -= buffers
    return room


def _kept(costs: CostModel, home: Assignment) -> list[int]:
    """Bytes that a micro-batch in flight at each layer keeps on its GPU, up to that layer."""
    sums = [0] * costs.gpus
    kept = []
    for layer, gpu in enumerate(home):
        sums[gpu] += costs.segment(layer, layer, layer > 0).saved
        kept.append(sums[gpu])
    return kept
