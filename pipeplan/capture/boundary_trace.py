"""What passes between layers: shapes, dtypes and gradients of every boundary.

The pass uses fake tensors, which have shapes but no data, so it costs neither time nor memory;
where a layer needs real data (it looks at values), the whole pass runs for real.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from pipeplan.capture.user_model.loss_state import restored_loss
from pipeplan.capture.user_model.model_call import quiet
from pipeplan.capture.user_model.module_attributes import restored
from pipeplan.capture.user_model.state_writes import StateWrites, states_of
from pipeplan.empty import has_empty, is_empty
from pipeplan.errors import InputError
from pipeplan.layout import passing_order
from pipeplan.livebytes import dense, key, storages
from pipeplan.nested import LayerLoss, MicroBatch
from pipeplan.precision import casting
from pipeplan.split_model import TensorSpec
from pipeplan.taskref import users_line

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BoundaryTrace:
    """What one pass over the layers found; one entry per layer."""

    boundaries: tuple[tuple[TensorSpec, ...], ...]
    """The layer's input."""
    aliases: tuple[bool, ...]
    """Whether all of the layer's output lies in the memory of its input."""
    writes: tuple[bool, ...]
    """Whether the layer changes its input in place."""
    changes: tuple[frozenset[int], ...]
    """Of the buffers and frozen parameters that several layers have: storages it changes."""


def trace_boundaries(
    layers: Mapping[str, nn.Module],
    loss: LayerLoss,
    batch: MicroBatch,
    fed: Sequence[tuple[int, ...]] = (),
    entering: Sequence[int] = (),
) -> BoundaryTrace:
    """The boundaries of `layers` for a micro-batch like `batch`.

    Args:
        layers: by name.
        loss: takes what the last one returns.
        batch: one micro-batch.
        fed: per layer which of the model's inputs it gets behind its own; empty: none.
        entering: which of them the first layer takes; empty: all.

    Raises:
        InputError: if a layer or the loss fails or returns the wrong kind of value, or the loss
            trains a parameter that is not of the last layer.
    """
    with restored(layers.values()):
        try:
            with quiet(), restored_loss(loss), fake_mode(layers.values()) as fake:
                return _walk(layers, loss, batch.mapped(fake.from_tensor), fed, entering)
        except ForeignParameterError:
            raise
        except Exception as error:
            reason = str(error).split("\n")[0]
        if has_empty(layers.values()):
            raise InputError(
                f"task: boundary shapes need values, and there are none: {reason}. Profile it with"
                " --mode measured."
            )
        traced = _walk(layers, loss, batch, fed, entering)
    _log.warning(
        "shapes between layers come from a pass with values, one without failed (no harm): %s",
        reason,
    )
    return traced


def has_fakes(layers: Iterable[nn.Module]) -> bool:
    """Whether parameters or buffers of `layers` are fake: nothing can be computed with them."""
    return _first_fake(layers) is not None


def lacks_values(layers: Iterable[nn.Module]) -> bool:
    """Whether parameters or buffers of `layers` are fake or empty: nothing can be computed."""
    parts = list(layers)
    return has_fakes(parts) or has_empty(parts)


def fake_mode(layers: Iterable[nn.Module]) -> FakeTensorMode:
    """The mode that the parameters of `layers` belong to where they are fake, else a new one."""
    found = _first_fake(layers)
    return found.fake_mode if found is not None else _FakeMode(allow_non_fake_inputs=True)


class _FakeMode(FakeTensorMode):
    """Also computes nothing with parameters alone that have no memory, or are written into.

    torch computes `1 + weight` for real where nothing in it is fake: it would read what is not
    there, and a forward that moves a parameter would move the user's.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves, structure = tree_flatten((args, kwargs or {}))
        is_unreal = _is_moved if func._schema.is_mutable else is_empty  # noqa: SLF001
        # torch makes real tensors beside fake ones fake, too, but then computes their shapes anew.
        beside_fakes = any(
            isinstance(leaf, FakeTensor) and leaf.constant is None for leaf in leaves
        )
        given = [
            self.from_tensor(leaf)
            if isinstance(leaf, Tensor)
            and not isinstance(leaf, FakeTensor)
            and (beside_fakes or is_unreal(leaf))
            else leaf
            for leaf in leaves
        ]
        return super().__torch_dispatch__(func, types, *tree_unflatten(given, structure))


def _is_moved(tensor: Tensor) -> bool:
    """Whether an operation that writes into `tensor` would move a parameter for real."""
    if isinstance(tensor, FakeTensor):
        return False
    base = tensor if tensor._base is None else tensor._base  # noqa: SLF001
    return is_empty(tensor) or isinstance(base, nn.Parameter)


def _first_fake(layers: Iterable[nn.Module]) -> FakeTensor | None:
    states = (tensor for layer in layers for tensor in [*layer.parameters(), *layer.buffers()])
    return next((tensor for tensor in states if isinstance(tensor, FakeTensor)), None)


def call_layer(
    name: str,
    layer: nn.Module,
    boundary: tuple[Tensor, ...],
    autocast: torch.dtype | None = None,
) -> tuple[Tensor, ...]:
    """What `layer` returns for `boundary`, always as a tuple.

    Args:
        name: of the layer.
        layer: called.
        boundary: its arguments.
        autocast: what it runs under; None leaves the setting as it is.

    Raises:
        InputError: if it fails or returns anything but a tensor or a tuple of tensors.
    """
    try:
        with casting(autocast, boundary[0].device):
            result = layer(*boundary)
    except Exception as error:
        shapes = ", ".join(str(tuple(value.shape)) for value in boundary)
        raise InputError(
            f"task: layer {name!r}, input of shape {shapes}: forward failed:"
            f" {type(error).__name__}: {error}{users_line(error)}"
            f"{_hint(error, boundary)}"
        ) from error
    outputs = result if isinstance(result, tuple) else (result,)
    if not outputs or any(not isinstance(value, Tensor) for value in outputs):
        raise InputError(
            f"task: layer {name!r}: returned {_kind(result)}, need a tensor or a tuple of tensors."
            " Wrap the layer in a module that returns only tensors."
        )
    return outputs


def _hint(error: Exception, boundary: tuple[Tensor, ...]) -> str:
    """What to do about it, behind a full stop; empty where the error says it."""
    if "cannot register a hook on a tensor that doesn't require" in str(error):
        return (
            ". Layers also run without autograd: to find shapes, to evaluate, and first where they"
            " are computed again. Register it `if tensor.requires_grad`."
        )
    if isinstance(error, TypeError) and "positional argument" in str(error) and len(boundary) > 1:
        return (
            ". An nn.Sequential hands several tensors on as one tuple, a Python list of layers as"
            " that many arguments: give the one that the layer's forward takes."
        )
    return ""


def alone(values: tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
    """What a layer returned, as it returned it: one tensor is no tuple."""
    return values if len(values) > 1 else values[0]


def check_loss(value: object) -> Tensor:
    """`value` if it can be trained on.

    Raises:
        InputError: if the loss is no scalar tensor or no trainable parameter reaches it.
    """
    if not isinstance(value, Tensor):
        raise InputError(f"task: loss: returned {_kind(value)}, need a scalar tensor")
    if value.dim() != 0 or not value.is_floating_point():
        raise InputError(
            f"task: loss: returned shape {tuple(value.shape)} of {value.dtype}, need a floating"
            " scalar. Return the mean over the micro-batch."
        )
    if torch.is_grad_enabled() and not value.requires_grad:
        raise InputError(
            "task: loss: depends on no trainable parameter, so there is nothing to train."
            " Check requires_grad of the model's parameters."
        )
    return value


class ForeignParameterError(InputError):
    """A layer or a loss trains a parameter that another rank may hold."""


def check_own(
    what: str,
    layer: nn.Module,
    results: Sequence[Tensor],
    others: Iterable[nn.Module] | None = None,
) -> None:
    """Refuse what trains parameters that another rank would hold: it would lose their gradients.

    Args:
        what: the layer, or the loss, for the message.
        layer: has the parameters that may be trained.
        results: what came of it; their graph ends at the entry of `layer`.
        others: whose parameters alone are refused; None: all that are not of `layer`.

    Raises:
        ForeignParameterError: if their graph reaches a parameter that is not of `layer`.
    """
    own = set(layer.parameters())
    foreign = None if others is None else {p for other in others for p in other.parameters()}
    waiting = [result.grad_fn for result in results if result.grad_fn is not None]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        refused = leaf not in own and (foreign is None or leaf in foreign)
        if isinstance(leaf, nn.Parameter) and refused:
            raise ForeignParameterError(_foreign(what, tuple(leaf.shape)))
        waiting.extend(following for following, _ in node.next_functions if following)


def _foreign(what: str, shape: tuple[int, ...]) -> str:
    if what == LOSS:
        return (
            f"task: loss: trains a parameter of shape {shape} that is not of the last layer, need"
            " a function of what the model returns and the target: another GPU may hold it, and"
            " its gradient would be lost. Let the optimizer decay weights (weight_decay), or the"
            " model compute its loss itself (Task(loss=None), the target among its inputs)."
        )
    return (
        f"task: {what}: trains a parameter of shape {shape} that is not among its own, need all"
        " it trains in its parameters(): another GPU may hold it. Register the parameter, or the"
        " module it is of, in the module that uses it."
    )


LOSS = "loss"
"""What `check_own` is told of the loss, which counts as part of the last layer."""


def _walk(
    layers: Mapping[str, nn.Module],
    loss: LayerLoss,
    batch: MicroBatch,
    fed: Sequence[tuple[int, ...]],
    entering: Sequence[int],
) -> BoundaryTrace:
    boundaries, aliases, writes, changes = [], [], [], []
    state_writes = StateWrites(_shared_storages(layers.values()))
    start, whose = batch.inputs, "the model's input"
    values = tuple(start[place] for place in entering) if entering else start
    for index, (name, layer) in enumerate(layers.items()):
        boundaries.append(tuple(spec_of(value, whose) for value in values))
        # A clone is no leaf, so that a layer may work in place as it does inside the model.
        inputs = tuple(
            value.detach().requires_grad_(value.requires_grad).clone() for value in values
        )
        versions = list(map(_version, inputs))
        extra = tuple(start[place].clone() for place in fed[index]) if fed else ()
        with state_writes.of(layer) as changed:
            values, whose = call_layer(name, layer, (*inputs, *extra)), f"layer {name!r}"
        changes.append(frozenset(changed))
        writes.append(list(map(_version, inputs)) != versions)
        held = {key(value) for value in inputs}
        aliases.append(all(key(part) in held for value in values for part in dense(value)))
    try:
        result: object = loss(alone(values), batch.target)
    except Exception as error:
        several = (
            f". The model returned {len(values)} tensors, and the loss gets what it returns: let"
            " it take those that it compares with the target"
        )
        said = f"{type(error).__name__}: {error}{users_line(error)}"
        raise InputError(f"task: loss failed: {said}{several * (len(values) > 1)}") from error
    checked = check_loss(result)
    if not has_fakes(layers.values()):  # else the loss may know those that the fake ones stand for
        check_own(f"layer {name!r}", layer, values)
        # What no layer has is the caller's to train, as of a loss beside a rematerialized module.
        check_own(LOSS, layer, [checked], layers.values())
    return BoundaryTrace(tuple(boundaries), tuple(aliases), tuple(writes), tuple(changes))


def _shared_storages(layers: Iterable[nn.Module]) -> frozenset[int]:
    """Behind the buffers and frozen parameters that several of `layers` have."""
    counts = Counter(storage for layer in layers for storage in storages(states_of(layer)))
    return frozenset(storage for storage, count in counts.items() if count > 1)


def _version(value: Tensor) -> int:
    """How often `value` has been written into, by torch's own count."""
    return value._version  # noqa: SLF001


def spec_of(value: Tensor, whose: str = "the model's input") -> TensorSpec:
    """What passes a boundary where `value` does.

    Args:
        value: passes it.
        whose: where it comes from, for the message.

    Raises:
        InputError: if it is sparse or nested: what lies in memory is not known by its shape.
    """
    if value.layout is not torch.strided or value.is_nested:
        kind = "a nested tensor" if value.is_nested else f"a tensor of layout {value.layout}"
        raise InputError(
            f"task: {whose}: got {kind}, need strided ones between layers, whose bytes"
            " follow from their shape. Pass to_dense() or to_padded_tensor() on, or put the layer"
            " that makes it and those that take it into one module."
        )
    order = passing_order(value)
    return TensorSpec(tuple(value.shape), str(value.dtype), value.requires_grad, order)


def _kind(value: object) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {', '.join(type(part).__name__ for part in value) or 'nothing'}"
    return f"a {type(value).__name__}"
