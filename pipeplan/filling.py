"""Puts the task's `weights` into what a rank hosts of its model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from pipeplan.capture.split import module_of
from pipeplan.errors import InputError
from pipeplan.hosting import Hosted, states_of
from pipeplan.plan import Plan
from pipeplan.runtime.checkpoint import weight_sources
from pipeplan.runtime.checkpoint.weight_sources import WeightSource
from pipeplan.task import Task


def fill(hosted: Hosted, plan: Plan, gpu: int, *, rest: bool = False) -> None:
    """Read the parameters and buffers of the layers on `gpu`.

    A value of another type is converted, as `load_state_dict` does. Buffers that no state_dict has
    keep the values of the code, unless they have none.

    Args:
        hosted: its task names the source.
        plan: says which layers these are.
        gpu: of the plan.
        rest: whether to read what no layer uses, too.

    Raises:
        InputError: if the source lacks something, has something the model does not know, or has
            it in another shape.
    """
    wanted = list(states_of(hosted.split, plan, gpu))
    if rest:
        used = set().union(*(fqns.values() for fqns in hosted.split.fqns))
        model = module_of(hosted.task)
        named = (*model.named_parameters(), *model.named_buffers())
        wanted += [(name, tensor) for name, tensor in named if name not in used]
    _fill(hosted.task, wanted, {id(tensor) for _, tensor in hosted.blank})


def fill_whole(task: Task) -> None:
    """Read all parameters and buffers of the task's model, which one process trains.

    Raises:
        InputError: as `fill`.
    """
    model = module_of(task)
    _fill(task, [*model.named_parameters(), *model.named_buffers()], set())


def _fill(task: Task, wanted: Iterable[tuple[str, Tensor]], blank: set[int]) -> None:
    """Read `wanted`, by name; `blank` are identities of tensors without values."""
    assert task.weights is not None
    source, where = weight_sources.opened(task.weights), f"task: weights {task.weights}"
    model = module_of(task)
    aliases = _aliases(
        (
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        )
    )
    _check_known(source, aliases, where)
    kept = model.state_dict(keep_vars=True).keys()
    for name, tensor in wanted:
        value = _value(source, aliases.get(name, (name,)), where)
        if value is not None:
            _put(name, tensor, value, where)
        elif name in kept or id(tensor) in blank:
            raise InputError(
                f"{where}: has no {name!r}, need it: it is in the model. Name a source that has"
                " it, or a function name -> tensor."
            )


def _aliases(named: Iterable[tuple[str, Tensor]]) -> dict[str, tuple[str, ...]]:
    """All names of the tensor that has a name: tied ones have several."""
    names: dict[int, tuple[str, ...]] = {}
    for name, tensor in (listed := list(named)):
        names[id(tensor)] = (*names.get(id(tensor), ()), name)
    return {name: names[id(tensor)] for name, tensor in listed}


def _check_known(source: WeightSource, known: Mapping[str, object], where: str) -> None:
    unknown = sorted(set(source.names or ()) - known.keys())
    if unknown:
        raise InputError(
            f"{where}: has {unknown[0]!r}"
            + (f" and {len(unknown) - 1} more" if unknown[1:] else "")
            + ", which the model does not know. Name a source of this model, or a function name ->"
            " tensor that knows the other names."
        )


def _value(source: WeightSource, names: tuple[str, ...], where: str) -> Tensor | None:
    for name in names:
        if source.names is not None and name not in source.names:
            continue
        try:
            value: object = source.read(name)
        except KeyError:
            continue
        except Exception as error:
            raise InputError(
                f"{where}: {name!r} cannot be read: {type(error).__name__}: {error}"
            ) from error
        if not isinstance(value, Tensor):
            raise InputError(
                f"{where}: {name!r}: got a {type(value).__name__}, need a tensor, or a KeyError"
                " where there is none"
            )
        return value
    return None


def _put(name: str, tensor: Tensor, value: Tensor, where: str) -> None:
    if value.shape != tensor.shape:
        raise InputError(
            f"{where}: {name!r}: got shape {list(value.shape)}, need {list(tensor.shape)} as in"
            " the model"
        )
    with torch.no_grad():
        tensor.copy_(value)
