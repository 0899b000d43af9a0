"""Whether a stored state has just what a stage, and a model, go on from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from pipeplan.errors import InputError
from pipeplan.runtime.parameters.optimizer_factory import kept_fields
from pipeplan.runtime.stages.stage import StageRunner
from pipeplan.split_model import SplitModel

OF_OPTIMIZERS = ("optimizer", "group")
MASTER = "master."
Kind = tuple[tuple[int, ...], torch.dtype]
"""What a stored tensor must have in common with the one that takes it."""


def kind_of(tensor: Tensor) -> Kind:
    """That of `tensor`."""
    return tuple(tensor.shape), tensor.dtype


def check_weights(
    stage: StageRunner, wanted: Mapping[str, Tensor], known: Mapping[str, Kind], where: str
) -> None:
    """Refuse a state that lacks something, or whose numbers would be spread, rounded or left.

    Raises:
        InputError: if so.
    """
    masters = {f"{MASTER}{name}" for name in stage.names.values()}
    if left := sorted(masters.intersection(known) - wanted.keys()):
        raise InputError(
            f"{where}: has {left[0]!r}, need a state without: the task has no master weights, of"
            " which its optimizer's state is. Give Task(master_weights=True)."
        )
    missing = sorted(wanted.keys() - known)
    if missing:
        raise InputError(
            f"{where}: has no {missing[0]!r}: it was made by another task or semantics"
        )
    for key, tensor in wanted.items():
        (shape, dtype), (need, need_dtype) = known[key], kind_of(tensor)
        if (shape, dtype) != (need, need_dtype):
            raise InputError(
                f"{where}: {key}: got shape {list(shape)} {dtype}, need {list(need)} {need_dtype}:"
                " it was made by another task"
            )


def check_optimizer(
    stage: StageRunner,
    known: Iterable[str],
    tensors: Mapping[str, Kind],
    where: str,
    *,
    skips: bool,
) -> None:
    """Refuse a state that lacks what the optimizers would silently begin anew, or miss.

    A parameter that no gradient has reached yet has no field at all, while others have such
    fields. Where loss scaling `skips` steps, that may be so of all of them.

    Args:
        stage: its optimizers go on from the state.
        known: keys of the state.
        tensors: those that are tensors.
        where: the state is.
        skips: whether steps may have left everything as it was.

    Raises:
        InputError: if so, or if a field has not the shape of its parameter.
    """
    stored = {key for key in known if key.startswith("optimizer.")}
    begun = {key.rpartition(".")[0] for key in stored}
    names = {key.rpartition(".")[2] for key in stored}
    for unit in stage.units:
        for parameter, optimizer, fields in kept_fields(unit.optimizers):
            prefix = f"optimizer.{stage.names[unit.weight_of(parameter)]}"
            if prefix not in begun and (skips or fields.keys() <= names):
                continue
            missing = sorted(name for name in fields if f"{prefix}.{name}" not in stored)
            if missing:
                raise InputError(
                    f"{where}: has no '{prefix}.{missing[0]}', which"
                    f" {type(optimizer).__name__} keeps: it was made with another optimizer,"
                    " or not all of its parts were merged. Go on with that run's optimizer, or"
                    " start anew with another --out"
                )
            shaped = (f"{prefix}.{name}" for name, alike in fields.items() if alike)
            _check_shapes(shaped, parameter, tensors, where)


def _check_shapes(
    keys: Iterable[str], parameter: Tensor, tensors: Mapping[str, Kind], where: str
) -> None:
    need = tuple(parameter.shape)
    for key in keys:
        shape = tensors[key][0] if key in tensors else None
        if shape != need:
            got = "no tensor" if shape is None else f"shape {list(shape)}"
            raise InputError(
                f"{where}: {key}: got {got}, need shape {list(need)}, that of the parameter: it"
                " was made by another task"
            )


def check_taken(keys: Iterable[str], split: SplitModel, where: str) -> None:
    """Refuse a state with something of an optimizer that no rank would take.

    Args:
        keys: of the state, whole or a part.
        split: the model that is to go on from it.
        where: the state is.

    Raises:
        InputError: if there is such a key.
    """
    names = {
        fqns[local]
        for layer, fqns in zip(split.layers, split.fqns, strict=True)
        for local, _ in layer.named_parameters(remove_duplicate=False)
    }
    for key in sorted(keys):
        kind, _, rest = key.partition(".")
        if kind in OF_OPTIMIZERS and rest.rpartition(".")[0] not in names:
            raise InputError(
                f"{where}: got {key!r}, need {kind}.NAME.FIELD with the NAME of one of the model's"
                f" {len(names)} parameters: nobody takes it, and the optimizer would begin that"
                " part of its state anew. Earlier versions wrote lists and dicts of tensors so,"
                " which cannot be put together again: begin a new run from its weights,"
                " Task(weights=..)."
            )
