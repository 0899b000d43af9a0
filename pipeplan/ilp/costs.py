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
from typing import Literal

from pipeplan.chain import Chain
from pipeplan.cluster import Cluster
from pipeplan.ilp.segment_bytes import (
    SegmentBytes,
    exact_segment,
    movable_bytes,
    paper_segment,
)
from pipeplan.plan import MemoryModel, Semantics, Stage
from pipeplan.units import ceil_div


@dataclass(frozen=True)
class CostModel:
    """Durations and bytes of one chain on one cluster under one memory model.

    `recomputed` are the chain's layers that stand for recomputed segments, and those that run an
    option; `programs` are the latter alone. `pins` are (layer, GPU) for layers whose GPU is given.
    With `states_away` every segment is counted with its states on the host, (U2), otherwise those
    of stages that say so.
    """

    chain: Chain
    cluster: Cluster
    semantics: Semantics
    memory_model: MemoryModel
    recomputed: frozenset[int] = frozenset()
    programs: frozenset[int] = frozenset()
    pins: tuple[tuple[int, int], ...] = ()
    states_away: bool = False

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
    def _compute_sums(self) -> dict[float, tuple[list[int], ...]]:
        """Prefix sums of (forward, backward, forward before a split backward, I, W) ns of the
        layers, by GPU speed.

        A W that is not known counts as 0.
        """
        layers, sums = self.chain.layers, {}
        weights = [layer.backward_weight_ns or 0 for layer in layers]
        kinds = (
            [layer.forward_ns for layer in layers],
            [layer.backward_ns for layer in layers],
            [layer.split_forward_ns for layer in layers],
            [layer.input_ns for layer in layers],
            weights,
        )
        for speed in {gpu.speed for gpu in self.cluster.gpus}:
            exact = Fraction(repr(speed))
            scaled = ((ceil_div_fraction(time, exact) for time in times) for times in kinds)
            sums[speed] = tuple(list(accumulate(times, initial=0)) for times in scaled)
        return sums

    def compute_sums(self, gpu: int) -> tuple[list[int], list[int]]:
        """Prefix sums of the layers' forward and backward ns on `gpu`, without overhead."""
        forward, backward, *_ = self._compute_sums[self.cluster.gpus[gpu].speed]
        return forward, backward

    def _between(self, kind: int, first: int, last: int, gpu: int) -> int:
        """One kind of op of layers first..last on `gpu`, overhead included."""
        sums = self._compute_sums[self.cluster.gpus[gpu].speed][kind]
        return sums[last + 1] - sums[first] + self.cluster.action_overhead_ns

    def forward_ns(self, first: int, last: int, gpu: int) -> int:
        """(T2) of a forward of layers first..last."""
        return self._between(0, first, last, gpu)

    def backward_ns(self, first: int, last: int, gpu: int) -> int:
        """(T2) of a backward of layers first..last."""
        return self._between(1, first, last, gpu)

    def split_forward_ns(self, first: int, last: int, gpu: int) -> int:
        """(S2) of the forward of layers first..last whose backward is split."""
        return self._between(2, first, last, gpu)

    def input_backward_ns(self, first: int, last: int, gpu: int) -> int:
        """(S2) of an I of layers first..last."""
        return self._between(3, first, last, gpu)

    def weight_backward_ns(self, first: int, last: int, gpu: int) -> int:
        """(S2) of a W of layers first..last."""
        return self._between(4, first, last, gpu)

    def may_split(self, first: int, last: int) -> bool:
        """Whether the backward of a stage first..last may be I and W, (S1), and W takes time."""
        allowed = self.exact and self.semantics == "flush"
        return allowed and self.chain.may_split(first, last)

    @property
    def splits(self) -> bool:
        """Whether some backward may be I and W."""
        return any(self.may_split(layer, layer) for layer in range(self.layers))

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

    def update_ns(self, stage: Stage) -> int:
        """What the update of a stage takes in (T5), on its GPU or by way of the host (U5)."""
        layers = self.chain.layers[stage.first : stage.last + 1]
        if stage.states == "gpu":
            speed = Fraction(repr(self.cluster.gpus[stage.gpu].speed))
            return sum(ceil_div_fraction(layer.optimizer_ns, speed) for layer in layers)
        host = self.cluster.host
        assert host is not None
        assert host.update_bytes_per_s is not None
        weights = 10**9 * sum(layer.weight_bytes for layer in layers)
        moved = ceil_div(weights, host.bandwidth_bytes_per_s)
        return self._gradients_ns(stage) + moved + ceil_div(weights, host.update_bytes_per_s)

    def behind_ns(self, stage: Stage) -> int:
        """Of it, what runs beside the GPU's next micro-batches where nothing is offloaded (U7)."""
        layers = self.chain.layers[stage.first : stage.last + 1]
        waits = any(layer.waiting_gradient_bytes for layer in layers)
        if self.semantics == "flush" or stage.states == "gpu" or waits:
            return 0
        return self.update_ns(stage) - self._gradients_ns(stage)

    def _gradients_ns(self, stage: Stage) -> int:
        layers = self.chain.layers[stage.first : stage.last + 1]
        size = 10**9 * sum(layer.gradient_bytes for layer in layers)
        assert self.cluster.host is not None
        return ceil_div(size, self.cluster.host.bandwidth_bytes_per_s)

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

    def segment(
        self, first: int, last: int, covered: bool = False, states: Literal["gpu", "host"] = "gpu"
    ) -> SegmentBytes:
        """Bytes of the segment first..last.

        Args:
            first: First layer, 0-based.
            last: Last layer, inclusive.
            covered: Whether the previous segment is on the same GPU, so that its saved output
                is counted there already (u of M2).
            states: Where a stage has them.
        """
        away = self.states_away or states == "host"
        known, asked = self._segments, (first, last, covered, away)
        if asked not in known:
            if self.exact:
                known[asked] = exact_segment(self.chain, self.semantics, *asked)
            else:
                known[asked] = paper_segment(self.chain, first, last)
        return known[asked]

    @cached_property
    def _segments(self) -> dict[tuple[int, int, bool, bool], SegmentBytes]:
        """What was asked for: gone with this object, of which a search over runs makes many."""
        return {}

    def movable(self, first: int, last: int) -> int:
        """(U1) of layers first..last: bytes that leave a GPU with their states."""
        return sum(movable_bytes(layer) for layer in self.chain.layers[first : last + 1])

    def states_on_host(self, first: int, last: int) -> int:
        """(U3) of a stage first..last: its states there, copies of weights and gradients."""
        layers = self.chain.layers[first : last + 1]
        return self.movable(first, last) + sum(x.weight_bytes + x.gradient_bytes for x in layers)

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

    def keeps_ties(self, stages: Iterable[Stage]) -> bool:
        """Whether layers that must share a GPU do."""
        if not self.tied_groups:
            return True
        home = {
            layer: stage.gpu for stage in stages for layer in range(stage.first, stage.last + 1)
        }
        return all(len({home[layer] for layer in group}) == 1 for group in self.tied_groups)

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
