"""A coarser chain: neighbouring layers become one, so that any plan for it is one for the chain.

A group's times and bytes are chosen such that a stage made of groups costs exactly what the stage
of their layers costs (T2), (M1), (M2), (M3), or a little more, never less: more only where
a group's first layer does not save all of its input, or an inner gradient is smaller than the
gradient of the group's input, or GPUs of different speeds round differently.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fractions import Fraction
from heapq import heapify, heappop, heappush
from itertools import islice

from pipeplan.chain import Chain, Layer
from pipeplan.ilp.segment_bytes import run_peaks
from pipeplan.units import ceil_div


@dataclass(frozen=True, slots=True)
class CoarseChain:
    """A coarser chain; its layer i stands for layers `groups[i]` (first, last) of the original."""

    chain: Chain
    groups: tuple[tuple[int, int], ...]

    def layers(self, first: int, last: int) -> tuple[int, int]:
        """What coarse layers first..last stand for."""
        return self.groups[first][0], self.groups[last][1]


def coarsen(
    chain: Chain, count: int, *, speeds: Sequence[float] = (1.0,), apart: Collection[int] = ()
) -> CoarseChain:
    """Merge neighbours until `count` layers are left.

    Small ones are merged first, by work and bytes as shares of the chain's; among results of
    similar size (the same power of two) across the largest boundary, where a cut costs most.

    Args:
        chain: What is merged.
        count: How many layers are wanted; more stay only where `apart` asks for it.
        speeds: Of the GPUs; times are rounded up so that they hold on each.
        apart: Layers that are not merged with the one behind them.
    """
    groups = _groups(chain, count, frozenset(apart))
    return CoarseChain(grouped(chain, groups, speeds), groups)


def grouped(
    chain: Chain, groups: Sequence[tuple[int, int]], speeds: Sequence[float] = (1.0,)
) -> Chain:
    """The chain whose layers are `groups` (first, last) of this one's, in order, all of them."""
    layers = tuple(_merged(chain, first, last, speeds) for first, last in groups)
    source = f"{chain.source} ({len(groups)} groups of {len(chain.layers)} layers)".strip()
    return chain.model_copy(update={"source": source, "layers": layers})


def _groups(chain: Chain, count: int, apart: frozenset[int]) -> tuple[tuple[int, int], ...]:
    """(first, last) of each group, merged greedily."""
    sizes = _sizes(chain)
    size = dict(enumerate(sizes))
    last = {index: index for index in size}
    first_of = {index: index for index in size}  # by last layer

    def entry(end: int) -> tuple[int, int, int]:
        """Smaller is merged sooner: joining the group that ends at `end` with the next."""
        together = size[first_of[end]] + size[end + 1]
        return together.bit_length(), -chain.layers[end].output_bytes, end

    heap = [entry(end) for end in range(len(sizes) - 1) if end not in apart]
    heapify(heap)
    while heap and len(last) > count:
        popped = heappop(heap)
        end = popped[2]
        if popped != entry(end):  # its groups have grown since
            heappush(heap, entry(end))
            continue
        first, behind = first_of[end], end + 1
        size[first] += size.pop(behind)
        last[first] = last.pop(behind)
        first_of[last[first]] = first
    return tuple(sorted(last.items()))


def _sizes(chain: Chain) -> list[int]:
    """Work and bytes of each layer, together, in millionths of the chain's; at least 1."""
    work = [layer.forward_ns + layer.backward_ns for layer in chain.layers]
    held = [
        layer.weight_bytes
        + layer.gradient_bytes
        + layer.waiting_gradient_bytes
        + layer.optimizer_bytes
        + layer.saved_bytes
        + layer.saved_output_bytes
        for layer in chain.layers
    ]
    all_work, all_held = max(1, sum(work)), max(1, sum(held))
    return [
        1 + 10**6 * ns // all_work + 10**6 * size // all_held
        for ns, size in zip(work, held, strict=True)
    ]


def _merged(chain: Chain, first: int, last: int, speeds: Sequence[float]) -> Layer:
    """Layers first..last as one."""
    layers = chain.layers[first : last + 1]
    if first == last and all(speed == 1.0 for speed in speeds):
        return layers[0].model_copy(update={"name": f"{first}-{last}", "riding": ()})
    head, tail = layers[0], layers[-1]
    saved, forward, backward = _bytes(chain, first, last)
    known = any(layer.forward_light_ns is not None for layer in layers)
    told = any(layer.forward_light_workspace_bytes is not None for layer in layers)
    # As if a run began with the group: elsewhere its input is not kept as long.
    light, _ = next(islice(run_peaks(chain, first, 0), last - first, None))
    return Layer(
        name=f"{first}-{last}",
        forward_ns=_ns([layer.forward_ns for layer in layers], speeds),
        backward_ns=_ns([layer.backward_ns for layer in layers], speeds),
        forward_light_ns=_ns([layer.light_ns for layer in layers], speeds) if known else None,
        optimizer_ns=_ns([layer.optimizer_ns for layer in layers], speeds),
        weight_bytes=sum(layer.weight_bytes for layer in layers),
        gradient_bytes=sum(layer.gradient_bytes for layer in layers),
        waiting_gradient_bytes=sum(layer.waiting_gradient_bytes for layer in layers),
        optimizer_bytes=sum(layer.optimizer_bytes for layer in layers),
        output_bytes=tail.output_bytes,
        output_gradient_bytes=tail.output_gradient_bytes,
        saved_input_bytes=head.saved_input_bytes,
        saved_bytes=saved,
        saved_output_bytes=tail.saved_output_bytes,
        saved_passing_bytes=tail.saved_passing_bytes,
        forward_workspace_bytes=max(0, forward - saved - tail.output_bytes),
        backward_workspace_bytes=max(
            0,
            backward
            - saved
            - tail.saved_output_bytes
            - tail.gradient_of_output_bytes
            - chain.gradient_of_input(first),
        ),
        forward_light_workspace_bytes=(
            light - chain.input_of(first) - tail.output_bytes if told else None
        ),
        optimizer_workspace_bytes=max(layer.optimizer_workspace_bytes for layer in layers),
        buffer_bytes=sum(layer.buffer_bytes for layer in layers),
        frozen_bytes=sum(layer.frozen_bytes for layer in layers),
        parameters=tuple(dict.fromkeys(name for layer in layers for name in layer.parameters)),
    )


def _bytes(chain: Chain, first: int, last: int) -> tuple[int, int, int]:
    """(saved_bytes of the group, forward peak, backward peak), beyond what lies before it.

    What lies before is the saved input of the group (M2) and of all before it in its stage.
    """
    kept = forward = backward = 0
    for index in range(first, last + 1):
        layer = chain.layers[index]
        incoming = inner = 0
        if index > first:
            inner = max(chain.layers[index - 1].saved_output_bytes, layer.saved_input_bytes)
            incoming = max(inner, chain.input_of(index))
        running = layer.saved_bytes + layer.forward_workspace_bytes + layer.output_bytes
        forward = max(forward, kept + incoming + running)
        kept += inner + layer.saved_bytes
        backward = max(
            backward,
            kept
            + layer.saved_output_bytes
            + layer.backward_workspace_bytes
            + layer.gradient_of_output_bytes
            + chain.gradient_of_input(index),
        )
    return kept, forward, backward


def _ns(times: Sequence[int], speeds: Sequence[float]) -> int:
    """The least time t whose ceil(t / speed) is at least the layers' own sum, on every GPU."""
    least = 0
    for speed in {Fraction(repr(speed)) for speed in speeds}:
        total = sum(ceil_div(time * speed.denominator, speed.numerator) for time in times)
        if total:
            least = max(least, int((total - 1) * speed) + 1)
    return least
