"""The door: a task that trains under a plan of states on the host.

The judge has allowed the plan's program, so nothing is decided here. On the processor, device and
host are two parts of its memory, which are counted apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from pipeplan.capture.user_model.module_attributes import held_tensors
from pipeplan.document import read_text
from pipeplan.errors import InputError
from pipeplan.filling import fill_whole
from pipeplan.livebytes import LiveBytes, storage_bytes
from pipeplan.offmate.block import LayerBlock, StepData
from pipeplan.offmate.host_room import HostRoom
from pipeplan.offmate.measured import blocks_of
from pipeplan.offmate.moving import Moving
from pipeplan.offmate.optimizer import state_names
from pipeplan.offmate.parameters import Parameters
from pipeplan.offmate.step import HostCount, Roles, StepRun
from pipeplan.offmate.tensors import trained_tensors
from pipeplan.offmate.trial import OPTIONS
from pipeplan.remat.states import StatePlan
from pipeplan.remat.states.plan_file import StatePlanFile
from pipeplan.split_model import SplitModel
from pipeplan.task import Task


@dataclass(frozen=True, slots=True)
class StepFigures:
    """What a step of training shows.

    Attributes:
        loss: of its micro-batch.
        device_peak_bytes: the most bytes of live tensors on the device.
        host_peak_bytes: the most bytes of the host's buffers that were in use.
    """

    loss: float
    device_peak_bytes: int
    host_peak_bytes: int


class StateTraining:
    """A task that trains under a plan; a context whose end is `finish`.

    Between two steps, values that wait on the host have no bytes in the model's parameters, and
    gradients may wait for their updates. `finish` ends these and gives the model its values. So
    does the end of the context where an error leaves it, inside of a step, too: then some
    parameters have had their update of this step, and others have not.
    """

    def __init__(self, task: Task, plan: StatePlan, task_digest: str | None = None) -> None:
        """Puts parameters and optimizer states where the plan's step begins.

        Args:
            task: whose model is trained in place, one micro-batch a step.
            plan: of `measured_problem(task, ..)`.
            task_digest: of the split model that was planned; None: only names and bytes of
                parameters are compared.

        Raises:
            InputError: if the plan is of another task, the task cannot train so, or its weights
                cannot be read.
        """
        model = blocks_of(task, len(plan.problem.blocks))
        parameters = Parameters.of(model)
        names = state_names(task, parameters.by_name)
        _check_same(plan, model, parameters, len(names))
        if task_digest is not None and task_digest != model.digest():
            raise InputError(
                "plan: is of a task with other shapes or types, need the same (task_digest). Plan"
                " this task."
            )
        if task.weights is not None:
            fill_whole(task)
        self.room = HostRoom(plan)
        self.tensors = tuple(trained_tensors(task, parameters, names, plan, self.room))
        self._plan, self._model = plan, model
        self._data = StepData(task)
        count = range(len(model.layers))
        self._blocks = [LayerBlock(task, model, index, self._data) for index in count]
        self._roles = Roles(plan, self.tensors)
        self._moving = Moving(self.room, duplex=plan.problem.machine.duplex)
        self._is_finished = False
        self._running: int | None = None
        """The step that has begun and not ended."""
        for each in self.tensors:
            each.begin(plan.placement)

    @classmethod
    def of_file(cls, task: Task, path: str | Path) -> Self:
        """By the plan in a file of `pipeplan remat --offload states`, which is judged anew.

        Raises:
            InputError: if there is none, it breaks a rule, or is of another task.
        """
        file = StatePlanFile.from_json(read_text(path), str(path))
        return cls(task, file.plan(str(path)), file.task_digest)

    def step(self, number: int) -> StepFigures:
        """Trains on micro-batch `number` of the task.

        The device's bytes are those of all live tensors but counters of steps, which torch's
        optimizers keep on the processor: parameters, gradients, optimizer states, activations,
        the micro-batch, buffers, and what operations make for a while. In the first step no
        gradient waits from an earlier one, and optimizers make their states.

        Raises:
            InputError: behind `finish`, or a step that failed.
        """
        if self._is_finished:
            raise InputError("training: got a step behind its end, need it before. Make another.")
        if self._running is not None:
            raise InputError(
                f"training: got a step behind step {self._running}, which failed, need none: what"
                " it had begun cannot go on. Call finish, and make another."
            )
        self._data.load(number)
        host = HostCount(self._resident_on_host())
        inputs = self._model.entry(self._data.inputs)
        moving = self._moving
        now = StepRun(self._plan, self._roles, self._blocks, inputs, self.room, moving, host)
        counters = self._counters()
        with LiveBytes([*self._resident(), *counters]) as live:
            self._running = number
            now.run()
            self._running = None
        return StepFigures(now.loss, live.peak - storage_bytes(counters), host.peak)

    def _resident(self) -> list[Tensor]:
        """What is there as a step begins, values without bytes among it."""
        parameters = (each.parameter for each in self.tensors)
        gradients = [each.grad for each in parameters if each.grad is not None]
        states = [
            state
            for each in self.tensors
            if each.optimizer is not None and each.on_host is None
            for state in each.optimizer.states
        ]
        held = held_tensors(self._model.layers)
        return [*held, *gradients, *states, *self._data.tensors]

    def _counters(self) -> list[Tensor]:
        """Of optimizers that step on the device."""
        return [
            counter
            for each in self.tensors
            if each.optimizer is not None and each.on_host is None
            for counter in each.optimizer.counters
        ]

    def _resident_on_host(self) -> int:
        """Bytes of the buffers of states, which are in use all the time."""
        plan = self._plan
        states = {*plan.copied, *plan.updated_on_host} - set(plan.step.offloaded)
        return sum(plan.step.graph.storages[each].bytes for each in states)

    def finish(self) -> None:
        """Ends all updates; the model's parameters have their newest values."""
        if self._is_finished:
            return
        self._is_finished = True
        self._moving.close()
        with torch.no_grad():
            for each in self.tensors:
                each.come_back(self.room)
            if self._running is None:
                self._moving.check()
            for each in self.tensors:
                each.end_update(self.room)

    def optimizer_states(self) -> dict[str, dict[str, Tensor]]:
        """By parameter, behind `finish`: what its optimizer keeps in its shape.

        Raises:
            InputError: before.
        """
        if not self._is_finished:
            raise InputError(
                "training: got optimizer_states before its end, need it behind finish: until then"
                " states wait on the host. Leave the `with` block first."
            )
        return {
            each.name: each.optimizer.named_states()
            for each in self.tensors
            if each.optimizer is not None
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.finish()
        if error is not None and self._running is not None:
            error.add_note(
                f"training: step {self._running} has not ended: each parameter of the model, and"
                " its optimizer states, are those before or behind their update of this step."
            )


def _check_same(
    plan: StatePlan, model: SplitModel, parameters: Parameters, states_per_value: int
) -> None:
    names = tuple(block.name for block in plan.problem.blocks)
    planned = {
        tensor.name: tensor.bytes for group in plan.problem.groups for tensor in group.tensors
    }
    there = {name: each.nbytes for name, each in parameters.by_name.items()}
    if names != model.names or planned != there:
        raise InputError(
            f"plan: is of a model of {len(names)} blocks and {sum(planned.values())} bytes of"
            f" parameters, got a task of {len(model.names)} and {sum(there.values())}, need the"
            " same names and bytes. Plan this task."
        )
    if plan.problem.states_per_value != states_per_value:
        raise InputError(
            f"plan: is of an optimizer with {plan.problem.states_per_value} states per value, got"
            f" a task whose optimizer has {states_per_value}, need the same number. Plan this"
            " task."
        )
    odd = next((name for name in plan.option_names if name not in OPTIONS), None)
    if odd is not None:
        raise InputError(
            f"plan: option {odd!r}: got one that no block here has, need one of"
            f" {', '.join(OPTIONS)}. Plan what measured_problem finds."
        )
