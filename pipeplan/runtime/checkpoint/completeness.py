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


def check_optimizer(stage: StageRunner, known: Iterable[str], where: str, *, skips: bool) -> None:
    """Refuse a state that lacks what the optimizers would silently begin anew, or miss.

    A parameter that no gradient has reached yet has no field at all, while others have such
    fields. Where loss scaling `skips` steps, that may be so of all of them.

    Raises:
        InputError: if so.
    """
    stored = set(known)
    names = {key.rpartition(".")[2] for key in stored if key.startswith("optimizer.")}
    for unit in stage.units:
        for parameter, optimizer, fields in kept_fields(unit.optimizers):
            prefix = f"optimizer.{stage.names[unit.weight_of(parameter)]}"
            missing = sorted(name for name in fields if f"{prefix}.{name}" not in stored)
            none_yet = len(missing) == len(fields) and (skips or fields <= names)
            if missing and not none_yet:
                raise InputError(
                    f"{where}: has no '{prefix}.{missing[0]}', which"
                    f" {type(optimizer).__name__} keeps: it was made with another optimizer,"
                    " or not all of its parts were merged"
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
