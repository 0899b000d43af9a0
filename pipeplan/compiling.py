"""Layers that run compiled, each by itself: a profile times what a stage runs.

A layer and not a stage is the unit, since a profile knows layers alone: times and bytes of what is
compiled hold under every plan. Random numbers are those of eager code, so a compiled layer differs
from the layer by rounding. `capture` and `runtime` compile alike; hence this lies below both.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from pipeplan.errors import InputError
from pipeplan.split_model import SplitModel

INDUCTOR = "inductor"
"""The backend that `compile=True` means."""

_log = logging.getLogger(__name__)
_numbers = itertools.count()


def backend_of(wanted: object) -> str | None:
    """The backend of torch.compile that `Task.compile` names; None: layers run as they are.

    Raises:
        InputError: if it names none that there is.
    """
    if wanted is True:
        return INDUCTOR
    if wanted is False:
        return None
    known = torch.compiler.list_backends(exclude_tags=())
    if not isinstance(wanted, str) or wanted not in known:
        raise InputError(
            f"task: compile: got {wanted!r}, need True, False or a backend of torch.compile:"
            f" {', '.join(known)}"
        )
    return wanted


def check_compiler(backend: str | None, device: torch.device) -> None:
    """Refuse to compile where what makes machine code is missing.

    Args:
        backend: as `backend_of` gives it.
        device: where the layers are.

    Raises:
        InputError: if there is no compiler.
    """
    if backend != INDUCTOR:
        return
    lacking = _lacks_triton() if device.type == "cuda" else _lacks_cpp()
    if lacking:
        raise InputError(
            f"task: compile: torch's inductor makes code for {device.type}: got {lacking}."
            ' Install one, give Task(compile="aot_eager"), which needs none and is not faster, or'
            " Task(compile=False)."
        )


def _lacks_cpp() -> str:
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        told = " ".join(str(error).split())
        return (
            f"no C++ compiler ({told}), need g++ or clang++, or the environment's CXX to name it"
        )
    return ""


def _lacks_triton() -> str:
    from torch.utils._triton import has_triton

    return "" if has_triton() else "no Triton that works on this GPU, need the package triton"


class Compiled(nn.Module):
    """A layer whose training forward and backward are compiled, for fixed shapes.

    It runs as it is in eval mode, and inside a dispatch mode (which counts bytes, say): torch
    compiles nothing there and would give the layer up for good.
    """

    def __init__(
        self,
        layer: nn.Module,
        name: str,
        backend: str,
        told: Callable[[str], None] | None = None,
    ) -> None:
        """Takes the layer; it is compiled when it is first called.

        Args:
            layer: its parameters and buffers stay its own.
            name: of the layer, for people.
            backend: of torch.compile.
            told: called with `name` when the layer is first compiled.
        """
        super().__init__()
        self.layer = layer
        self.name = name
        self.graphs = 0
        """How many graphs have been compiled: one per mode and kind of input."""
        self.is_settled = False
        """Whether all that is needed has been compiled, so that more is worth a warning."""
        self._backend = backend
        self._told = told
        self._call = torch.compile(_with_own_code(layer), backend=self._compile, dynamic=False)

    def forward(self, *values: Tensor) -> Any:
        """What the layer returns."""
        if not self.training or _get_current_dispatch_mode() is not None:
            return self.layer(*values)
        return self._call(*values)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """A copy is of the layer itself, not compiled."""
        from copy import deepcopy

        copied: nn.Module = deepcopy(self.layer, memo)
        return copied

    def _compile(self, graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Any:
        self.graphs += 1
        if self._told and self.graphs == 1:
            self._told(self.name)
        if self.is_settled:
            _log.warning("layer %s is compiled again, in the middle of a schedule", self.name)
        if self._backend == INDUCTOR:
            from torch._inductor.compile_fx import compile_fx

            return compile_fx(graph, inputs, config_patches={"fallback_random": True})
        lookup: Callable[[str], Callable[..., Any]] = torch._dynamo.lookup_backend  # noqa: SLF001
        return lookup(self._backend)(graph, inputs)


def _with_own_code(layer: nn.Module) -> Callable[..., Any]:
    """A function that calls `layer`, with code that no other layer has.

    torch keeps what it compiled by code, and gives up where one has been compiled too often: for
    layers of one class, each of another shape, that would be soon.
    """

    def call(*values: Tensor) -> Any:
        return layer(*values)

    name = f"layer_{next(_numbers)}"
    code = call.__code__.replace(co_name=name)
    return FunctionType(code, call.__globals__, name, None, call.__closure__)


def compiled(model: SplitModel, told: Callable[[str], None] | None = None) -> SplitModel:
    """`model` with its layers compiled, but for those that stay eager; itself where none is.

    Args:
        model: not changed; its layers are inside those of the result.
        told: called with a layer's name when it is first compiled.
    """
    if model.compile is None:
        return model
    pairs = [compiled_layer(model, index, told) for index in range(len(model.layers))]
    layers, fqns = zip(*pairs, strict=True)
    return replace(model, layers=layers, fqns=fqns)


def compiled_layer(
    model: SplitModel, index: int, told: Callable[[str], None] | None = None
) -> tuple[nn.Module, dict[str, str]]:
    """Layer `index` (0-based) of `model` as it runs, and the names of its tensors in the model."""
    layer, fqns = model.layers[index], model.fqns[index]
    if model.compile is None or index in model.eager:
        return layer, fqns
    made = Compiled(layer, model.names[index], model.compile, told)
    return made, {f"layer.{local}": name for local, name in fqns.items()}
