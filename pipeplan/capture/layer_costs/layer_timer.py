"""Times every layer in place: one micro-batch forward through all layers without autograd, then
once more with it, then back.

Layers run in the order they have in training, not each alone many times over, so that each finds
the caches as training leaves them. On a processor one more micro-batch is in flight meanwhile, as
in a pipeline: a backward right behind its own forward would find in the caches what it kept. A
GPU's caches are small beside that, and its memory may not hold two.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipeplan.capture.boundary_trace import alone, call_layer, check_loss
from pipeplan.capture.layer_costs.device_clock import ModelDevice
from pipeplan.capture.layer_costs.layer_run import fed_tensors
from pipeplan.capture.layer_costs.micro_batches import MicroBatches
from pipeplan.gradients import give_sum, sum_dtype, take_sum
from pipeplan.nested import MicroBatch, layer_loss
from pipeplan.precision import casting
from pipeplan.split_model import SplitModel
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


Marks = list[tuple[Any, ...]]
"""Per layer: the clock's marks before its work, behind each part of it."""


@dataclass(frozen=True, slots=True)
class _LayerGraph:
    """What waits for the backward of one layer."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    waiting: WeightGradients | None
    """None where its backward is one piece."""


class LayerTimer:
    """Runs micro-batches through a split model and times each layer."""

    def __init__(
        self,
        model: SplitModel,
        batches: MicroBatches,
        loss: Callable[[Any, Any], Tensor] | None,
        place: ModelDevice,
    ) -> None:
        self._model = model
        self._batches = batches
        self._loss = layer_loss(loss, model.returned)
        self._place = place
        self._in_flight: tuple[tuple[bool, ...], list[_LayerGraph]] | None = None
        """Which backwards come in two halves, and what waits for them."""
        self._alone = place.is_cuda
        """Whether one micro-batch is in flight at a time."""

    def clear(self) -> None:
        """Forget the micro-batch in flight."""
        self._in_flight = None

    def train(self, microbatch: int) -> None:
        """What a rank does all the time: a forward, and the backward of the micro-batch before.

        Raises:
            InputError: if data, a layer or the loss fails.
        """
        self._through(microbatch, self._fetch(microbatch)[0])

    def run(self, microbatch: int) -> tuple[list[int], list[int], list[int]]:
        """(forward, backward, forward without autograd) ns of each layer for one micro-batch.

        The first layer's forwards include fetching the micro-batch, and so does that of the last
        one and of those that are fed: the ranks that hold them all fetch it. The loss belongs to
        the last layer.

        Raises:
            InputError: if data, a layer or the loss fails.
        """
        batch, fetch = self._fetch(microbatch)
        with torch.no_grad():
            bare, _ = self._forward(batch)
        there, behind = self._through(microbatch, batch)
        back = [row[:2] for row in behind]
        return self._between(there, fetch), self._between(back), self._between(bare, fetch)

    def run_split(
        self, microbatch: int, splits: Sequence[bool]
    ) -> tuple[list[int], list[int], list[int]]:
        """The same where backwards come in two halves: (forward, first half, second half) ns.

        A layer not in `splits` has its whole backward in the first half.

        Raises:
            InputError: if data, a layer or the loss fails.
        """
        batch, fetch = self._fetch(microbatch)
        there, back = self._through(microbatch, batch, tuple(splits))
        first, second = [row[:2] for row in back], [row[1:] for row in back]
        return self._between(there, fetch), self._between(first), self._between(second)

    def _through(
        self, microbatch: int, batch: MicroBatch, splits: tuple[bool, ...] = ()
    ) -> tuple[Marks, Marks]:
        """Marks of the forwards of `batch`, and of the backwards of the micro-batch before it.

        What a layer changes in place may be what it kept of the micro-batch before. Then, as where
        memory is short, one is in flight from now on, and a run must not have more.
        """
        if not self._alone:
            try:
                marks, graphs = self._one_more(microbatch, batch, splits)
                return marks, self._backward(graphs)
            except RuntimeError:
                self._alone = True
                self.clear()
                batch = self._batches.fetch(microbatch)
        marks, graphs = self._forward(batch, splits)
        return marks, self._backward(graphs)

    def _one_more(
        self, microbatch: int, batch: MicroBatch, splits: tuple[bool, ...]
    ) -> tuple[Marks, list[_LayerGraph]]:
        """Marks of the forwards of `batch`; what waits for the backward of the one before."""
        if self._in_flight is None or self._in_flight[0] != splits:
            free = _free_bytes()
            first, graphs = self._forward(self._batches.fetch(microbatch), splits)
            left = _free_bytes()
            if free is not None and left is not None and left < 2 * (free - left):
                self._alone = True
                return first, graphs
            self._in_flight = splits, graphs
        _, older = self._in_flight
        marks, graphs = self._forward(batch, splits)
        self._in_flight = splits, graphs
        return marks, older

    def _fetch(self, microbatch: int) -> tuple[MicroBatch, int]:
        """The micro-batch, and how long it took, in ns."""
        begin = time.perf_counter_ns()
        batch = self._batches.fetch(microbatch)
        return batch, time.perf_counter_ns() - begin

    def _between(self, marks: Marks, fetch: int = 0) -> list[int]:
        """Ns of each layer, with `fetch` where a rank must fetch the micro-batch for it."""
        found = [self._place.clock.between(start, end) for start, end in marks]
        last = len(found) - 1
        return [
            time + (fetch if index in (0, last) or self._model.fed_to(index) else 0)
            for index, time in enumerate(found)
        ]

    def _forward(
        self, batch: MicroBatch, splits: Sequence[bool] = ()
    ) -> tuple[Marks, list[_LayerGraph]]:
        model, mark = self._model, self._place.clock.mark
        marks: Marks = []
        graphs: list[_LayerGraph] = []
        values = model.entry(batch.inputs)
        last = len(model.layers) - 1
        for index, (name, layer) in enumerate(zip(model.names, model.layers, strict=True)):
            pairs = zip(values, model.boundaries[index], strict=True)
            leaves = tuple(
                value.detach().requires_grad_(spec.differentiable) for value, spec in pairs
            )
            fed = fed_tensors(model, index, batch.inputs)
            # A leaf counts as a weight there, and a layer's input is none.
            entered = [leaf.view_as(leaf) for leaf in leaves] if splits else leaves
            begin = mark()
            waiting = WeightGradients() if splits and splits[index] else None
            self._place.seed(index)
            with waiting.deferring(layer) if waiting else nullcontext():
                values = call_layer(name, layer, (*entered, *fed), model.autocast)
            if index == last:
                with casting(model.autocast, values[0].device):
                    values = (check_loss(self._loss(alone(values), batch.target)),)
            marks.append((begin, mark()))
            if torch.is_grad_enabled():
                graphs.append(_LayerGraph(leaves, values, waiting))
        return marks, graphs

    def _backward(self, graphs: list[_LayerGraph]) -> Marks:
        """Marks before and behind each backward, and behind its second half, where it has one."""
        mark = self._place.clock.mark
        marks: Marks = []
        gradients = [torch.ones_like(graphs[-1].outputs[0])]
        while graphs:
            graph = graphs.pop()
            inputs, waiting = graph.inputs, graph.waiting
            roots = [output for output in graph.outputs if output.requires_grad]
            del graph
            begin = mark()
            if roots:
                with waiting.activations() if waiting else nullcontext():
                    torch.autograd.backward(roots, gradients)
            middle = mark()
            if waiting:
                waiting.weights()
            marks.append((begin, middle, mark()))
            gradients = [
                torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
                for leaf in inputs
                if leaf.requires_grad
            ]
        return marks[::-1]


def _free_bytes() -> int | None:
    """Of the machine's memory; None where the system does not say."""
    try:
        told = Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return None
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", told, re.MULTILINE)
    return int(found[1]) * 1024 if found else None
