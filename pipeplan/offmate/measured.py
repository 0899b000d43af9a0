"""A task's step as a problem of `pipeplan.remat.states`, measured on this machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from pipeplan.capture import split
from pipeplan.capture.layer_costs.device_clock import ModelDevice
from pipeplan.capture.split import module_of
from pipeplan.capture.user_model.loss_state import restored_loss
from pipeplan.capture.user_model.module_attributes import held_tensors, restored
from pipeplan.errors import InputError
from pipeplan.gradients import without_gradients
from pipeplan.livebytes import storage_bytes
from pipeplan.offmate.optimizer import state_names
from pipeplan.offmate.parameters import Parameters, groups_of, rate_of, updates_of
from pipeplan.offmate.trial import Trial
from pipeplan.remat.states.problem import DeviceAndHost, StateProblem
from pipeplan.rematerialized.untouched import as_it_was
from pipeplan.split_model import SplitModel
from pipeplan.task import Task


@dataclass(frozen=True)
class MachineLimits:
    """What a person says of device and host; rates that are None are measured here.

    Attributes:
        device_bytes: what a plan may use of the device.
        host_bytes: what it may use of the host.
        bandwidth: bytes per second of the way between them.
        device_update: bytes of parameters that the device updates per second.
        host_update: bytes that the host updates per second; 0: it updates none.
        duplex: whether each direction has all of the bandwidth, or both together have.
    """

    device_bytes: int
    host_bytes: int
    bandwidth: int
    device_update: int | None = None
    host_update: int | None = None
    duplex: bool = True


@dataclass(frozen=True, slots=True)
class MeasuredTask:
    """A task's step as a problem, and the digest of its split model."""

    problem: StateProblem
    task_digest: str


def measured_problem(
    task: Task, machine: MachineLimits, max_layers: int | None = None
) -> StateProblem:
    """`measure_task` without the digest."""
    return measure_task(task, machine, max_layers).problem


def measure_task(
    task: Task, machine: MachineLimits, max_layers: int | None = None
) -> MeasuredTask:
    """The task's step as a problem; the task is left as it was.

    Raises:
        InputError: if the task has what an update of single tensors cannot do, is not on the
            processor, or a layer works in place on its input.
    """
    model = blocks_of(task, max_layers)
    parameters = Parameters.of(model)
    with _untouched(task, [module_of(task), *model.layers]):
        trial = Trial(task, model)
        blocks = trial.blocks()
        resident = storage_bytes([*held_tensors(model.layers), *trial.data.tensors])
        names, updates = state_names(task, parameters.by_name), updates_of(task, parameters)
    rate = rate_of(updates)
    host = rate if machine.host_update is None else machine.host_update
    problem = StateProblem(
        blocks,
        groups_of(parameters, updates),
        DeviceAndHost(
            machine.device_bytes,
            machine.host_bytes,
            machine.bandwidth,
            rate if machine.device_update is None else machine.device_update,
            host or None,
            duplex=machine.duplex,
        ),
        len(names),
        resident - storage_bytes(parameters.by_name.values()),
        type(task.model).__name__,
    )
    return MeasuredTask(problem, model.digest())


@contextmanager
def _untouched(task: Task, modules: Sequence[nn.Module]) -> Iterator[None]:
    """Gives all that trials change back as it was."""
    with (
        as_it_was(modules, ModelDevice(torch.device("cpu"))),
        restored(modules),
        restored_loss(task.loss),
        without_gradients(modules),
    ):
        yield


def blocks_of(task: Task, max_layers: int | None = None) -> SplitModel:
    """The layers of a task that can train with states on the host.

    Raises:
        InputError: if it cannot.
    """
    _refuse(task)
    model = split(task, max_layers, in_order=True)
    model.check_torch_draws("states on the host")
    if model.device != "cpu":
        raise InputError(
            f"task: got a model on {model.device}, need it on the processor: states on the host"
            " move between two accounted parts of its memory. Leave the model there."
        )
    return model


def _refuse(task: Task) -> None:
    """Raises InputError for what an update of single tensors cannot do."""
    for name in ("clip_norm", "loss_scale", "scheduler", "accumulate"):
        if getattr(task, name) is not None:
            raise InputError(
                f"task: {name}: got one, need none with states on the host: each tensor is updated"
                " as soon as its own gradient is there. Leave it out."
            )
    if task.master_weights or task.compile:
        raise InputError(
            "task: got master_weights or compile, need neither with states on the host."
            " Leave them out."
        )
