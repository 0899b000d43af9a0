"""Times every layer in place: one micro-batch forward through all layers without autograd, then
once more with it, then back.

Layers run in the order they have in training, not each alone many times over, so that each finds
the caches as training leaves them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipeplan.autograd_cut import Slot, enter_some
from pipeplan.capture.boundary_trace import call_layer, check_loss
from pipeplan.capture.layer_costs.device_clock import ModelDevice
from pipeplan.capture.layer_costs.layer_run import fed_tensors
from pipeplan.capture.layer_costs.micro_batches import MicroBatches
from pipeplan.gradients import give_sum, sum_dtype, take_sum
from pipeplan.precision import casting
from pipeplan.task import SplitModel, TensorSpec
from pipeplan.weight_gradients import WeightGradients


@contextmanager
def gradient_buffers(
    layers: Sequence[nn.Module], accumulate: torch.dtype | None = None
) -> Iterator[None]:
    """Gives trainable parameters zeroed gradient buffers until the block ends.

    Args:
        layers: whose parameters.
        accumulate: as `Task.accumulate`.
    """
    every = (p for layer in layers for p in layer.parameters() if p.requires_grad)
    trainable = list(dict.fromkeys(every))
    for parameter in trainable:
        total = torch.zeros_like(parameter, dtype=sum_dtype(parameter, accumulate))
        give_sum(parameter, total)
    try:
        yield
    finally:
        for parameter in trainable:
            take_sum(parameter)


Marks = list[tuple[Any, Any]]
"""Per layer: the clock's marks before and behind it."""
Graph = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]


@dataclass(frozen=True, slots=True)
class _SplitGraph:
    """What waits for the backward of one layer."""

    entry: Slot
    waiting: WeightGradients | None
    """None where its backward is one piece."""
    outputs: tuple[Tensor, ...]

    def backward(self, gradients: list[Tensor], boundary: Sequence[TensorSpec]) -> list[Tensor]:
        """Gradients of the differentiable tensors of the `boundary` before it."""
        roots = [output for output in self.outputs if output.requires_grad]
        if roots:
            with self.waiting.activations() if self.waiting else nullcontext():
                torch.autograd.backward(roots, gradients)
        arrived = self.entry.take()
        if arrived is None:
            arrived = [_zeros(s, self.outputs[0].device) for s in boundary if s.differentiable]
        return arrived


def _zeros(spec: TensorSpec, device: torch.device) -> Tensor:
    dtype: torch.dtype = getattr(torch, spec.dtype.removeprefix("torch."))
    return torch.zeros(spec.shape, dtype=dtype, device=device)


class LayerTimer:
    """Runs micro-batches through a split model and times each layer."""

    def __init__(
        self,
        model: SplitModel,
        batches: MicroBatches,
        loss: Callable[[Tensor, Tensor], Tensor],
        place: ModelDevice,
    ) -> None:
        self._model = model
        self._batches = batches
        self._loss = loss
        self._place = place

    def run(self, microbatch: int) -> tuple[list[int], list[int], list[int]]:
        """(forward, backward, forward without autograd) ns of each layer for one micro-batch.

        The first layer's forwards include fetching the micro-batch, and so does that of the last
        one and of those that are fed: the ranks that hold them all fetch it. The loss belongs to
        the last layer.

        Raises:
            InputError: if data, a layer or the loss fails.
        """
        begin = time.perf_counter_ns()
        source, target = self._batches.fetch(microbatch)
        fetch = time.perf_counter_ns() - begin
        with torch.no_grad():
            bare, _ = self._forward(source, target)
        there, graphs = self._forward(source, target)
        back = self._backward(graphs)
        light, forward, backward = (
            [self._place.clock.between(start, end) for start, end in marks]
            for marks in (bare, there, back)
        )
        last = len(forward) - 1
        for index in range(len(forward)):
            if index in (0, last) or self._model.fed_to(index):
                forward[index] += fetch
                light[index] += fetch
        return forward, backward, light

    def run_split(self, microbatch: int, splits: Sequence[bool]) -> tuple[list[int], list[int]]:
        """Times (ns) of both halves of each layer's backward, the weights' second.

        A layer not in `splits` has its whole backward in the first half.

        Raises:
            InputError: if data, a layer or the loss fails.
        """
        source, target = self._batches.fetch(microbatch)
        graphs = self._forward_split(source, target, splits)
        gradients = [torch.ones_like(graphs[-1].outputs[0])]
        mark, marks = self._place.clock.mark, []
        while graphs:
            index, graph = len(graphs) - 1, graphs.pop()
            begin = mark()
            gradients = graph.backward(gradients, self._model.boundaries[index])
            middle = mark()
            if graph.waiting:
                graph.waiting.weights()
            marks.append((begin, middle, mark()))
        between = self._place.clock.between
        first = [between(begin, middle) for begin, middle, _ in marks[::-1]]
        second = [between(middle, end) for _, middle, end in marks[::-1]]
        return first, second

    def _forward_split(
        self, source: Tensor, target: Tensor, splits: Sequence[bool]
    ) -> list[_SplitGraph]:
        model = self._model
        graphs: list[_SplitGraph] = []
        values: tuple[Tensor, ...] = (source,)
        for index, (name, layer) in enumerate(zip(model.names, model.layers, strict=True)):
            entry, waiting = Slot(), WeightGradients() if splits[index] else None
            flags = [spec.differentiable for spec in model.boundaries[index]]
            entered = enter_some(entry, [value.detach() for value in values], flags)
            fed = fed_tensors(model, index, source)
            self._place.seed(index)
            with waiting.deferring(layer) if waiting else nullcontext():
                values = call_layer(name, layer, (*entered, *fed), model.autocast)
            if index == len(model.layers) - 1:
                with casting(model.autocast, values[0].device):
                    values = (check_loss(self._loss(values[0], target)),)
            graphs.append(_SplitGraph(entry, waiting, values))
        return graphs

    def _forward(self, source: Tensor, target: Tensor) -> tuple[Marks, list[Graph]]:
        model, mark = self._model, self._place.clock.mark
        marks, graphs = [], []
        values: tuple[Tensor, ...] = (source,)
        last = len(model.layers) - 1
        for index, (name, layer) in enumerate(zip(model.names, model.layers, strict=True)):
            pairs = zip(values, model.boundaries[index], strict=True)
            leaves = tuple(
                value.detach().requires_grad_(spec.differentiable) for value, spec in pairs
            )
            fed = fed_tensors(model, index, source)
            begin = mark()
            self._place.seed(index)
            values = call_layer(name, layer, (*leaves, *fed), model.autocast)
            if index == last:
                with casting(model.autocast, values[0].device):
                    values = (check_loss(self._loss(values[0], target)),)
            marks.append((begin, mark()))
            if torch.is_grad_enabled():
                graphs.append((leaves, values))
        return marks, graphs

    def _backward(self, graphs: list[Graph]) -> Marks:
        mark = self._place.clock.mark
        marks: Marks = []
        gradients = [torch.ones_like(graphs[-1][1][0])]
        while graphs:
            leaves, outputs = graphs.pop()
            roots = [output for output in outputs if output.requires_grad]
            begin = mark()
            if roots:
                torch.autograd.backward(roots, gradients)
            marks.append((begin, mark()))
            gradients = [
                torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
                for leaf in leaves
                if leaf.requires_grad
            ]
        return marks[::-1]
