"""Times every layer in place: one micro-batch forward through all layers without autograd, then
once more with it, then back.

Layers run in the order they have in training, not each alone many times over, so that each finds
the caches as training leaves them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pipeplan.capture.boundary_trace import call_layer, check_loss
from pipeplan.capture.layer_costs.device_clock import ModelDevice
from pipeplan.capture.layer_costs.layer_run import fed_tensors
from pipeplan.capture.layer_costs.micro_batches import MicroBatches
from pipeplan.gradients import give_sum, sum_dtype, take_sum
from pipeplan.precision import casting
from pipeplan.task import SplitModel


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
