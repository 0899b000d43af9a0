"""Compiles a stage before its run: a schedule has no time for that.

Each compiled layer runs forward and backward once on made-up data, in the modes of the run. What
this changes in buffers is put back; gradients and hooks of the weights do not take part.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from pipeplan.compiling import Compiled
from pipeplan.errors import InputError
from pipeplan.precision import casting
from pipeplan.runtime.parameters.slots import attributes_of
from pipeplan.runtime.stages.module_buffers import restored
from pipeplan.runtime.stages.segment import some
from pipeplan.runtime.stages.stage import StageSpec
from pipeplan.split_model import TensorSpec

_log = logging.getLogger(__name__)


def compile_ahead(spec: StageSpec) -> None:
    """Compile the layers of `spec` that are `Compiled` for all that a step does with them.

    Values flow from layer to layer as in a run, since strides are compiled in. A layer that fails
    on made-up data is compiled at its first micro-batch, and a warning says so.

    Raises:
        InputError: if torch cannot compile one.
    """
    if not any(isinstance(layer, Compiled) for layer in spec.layers):
        return
    cuda = [spec.device] if spec.device.type == "cuda" else []
    with torch.random.fork_rng(cuda), restored(spec.layers):
        values: Sequence[Tensor] | None = None
        for index, layer in enumerate(spec.layers):
            if not isinstance(layer, Compiled):
                values = None  # what stays eager may count, or have other effects
                continue
            given = values or [some(each, spec.device) for each in spec.boundaries[index]]
            values = _compiled(spec, index, layer, given)
            layer.is_settled = values is not None


def _compiled(
    spec: StageSpec, index: int, layer: Compiled, given: Sequence[Tensor]
) -> list[Tensor] | None:
    """What the layer makes of `given`; None where it needs other data."""
    again = any(first <= index <= last for first, last in spec.runs)
    try:
        if again:
            with torch.no_grad():
                _run(spec, index, layer, given)
        return _run(spec, index, layer, given)
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        if isinstance(error, torch._dynamo.exc.TorchDynamoException):  # noqa: SLF001
            raise InputError(
                f"task: layer {layer.name!r}: got an error of torch.compile, need a layer that it"
                f" compiles: {text[:500]} Put what it cannot compile into a function under"
                " torch.compiler.disable, or give Task(compile=False)."
            ) from error
        _log.warning(
            "layer %s is compiled at its first micro-batch: it fails on made-up data: %s",
            layer.name,
            text[:500],
        )
        return None


def _run(spec: StageSpec, index: int, layer: Compiled, given: Sequence[Tensor]) -> list[Tensor]:
    """Forward and, where autograd is on, backward."""
    enters = spec.index > 0 or index > 0
    flags = [each.differentiable and enters for each in spec.boundaries[index]]
    with _stand_ins(layer) as weights:
        leaves = [
            value.detach().requires_grad_(flag and torch.is_grad_enabled())
            for value, flag in zip(given, flags, strict=True)
        ]
        inputs = [leaf.clone() for leaf in leaves]  # no leaves: a layer may work in place
        fed = [some(each, spec.device) for each in _fed(spec, index)]
        with casting(spec.autocast, spec.device):
            result = layer(*inputs, *fed)
        outputs = result if isinstance(result, tuple) else (result,)
        roots = [output for output in outputs if output.requires_grad]
        wanted = [each for each in (*leaves, *weights) if each.requires_grad]
        if roots and wanted:
            torch.autograd.grad(
                roots, wanted, list(map(torch.ones_like, roots)), allow_unused=True
            )
    return [output.detach() for output in outputs]


def _fed(spec: StageSpec, index: int) -> tuple[TensorSpec, ...]:
    return spec.fed[index].specs if index in spec.fed else ()


@contextmanager
def _stand_ins(layer: nn.Module) -> Iterator[list[nn.Parameter]]:
    """Inside, other parameters with the same storages, which have no hooks and no gradients."""
    found = attributes_of(layer)
    made = {parameter: nn.Parameter(parameter.data) for parameter in found}
    try:
        for parameter, places in found.items():
            for place in places:
                place.set(made[parameter])
        yield list(made.values())
    finally:
        for parameter, places in found.items():
            for place in places:
                place.set(parameter)
