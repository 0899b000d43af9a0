"""Whether a captured call gives the bits of the module: the graph holds what happened once.

What Python decides while it is traced, such as by a counter, is decided for good; another run
shows it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from pipeplan.capture.layer_costs.device_clock import ModelDevice
from pipeplan.operators.captured import Captured
from pipeplan.operators.executor import ProgramPass
from pipeplan.operators.flat_module import TensorTree, states_for_trial, states_of
from pipeplan.operators.prepared import PreparedProgram
from pipeplan.operators.refusals import UncapturableError
from pipeplan.remat.programs import keep_all

_Found = dict[str, Tensor | None]
"""Name -> what a step has left there."""


def check_agreement(module: nn.Module, captured: Captured) -> None:
    """Runs a forward and its backward of both with the captured inputs; all is left as it was.

    Args:
        module: what was captured, with real tensors.
        captured: of a call with real inputs.

    Raises:
        UncapturableError: names the first output, gradient or buffer that differs in any bit.
    """
    place = ModelDevice(captured.device)
    gradients = _gradients(captured)
    with torch.random.fork_rng(devices=place.random_devices):
        state = torch.get_rng_state()
        on_device = torch.cuda.get_rng_state(place.device) if place.is_cuda else None
        mine = _by_operators(module, captured, gradients)
        torch.set_rng_state(state)
        if on_device is not None:
            torch.cuda.set_rng_state(on_device, place.device)
        theirs = _by_module(module, captured, gradients)
    for name, expected in theirs.items():
        if not _equal(mine[name], expected):
            raise UncapturableError(
                f"{name}: the graph gives other bits than the module: it does something that is"
                " not the same in each call, or that torch's tracer does not see"
            )


def _gradients(captured: Captured) -> list[Tensor | None]:
    source = torch.Generator().manual_seed(0)
    return [
        torch.randn(layout[0], generator=source).to(captured.device, layout[2])
        if layout is not None
        else None
        for layout in captured.layouts
    ]


def _by_operators(module: nn.Module, captured: Captured, gradients: list[Tensor | None]) -> _Found:
    parameters, buffers = states_of(module)
    states = states_for_trial(module)
    inputs = [each.detach() for each in captured.arguments.tensors]
    one = ProgramPass(PreparedProgram(captured, keep_all(captured.graph)), states, inputs)
    outputs = one.forward()
    found: _Found = {f"output {i}": each.clone() for i, each in enumerate(outputs)}
    of_inputs = one.backward(list(gradients))
    found |= {f"gradient of input {i}": each for i, each in enumerate(of_inputs)}
    found |= {f"gradient of {name}": states[name].grad for name in parameters}
    return found | {f"buffer {name}": states[name] for name in buffers}


def _by_module(module: nn.Module, captured: Captured, gradients: list[Tensor | None]) -> _Found:
    parameters, buffers = states_of(module)
    given = captured.arguments.tensors
    inputs = [each.detach().requires_grad_(each.requires_grad) for each in given]
    args, kwargs = captured.arguments.filled(tuple(inputs))
    with _as_it_was(parameters, buffers), torch.enable_grad():
        outputs = TensorTree.tensors_in(module(*args, **kwargs))
        found: _Found = {f"output {i}": each.detach().clone() for i, each in enumerate(outputs)}
        pairs = [
            (output, gradient)
            for output, gradient in zip(outputs, gradients, strict=True)
            if gradient is not None
        ]
        if pairs:
            # As it is captured, and as torch tells users to: outside of the forward's autocast.
            with torch.autocast(captured.device.type, enabled=False):
                torch.autograd.backward([each for each, _ in pairs], [each for _, each in pairs])
        found |= {f"gradient of input {i}": each.grad for i, each in enumerate(inputs)}
        found |= {f"gradient of {name}": each.grad for name, each in parameters.items()}
        return found | {f"buffer {name}": each.clone() for name, each in buffers.items()}


@contextmanager
def _as_it_was(parameters: dict[str, nn.Parameter], buffers: dict[str, Tensor]) -> Iterator[None]:
    """Without gradients; then with those that were there, and with the buffers' old values."""
    kept = {name: each.grad for name, each in parameters.items()}
    values = {name: each.clone() for name, each in buffers.items()}
    for each in parameters.values():
        each.grad = None
    try:
        yield
    finally:
        for name, each in parameters.items():
            each.grad = kept[name]
        with torch.no_grad():
            for name, buffer in buffers.items():
                buffer.copy_(values[name])


def _equal(mine: Tensor | None, theirs: Tensor | None) -> bool:
    if mine is None or theirs is None:
        return mine is theirs
    return mine.dtype == theirs.dtype and torch.equal(mine.nan_to_num(), theirs.nan_to_num())
