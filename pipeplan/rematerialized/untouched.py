"""Measuring trains for real; what it changes is given back.

Copies wait on the host, so that on an accelerator nothing is held twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from pipeplan.capture.layer_costs.device_clock import ModelDevice
from pipeplan.errors import InputError
from pipeplan.rematerialized.parts import Buffer, buffers_of


@contextmanager
def as_it_was(modules: Sequence[nn.Module], place: ModelDevice) -> Iterator[None]:
    """Gives buffers and moved parameters of `modules`, and the generators, back as they were."""
    kept = [(each, each.tensor, _host(each.tensor)) for each in buffers_of(modules)]
    try:
        with torch.random.fork_rng(devices=place.random_devices):
            yield
    finally:
        with torch.no_grad():
            for each, tensor, value in kept:
                each.owner[each.name] = tensor
                tensor.copy_(value)


@contextmanager
def gradients(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Gives trained parameters of `modules` gradients to add to; then what they had before."""
    found = dict.fromkeys(p for module in modules for p in module.parameters() if p.requires_grad)
    kept = [(parameter, parameter.grad, _value(parameter.grad)) for parameter in found]
    try:
        for parameter, _, value in kept:
            if value is None:
                parameter.grad = torch.zeros_like(parameter)
        yield
    finally:
        for parameter, gradient, value in kept:
            parameter.grad = gradient
            if gradient is not None and value is not None:
                gradient.data.copy_(value)


def check_replaced(before: Sequence[tuple[Buffer, Tensor]]) -> None:
    """Raises InputError where a forward has put another tensor in the place of a buffer."""
    other = next((each.name for each, tensor in before if each.tensor is not tensor), None)
    if other is not None:
        raise InputError(
            f"rematerialize: buffer {other!r}: its layer's forward replaces it, need the same"
            " tensor, so that the layer can run again with the old values. Update it in place,"
            f" such as self.{other}.copy_(...)."
        )


def _host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _value(gradient: Tensor | None) -> Tensor | None:
    """A copy of a gradient that can be added to in place; others are put aside as they are."""
    if gradient is None or gradient.layout is not torch.strided or gradient.requires_grad:
        return None
    return _host(gradient)
