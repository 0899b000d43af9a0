"""Models without memory: weights with shape and type, on which nothing is computed.

Two steps, because each suits its purpose. While a task is made, its parameters are on torch's
`meta` device, on which modules can be built, initialised, cast and copied as usual; everything
else (data, buffers) is real. To profile it, its tensors become fake tensors on the processor:
torch then chooses the same kernels as for real ones there, so the same bytes are saved.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from pipeplan.capture.boundary_trace import fake_mode
from pipeplan.errors import InputError
from pipeplan.task import Task


@contextmanager
def weightless() -> Iterator[None]:
    """Parameters made inside the block take no memory and no time to initialise.

    Where a model moves them to a device, they stay where they are.
    """
    usual = nn.Parameter.__new__

    def make(cls: type, data: Any = None, requires_grad: bool = True) -> Any:
        plain = type(data) in (Tensor, nn.Parameter)
        return usual(cls, data.to("meta") if plain else data, requires_grad)

    nn.Parameter.__new__ = make  # type: ignore[method-assign]
    try:
        with _StayMeta():
            yield
    finally:
        nn.Parameter.__new__ = usual  # type: ignore[method-assign]


def weightless_twin(task: Task) -> tuple[Task, FakeTensorMode]:
    """`task` with a copy of its model whose tensors are fake, and their mode.

    The task itself is not touched. Tensors that are shared in the model are shared in the copy.

    Raises:
        InputError: if the model cannot be copied.
    """
    model = task.model if isinstance(task.model, nn.Module) else nn.ModuleList(task.model)
    mode = fake_mode([model])
    states = [*model.parameters(), *model.buffers()]
    memo: dict[int, Any] = {id(state): _faked(state, mode) for state in states}
    try:
        twin = copy.deepcopy(task.model, memo)
    except Exception as error:
        raise InputError(
            f"task: model {type(task.model).__name__}: cannot be copied, which mode fake needs:"
            f" {type(error).__name__}: {error}. Profile with --mode measured."
        ) from error
    return replace(task, model=twin), mode


def _faked(state: Tensor, mode: FakeTensorMode) -> Tensor:
    if isinstance(state, FakeTensor):
        return state
    with mode:
        made = torch.empty_strided(state.size(), state.stride(), dtype=state.dtype, device="cpu")
    if isinstance(state, nn.Parameter):
        twin = nn.Parameter(made, state.requires_grad)
        twin._backward_hooks = state._backward_hooks  # noqa: SLF001 - no other way to share them
        hooks = state._post_accumulate_grad_hooks  # noqa: SLF001
        if hooks is not None:
            twin._post_accumulate_grad_hooks = hooks  # noqa: SLF001
        return twin
    return made


class ProcessorKernels(TorchDispatchMode):
    """Gives results the storages that the processor's kernels give them.

    Enter it right behind the fake mode, which knows shapes only. Kernels of some losses compute
    all summands in the storage of the mean they return, and backwards leave out gradients that
    nobody wants; that is put right. What a few others take beyond their shapes has no formula;
    they are written down.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.inexact: set[str] = set()
        """Operations met whose bytes are not those of the real kernel."""

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Runs one operation and puts the storages of its result right."""
        result = func(*args, **(kwargs or {}))
        packet = getattr(func, "overloadpacket", None)
        if packet in _MEAN_OVER_SUMMANDS and result.dim() == 0:
            summands = torch.broadcast_shapes(args[0].shape, args[1].shape)
            result.untyped_storage().resize_(summands.numel() * result.itemsize)
        elif packet in _STATISTICS:
            kind = _widest(args)
            for one in result[1:]:
                one.untyped_storage().resize_(one.numel() * kind.itemsize)
        elif packet in _MASKED:
            result = tuple(
                one if wanted else None for one, wanted in zip(result, args[-1], strict=True)
            )
        elif packet in _INEXACT:
            self.inexact.add(str(packet))
        return result


def _packets(*names: str) -> set[Any]:
    return {getattr(torch.ops.aten, name) for name in names}


_MEAN_OVER_SUMMANDS = _packets(
    "mse_loss", "smooth_l1_loss", "binary_cross_entropy", "soft_margin_loss"
)
_STATISTICS = _packets("native_batch_norm")
"""Beside their result they return means and deviations in the type of the weights."""
_MASKED = _packets("native_batch_norm_backward")
"""Their last argument says which results are wanted."""
_INEXACT = _packets("mkldnn_rnn_layer", "_embedding_bag", "im2col")
"""oneDNN's LSTM keeps a workspace of unknown size; the others hide scratch in their results."""


def _widest(values: tuple[Any, ...]) -> torch.dtype:
    """The type of a batch norm's statistics: input in 16 bits may go with weights in 32."""
    kinds = [value.dtype for value in values[:5] if isinstance(value, Tensor)]
    return max(kinds, key=lambda kind: kind.itemsize)


class _StayMeta(TorchFunctionMode):
    """Lets moves of meta tensors to another device change their type only."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Runs one function of torch."""
        given = kwargs or {}
        if func in _MOVES and args[0].is_meta:
            if func is not Tensor.to:
                return args[0]
            args = (args[0], *map(_here, args[1:]))
            given = {name: _here(value) for name, value in given.items()}
        return func(*args, **given)


_MOVES = (Tensor.to, Tensor.cpu, Tensor.cuda)


def _here(argument: object) -> object:
    """`argument` of `Tensor.to`, with any device replaced by `meta`."""
    return "meta" if isinstance(argument, str | torch.device) else argument
