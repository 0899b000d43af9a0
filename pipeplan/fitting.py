"""Whether a model is the one that a plan was made for, and its layers ready to train."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from pipeplan.capture import agreement, split
from pipeplan.capture.boundary_trace import lacks_values
from pipeplan.errors import InputError
from pipeplan.plan import Plan
from pipeplan.runtime.parameters.tied_parameters import find_ties, untie
from pipeplan.split_model import SplitModel
from pipeplan.task import Task
from pipeplan.units import counted


def split_for(plan: Plan, task: Task) -> SplitModel:
    """The layers of a task whose model has memory, ready to train; see `fitted`.

    Raises:
        InputError: if the model cannot be cut, or as `fitted` does.
    """
    return fitted(plan, task, split(task, limit_of(plan)))


def fitted(
    plan: Plan,
    task: Task,
    layers: SplitModel,
    copying: AbstractContextManager[None] | None = None,
) -> SplitModel:
    """The task's layers, checked to be those that the plan was made for, and ready to train.

    A chain that was not profiled has no digest; then at least the layers must be as many.

    Args:
        plan: made for the task.
        task: says how ties are kept.
        layers: as they were cut.
        copying: entered while layers are copied.

    Raises:
        InputError: if the model is another one, or shared parameters cannot stay equal.
    """
    with copying or nullcontext():
        model = untie(layers, task.tied)
    got, need = model.digest(), plan.task_digest
    count, planned = len(model.layers), len(plan.chain.layers)
    how, then = layers.tied(task.tied), plan.chain.tied
    if count != planned or need not in (None, got):
        other = "" if how == then else f" (tied={how!r}, the plan's {then!r})"
        raise InputError(
            "launch: the model is not the one the plan was made for: got"
            f" {counted(count, 'layer')}{other} and task digest {got[:12]}.., need"
            f" {counted(planned, 'layer')} and {(need or 'any')[:12]}.. {_difference(plan, model)}"
            "Profile and plan again, or give the --task the chain was profiled from."
        )
    if find_ties(plan.stages, model) and need and how != then:
        raise InputError(
            f"launch: the task says tied={how!r}, the plan's chain {then!r},"
            " which counts other bytes. Profile and plan again."
        )
    _check_waiting(plan, task)
    return replace(model, notes=(*model.notes, *_doubts(plan, task, layers)))


def _difference(plan: Plan, model: SplitModel) -> str:
    """Where two models first differ, as far as a chain tells; shapes are in its digest alone."""
    for index, (got, layer) in enumerate(zip(model.names, plan.chain.layers, strict=False)):
        if got != layer.name:
            return f"Layer {index} is {got!r}, the plan's {layer.name!r}. "
    if len(model.names) != len(plan.chain.layers):
        return ""
    return (
        "Layers have the plan's names: what differs are names, shapes or types of parameters, what"
        " is frozen, shapes of data, or the task's tied, autocast, accumulate, master_weights,"
        " compile. "
    )


def _doubts(plan: Plan, task: Task, layers: SplitModel) -> list[str]:
    """Why the run may not be bit-equal to the model's own training.

    Where no profile has compared the layers with the model, that is done now, if it is here.

    Raises:
        InputError: if they differ by more than rounding.
    """
    doubt = plan.chain.doubt
    if plan.chain.agreement is None and not lacks_values(layers.layers):
        found = agreement(layers, task)
        doubt = None if found.is_exact else found.told
        if layers.compile:
            doubt = "nobody has compared compiled layers with the model: pipeplan profile does"
    return [doubt] if doubt else []


def limit_of(plan: Plan) -> int | None:
    """How many layers a profiled chain may have at most: as many as it has."""
    return len(plan.chain.layers) if plan.task_digest else None


def _check_waiting(plan: Plan, task: Task) -> None:
    """Under 2bw the chain has room for gradients that wait, if the task lets them (M1, M7)."""
    if plan.semantics == "flush" or not plan.task_digest:
        return
    layers = plan.chain.layers
    room = all(layer.waiting_gradient_bytes or not layer.gradient_bytes for layer in layers)
    if task.updates_wait and not room:
        raise InputError(
            "launch: the task has clip_norm or loss_scale, so its updates wait for all stages, and"
            " the plan's chain was profiled without: it counts no bytes for gradients that wait."
            " Profile and plan again."
        )
