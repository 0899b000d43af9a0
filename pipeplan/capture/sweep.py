"""Times every layer in place: one micro-batch forward through all layers, then back.

Layers run in the order they have in training, not each alone many times over, so that each finds
the caches as training leaves them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from pipeplan.capture.trace import call, check_loss
from pipeplan.task import SplitModel, Task


@contextmanager
def gradient_buffers(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Gives trainable parameters zeroed gradient buffers until the block ends."""
    trainable = [p for layer in layers for p in layer.parameters() if p.requires_grad]
    for parameter in trainable:
        parameter.grad = torch.zeros_like(parameter)
    try:
        yield
    finally:
        for parameter in trainable:
            parameter.grad = None


def sweep(model: SplitModel, task: Task, microbatch: int) -> tuple[list[int], list[int]]:
    """(forward, backward) nanoseconds of each layer for one micro-batch.

    The first layer's forward includes fetching the micro-batch, and so does the last one's: the
    ranks that hold them both fetch it. The loss belongs to the last layer.

    Raises:
        InputError: if data, a layer or the loss fails.
    """
    begin = time.perf_counter_ns()
    source, target = task.microbatch(microbatch)
    fetch = time.perf_counter_ns() - begin
    forward, graphs = _forward(model, task, source, target)
    forward[0] += fetch
    if len(forward) > 1:
        forward[-1] += fetch
    return forward, _backward(graphs)


Graph = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]


def _forward(
    model: SplitModel, task: Task, source: Tensor, target: Tensor
) -> tuple[list[int], list[Graph]]:
    times, graphs = [], []
    values: tuple[Tensor, ...] = (source,)
    last = len(model.layers) - 1
    for index, (name, layer) in enumerate(zip(model.names, model.layers, strict=True)):
        specs = model.boundaries[index]
        pairs = zip(values, specs, strict=True)
        leaves = tuple(value.detach().requires_grad_(spec.differentiable) for value, spec in pairs)
        begin = time.perf_counter_ns()
        torch.default_generator.manual_seed(index)
        values = call(name, layer, leaves)
        if index == last:
            values = (check_loss(task.loss(values[0], target)),)
        times.append(time.perf_counter_ns() - begin)
        graphs.append((leaves, values))
    return times, graphs


def _backward(graphs: list[Graph]) -> list[int]:
    times: list[int] = []
    gradients = [torch.ones_like(graphs[-1][1][0])]
    while graphs:
        leaves, outputs = graphs.pop()
        roots = [output for output in outputs if output.requires_grad]
        begin = time.perf_counter_ns()
        if roots:
            torch.autograd.backward(roots, gradients)
        times.append(time.perf_counter_ns() - begin)
        gradients = [
            torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            for leaf in leaves
            if leaf.requires_grad
        ]
    return times[::-1]
