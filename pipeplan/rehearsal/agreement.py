"""Whether a captured call gives the bits of the module: the graph holds what happened once.

What Python decides while it is traced, such as by a counter, is decided for good; another run
shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from pipeplan.capture.tensor_distance import largest_size, relative_difference
from pipeplan.capture.user_model.module_attributes import restored
from pipeplan.operators.captured import Captured
from pipeplan.operators.executor import ProgramPass
from pipeplan.operators.flat_module import TensorTree, states_for_trial, states_of
from pipeplan.operators.prepared import PreparedProgram
from pipeplan.operators.refusals import UncapturableError
from pipeplan.remat.programs import keep_all
from pipeplan.repeat import kept_generators

_Found = dict[str, Tensor | None]
"""Name -> what a step has left there."""
_Step = Callable[[nn.Module, Captured, list[Tensor | None]], _Found]


def check_agreement(module: nn.Module, captured: Captured) -> None:
    """Runs a forward and its backward of both with the captured inputs; all is left as it was.

    A module that does not repeat its own bits on a GPU, whose kernels may add up in any order, has
    to be met but for rounding.

    Args:
        module: what was captured, with real tensors.
        captured: of a call with real inputs.

    Raises:
        UncapturableError: names the first output, gradient or buffer that differs.
    """
    gradients = _gradients(captured)

    def ran(step: _Step) -> _Found:
        with kept_generators(), restored([module]):
            return step(module, captured, gradients)

    mine, theirs = ran(_by_operators), ran(_by_module)
    if not (wrong := _different(mine, theirs)):
        return
    if _adds_up_in_any_order(captured.device) and _different(ran(_by_module), theirs):
        wrong = _far(mine, theirs)
    if not wrong:
        return
    raise UncapturableError(
        f"{wrong[0]}: the graph gives other bits than the module: it does something that is"
        " not the same in each call, or that torch's tracer does not see"
    )


def _adds_up_in_any_order(device: torch.device) -> bool:
    """Whether kernels may: then equal calls may give other bits."""
    return device.type != "cpu"


def _different(mine: _Found, theirs: _Found) -> list[str]:
    """Names of what differs in any bit."""
    return [name for name, expected in theirs.items() if not _equal(mine[name], expected)]


def _far(mine: _Found, theirs: _Found) -> list[str]:
    """Names of what differs by more than rounding."""
    slopes = {name for name in theirs if name.startswith("gradient of ")}
    sizes = [largest_size(x) for name, x in theirs.items() if name in slopes and x is not None]
    steepest = max(sizes, default=0.0)
    return [
        name
        for name, expected in theirs.items()
        if _distance(mine[name], expected, steepest if name in slopes else 0.0)
        > _unit(expected) ** 0.5
    ]


def _distance(mine: Tensor | None, theirs: Tensor | None, scale: float) -> float:
    """As `relative_difference`; infinite where what is no number lies elsewhere."""
    if _equal(mine, theirs):
        return 0.0
    if mine is None or theirs is None or mine.dtype != theirs.dtype or mine.shape != theirs.shape:
        return float("inf")
    finite = theirs.isfinite()
    if not _equal(mine.masked_fill(finite, 0), theirs.masked_fill(finite, 0)):
        return float("inf")
    expected, got = (each.masked_fill(~finite, 0) for each in (theirs, mine))
    return relative_difference(expected, got, _unit(theirs), scale)


def _unit(tensor: Tensor | None) -> float:
    if tensor is None or not (tensor.is_floating_point() or tensor.is_complex()):
        return 0.0
    return torch.finfo(tensor.dtype).eps


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
