"""Durations and bytes of segments of the chain: what every part of the solver reads.

A segment is a run of consecutive layers `first..last` on one GPU, executed back to back. Numbers
follow docs/reference/model.md: durations (T2), (T3); bytes (M1)-(M5) or (P1)-(P5).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import accumulate

from pipeplan.chain import Chain
from pipeplan.cluster import Cluster
from pipeplan.plan import MemoryModel, Semantics, Stage
from pipeplan.units import ceil_div

PAPER_WEIGHT_COPIES = 3


@dataclass(frozen=True, slots=True)
class SegmentBytes:
    """Bytes of one segment.

    `saved` is A, what each micro-batch keeps. While the forward runs, its own micro-batch counts
    `running` bytes (not yet A); while the backward runs, it counts A + `backward`.

    (M7) reads the input of a stage's first layer. So `running` and `optimizer` hold for a stage;
    what holds for a layer in the midst of any stage are `forward`, and `update` at some time.
    """

    saved: int
    forward: int
    """(M3)."""
    backward: int
    states: int
    optimizer: int
    """W where the update follows a backward (or the drain), 0 where all of it is late (M7)."""
    update: int = 0
    """W of an update at any time: it is beside the states once at least."""
    late: int = 0
    """(M7): an update just before the forward, beside the input; 0 if no update waits."""
    weight: int = 0
    """G of (S3): what a split backward keeps from I to W."""
    weight_shared: int = 0
    """The part of G that the stage before, on the same GPU, counts until its own backward ends."""
    input_backward: int = 0
    """pI - A of (S4)."""
    weight_backward: int = 0
    """pW - G of (S5)."""

    def most_beyond_saved(self, split: bool) -> int:
        """What the op that needs most adds to `saved`, or to `weight`, while it runs."""
        backwards = (self.input_backward, self.weight_backward) if split else (self.backward,)
        return max(self.running - self.saved, *backwards)

    @property
    def running(self) -> int:
        """Bytes of a stage's own micro-batch from the late update to the end of the forward."""
        return max(self.forward, self.late)


@dataclass(frozen=True)
class CostModel:
    """Durations and bytes of one chain on one cluster under one memory model.

    `recomputed` are the chain's layers that stand for recomputed segments; `pins` are
    (layer, GPU) for layers whose GPU is given.
    """

    chain: Chain
    cluster: Cluster
    semantics: Semantics
    memory_model: MemoryModel
    recomputed: frozenset[int] = frozenset()
    pins: tuple[tuple[int, int], ...] = ()

    def __hash__(self) -> int:
        return id(self)

    @property
    def layers(self) -> int:
        """Number of layers of the chain."""
        return len(self.chain.layers)

    @property
    def gpus(self) -> int:
        """Number of GPUs of the cluster."""
        return len(self.cluster.gpus)

    @property
    def exact(self) -> bool:
        """Whether bytes follow (M1)-(M6) rather than (P1)-(P5)."""
        return self.memory_model == "exact"

    @cached_property
    def budgets(self) -> tuple[int, ...]:
        """Memory of each GPU in bytes."""
        return tuple(gpu.budget_bytes for gpu in self.cluster.gpus)

    @cached_property
    def _compute_sums(self) -> dict[float, tuple[list[int], list[int]]]:
        """Prefix sums of (forward, backward) ns of the layers, by GPU speed."""
        sums = {}
        for speed in {gpu.speed for gpu in self.cluster.gpus}:
            exact = Fraction(repr(speed))
            forward = (ceil_div_fraction(layer.forward_ns, exact) for layer in self.chain.layers)
            backward = (ceil_div_fraction(layer.backward_ns, exact) for layer in self.chain.layers)
            sums[speed] = (
                list(accumulate(forward, initial=0)),
                list(accumulate(backward, initial=0)),
            )
        return sums

    def compute_sums(self, gpu: int) -> tuple[list[int], list[int]]:
        """Prefix sums of the layers' forward and backward ns on `gpu`, without overhead."""
        return self._compute_sums[self.cluster.gpus[gpu].speed]

    def forward_ns(self, first: int, last: int, gpu: int) -> int:
        """(T2) of a forward of layers first..last."""
        sums = self.compute_sums(gpu)[0]
        return sums[last + 1] - sums[first] + self.cluster.action_overhead_ns

    def backward_ns(self, first: int, last: int, gpu: int) -> int:
        """(T2) of a backward of layers first..last."""
        sums = self.compute_sums(gpu)[1]
        return sums[last + 1] - sums[first] + self.cluster.action_overhead_ns

    @cached_property
    def _weight_sums(self) -> dict[float, tuple[list[int], list[int]]]:
        """Prefix sums of (I, W) ns of the layers, by GPU speed; an unknown W counts as 0."""
        sums = {}
        for speed in {gpu.speed for gpu in self.cluster.gpus}:
            exact, layers = Fraction(repr(speed)), self.chain.layers
            weights = [layer.backward_weight_ns or 0 for layer in layers]
            inputs = [
                ceil_div_fraction(layer.backward_ns - weight, exact)
                for layer, weight in zip(layers, weights, strict=True)
            ]
            sums[speed] = (
                list(accumulate(inputs, initial=0)),
                list(accumulate((ceil_div_fraction(w, exact) for w in weights), initial=0)),
            )
        return sums

    def input_backward_ns(self, first: int, last: int, gpu: int) -> int:
        """(S2) of an I of layers first..last."""
        sums = self._weight_sums[self.cluster.gpus[gpu].speed][0]
        return sums[last + 1] - sums[first] + self.cluster.action_overhead_ns

    def weight_backward_ns(self, first: int, last: int, gpu: int) -> int:
        """(S2) of a W of layers first..last."""
        sums = self._weight_sums[self.cluster.gpus[gpu].speed][1]
        return sums[last + 1] - sums[first] + self.cluster.action_overhead_ns

    @cached_property
    def _unknown_weights(self) -> list[int]:
        """How many of the layers before each do not tell what W takes and needs."""
        known = (
            layer.backward_weight_ns is not None and layer.saved_for_weight_bytes is not None
            for layer in self.chain.layers
        )
        return list(accumulate((not each for each in known), initial=0))

    def may_split(self, first: int, last: int) -> bool:
        """Whether the backward of a stage first..last may be I and W, (S1), and W takes time.

        Never on measured chains: (S2) knows no time that both halves take beyond one backward, and
        where layers are short that is much (25 % of a step with layers of 2 ms on a processor).
        """
        unknown = self._unknown_weights
        allowed = first > 0 and self.exact and self.semantics == "flush"
        allowed = allowed and self.chain.mode != "measured"
        takes = any(layer.backward_weight_ns for layer in self.chain.layers[first : last + 1])
        return allowed and unknown[first] == unknown[last + 1] and takes

    def load_ns(self, first: int, last: int, gpu: int) -> int:
        """Forward plus backward of layers first..last on `gpu`, overhead of one stage included."""
        return self.forward_ns(first, last, gpu) + self.backward_ns(first, last, gpu)

    def send_forward_ns(self, boundary: int, source: int, target: int) -> int:
        """(T3) of the output of layer `boundary` from GPU `source` to GPU `target`."""
        return self._transfer_ns(self.chain.layers[boundary].output_bytes, source, target)

    def send_backward_ns(self, boundary: int, source: int, target: int) -> int:
        """(T3) of the gradient of that output, from GPU `source` (layer boundary + 1's)."""
        size = self.chain.layers[boundary].gradient_of_output_bytes
        return self._transfer_ns(size, source, target)

    def _transfer_ns(self, size: int, source: int, target: int) -> int:
        latency, bandwidth = self.link(source, target)
        return latency + (ceil_div(size * 10**9, bandwidth) if bandwidth else 0)

    def link(self, source: int, target: int) -> tuple[int, int | None]:
        """(latency ns, bytes per second or None) from `source` to `target`."""
        known = self._links
        if (source, target) not in known:
            known[source, target] = self.cluster.links.between(source, target)
        return known[source, target]

    @cached_property
    def _links(self) -> dict[tuple[int, int], tuple[int, int | None]]:
        return {}

    def tensor_bytes(self, boundary: int, *, backward: bool) -> int:
        """Bytes that a receiver holds for the boundary behind layer `boundary`: (M5), (P5)."""
        layer = self.chain.layers[boundary]
        return layer.gradient_of_output_bytes if backward and self.exact else layer.output_bytes

    def unsaved_bytes(self, boundary: int, *, backward: bool) -> int:
        """Bytes that a producer holds for it beyond its saved output: (M4), (M5), (P4)."""
        layer = self.chain.layers[boundary]
        if not self.exact:
            return layer.output_bytes
        if backward:
            return layer.gradient_of_output_bytes
        stays = layer.saved_passing_bytes if self.cluster.host is None else 0
        return layer.output_bytes - layer.saved_output_bytes - stays

    def segment(self, first: int, last: int, covered: bool = False) -> SegmentBytes:
        """Bytes of the segment first..last.

        Args:
            first: First layer, 0-based.
            last: Last layer, inclusive.
            covered: Whether the previous segment is on the same GPU, so that its saved output
                is counted there already (u of M2).
        """
        known, asked = self._segments, (first, last, covered)
        if asked not in known:
            if self.exact:
                known[asked] = _exact_segment(self.chain, self.semantics, *asked)
            else:
                known[asked] = _paper_segment(self.chain, first, last)
        return known[asked]

    @cached_property
    def _segments(self) -> dict[tuple[int, int, bool], SegmentBytes]:
        """What was asked for: gone with this object, of which a search over runs makes many."""
        return {}

    @cached_property
    def tied_groups(self) -> tuple[tuple[int, ...], ...]:
        """Layers that must share a GPU, as sorted groups: by a parameter name or by their pins."""
        shared = self.chain.tied != "synchronize"
        pinned = dict(self.pins)
        owner: dict[str | int, int] = {}
        parent = list(range(self.layers))

        def root(layer: int) -> int:
            while parent[layer] != layer:
                layer = parent[layer]
            return layer

        for index, layer in enumerate(self.chain.layers):
            names: list[str | int] = list(layer.parameters) if shared else []
            for name in [*names, pinned[index]] if index in pinned else names:
                parent[root(index)] = root(owner.setdefault(name, index))
        groups: dict[int, list[int]] = {}
        for index in range(self.layers):
            groups.setdefault(root(index), []).append(index)
        return tuple(tuple(group) for group in groups.values() if len(group) > 1)

    @cached_property
    def pinned_gpus(self) -> tuple[int | None, ...]:
        """GPU of each layer where it is given, by its own pin or by that of one tied to it."""
        homes: list[int | None] = [None] * self.layers
        for layer, gpu in self.pins:
            homes[layer] = gpu
        for group in self.tied_groups:
            given = next((homes[layer] for layer in group if homes[layer] is not None), None)
            for layer in group:
                homes[layer] = given if homes[layer] is None else homes[layer]
        return tuple(homes)

    def keeps_pins(self, stages: Iterable[Stage]) -> bool:
        """Whether every pinned layer sits on its GPU."""
        return not self.pins or all(
            self.pinned_gpus[layer] in (None, stage.gpu)
            for stage in stages
            for layer in range(stage.first, stage.last + 1)
        )


def ceil_div_fraction(value: int, divisor: Fraction) -> int:
    """`value / divisor` rounded up, exactly."""
    return ceil_div(value * divisor.denominator, divisor.numerator)


def _exact_segment(
    chain: Chain, semantics: Semantics, first: int, last: int, covered: bool
) -> SegmentBytes:
    """(M1)-(M3) and (M7) of one segment, in one pass over its layers."""
    layers = chain.layers
    shared = layers[first - 1].saved_output_bytes if covered and first else 0
    saved_input = max(0, layers[first].saved_input_bytes - shared)
    kept = saved_input  # saved input, saved rests and inner boundaries of the layers before l
    forward = backward = 0
    for index in range(first, last + 1):
        layer = layers[index]
        source = chain.input_of(index)
        if index == first:
            incoming, behind = max(saved_input, max(0, source - shared)), 0
        else:
            inner = max(layers[index - 1].saved_output_bytes, layer.saved_input_bytes)
            incoming, behind = max(inner, source), kept
            kept += inner
        kept += layer.saved_bytes
        forward = max(
            forward,
            incoming
            + behind
            + layer.saved_bytes
            + layer.forward_workspace_bytes
            + layer.output_bytes,
        )
        backward = max(
            backward,
            kept
            + layer.saved_output_bytes
            + layer.backward_workspace_bytes
            + layer.gradient_of_output_bytes
            + chain.gradient_of_input(index),
        )
    saved = kept + layers[last].saved_output_bytes
    weight, shared_weight, input_backward, weight_backward = _split_segment(
        chain, first, last, shared, saved
    )
    versions = 2 if semantics == "2bw" else 1
    hosted = layers[first : last + 1]
    update = max(x.optimizer_workspace_bytes for x in hosted)
    waiting = (versions - 1) * sum(x.waiting_gradient_bytes for x in hosted)
    entering = chain.input_of(first) - shared if first else 0
    all_late = waiting and waiting == sum(x.gradient_bytes for x in hosted)
    return SegmentBytes(
        saved=saved,
        forward=forward,
        backward=backward - saved,
        states=sum(
            versions * x.weight_bytes
            + x.gradient_bytes
            + (versions - 1) * x.waiting_gradient_bytes
            + x.optimizer_bytes
            for x in hosted
        ),
        optimizer=0 if all_late else update,
        update=update,
        late=entering + update if waiting else 0,
        weight=weight,
        weight_shared=shared_weight,
        input_backward=input_backward,
        weight_backward=weight_backward,
    )


def _split_segment(
    chain: Chain, first: int, last: int, shared: int, saved: int
) -> tuple[int, int, int, int]:
    """(S3)-(S5): G, its part that the stage before shares, pI - A, pW - G; zeros where not known.

    Args:
        chain: The chain.
        first: First layer of the stage.
        last: Its last layer.
        shared: u of (M2).
        saved: A of the stage.
    """
    layers = chain.layers
    hosted = layers[first : last + 1]
    if any(each.saved_for_weight_bytes is None for each in hosted):
        return 0, 0, 0, 0
    kept = saved  # of layer l and those before it, while I walks back from the last one
    done = boundary = 0  # of the layers behind l: kept for weights; input of the next one
    most = 0
    for index in range(last, first - 1, -1):
        layer = layers[index]
        own = layer.saved_output_bytes
        gradients = layer.gradient_of_output_bytes + chain.gradient_of_input(index)
        held = kept - own + max(own, boundary)
        most = max(most, held + done + layer.input_backward_workspace_bytes + gradients)
        entering = layer.saved_input_for_weight_bytes
        done += (layer.saved_for_weight_bytes or 0) - entering + boundary
        boundary = entering
        if index > first:
            before = layers[index - 1].saved_output_bytes
            inner = max(before, layer.saved_input_bytes)
            kept += before - own - layer.saved_bytes - inner
    total = done + boundary
    peak, rest = 0, total
    for layer in reversed(hosted):
        peak = max(peak, rest + layer.weight_backward_workspace_bytes)
        rest -= layer.saved_for_weight_bytes or 0
    return total, min(shared, boundary), most - saved, peak - total


def _paper_segment(chain: Chain, first: int, last: int) -> SegmentBytes:
    """(P1)-(P3) of one segment."""
    layers = chain.layers[first : last + 1]
    stored = [x.saved_input_bytes + x.saved_bytes + x.saved_output_bytes for x in layers]
    before = list(accumulate(stored, initial=0))
    total, forward, backward = before[-1], 0, 0
    for index, layer in enumerate(layers):
        source = chain.input_of(first + index)
        forward = max(forward, before[index] + max(stored[index], source) + layer.output_bytes)
        released = total - before[index + 1]
        backward = max(backward, layer.output_bytes + source - released)
    return SegmentBytes(
        saved=total,
        forward=forward,
        backward=backward,
        states=PAPER_WEIGHT_COPIES * sum(x.weight_bytes for x in layers),
        optimizer=0,
    )
