"""The operator graph of a task: its model and loss for one micro-batch, with optimizer states."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import Tensor, nn

from pipeplan.capture.fake_tensors.fake_model import weightless, weightless_twin
from pipeplan.capture.layer_costs.device_clock import device_of
from pipeplan.capture.layer_costs.layer_timer import gradient_buffers
from pipeplan.capture.layer_costs.optimizer_cost import step_cost
from pipeplan.capture.profile import threads_of_torch
from pipeplan.capture.user_model.model_call import result_of
from pipeplan.devices import Device
from pipeplan.errors import InputError
from pipeplan.gradients import sum_of
from pipeplan.nested import MicroBatch, returned
from pipeplan.operator_graph import OperatorGraph, Storage, StorageKind
from pipeplan.operators.capture import capture
from pipeplan.precision import casting
from pipeplan.rehearsal.agreement import check_agreement
from pipeplan.rehearsal.operations import estimated, measured
from pipeplan.repeat import seed_all
from pipeplan.task import Task, load

Progress = Callable[[str], None]


def profile_operators(
    reference: str,
    *,
    seed: int = 0,
    repeats: int = 5,
    threads: int = 1,
    progress: Progress | None = None,
) -> OperatorGraph:
    """The graph of the task that `reference` names, with times measured here.

    Args:
        reference: `package.module:function` or `path/to/file.py:function`.
        seed: of what the task is made from.
        repeats: steps that are timed, of which the median is taken.
        threads: of torch.
        progress: told what happens, one line at a time.

    Raises:
        UncapturableError: names what no graph of operators can hold.
        InputError: if the task cannot be loaded, or is compiled.
    """
    say = progress or _silent
    with threads_of_torch(threads):
        seed_all(seed)
        task = _checked(load(reference, seed))
        batch = MicroBatch.of(task, 0)
        model = _with_loss(task, batch)
        place = device_of(model)
        say("capturing forward and backward")
        captured = capture(model, *batch.mapped(lambda each: each.to(place.device)).tensors)
        say(f"{len(captured.graph.operations)} operators; comparing them with the model")
        check_agreement(model, captured)
        say(f"timing {repeats} steps")
        return _named(measured(model, captured, repeats).graph, reference, task, model)


def estimate_operators(
    reference: str,
    device: Device,
    *,
    seed: int = 0,
    progress: Progress | None = None,
) -> OperatorGraph:
    """The graph of the task that `reference` names, whose weights are never allocated.

    Args:
        reference: as for `profile_operators`.
        device: what the times are for.
        seed: as for `profile_operators`.
        progress: told what happens.

    Raises:
        UncapturableError: names what no graph of operators can hold.
        InputError: if the task cannot be loaded, or is compiled.
    """
    say = progress or _silent
    seed_all(seed)
    with weightless():
        task = _checked(load(reference, seed))
    batch = MicroBatch.of(task, 0)
    twin, mode = weightless_twin(task)
    model = _with_loss(twin, batch)
    say("capturing forward and backward")
    with mode:
        captured = capture(model, *batch.mapped(mode.from_tensor).tensors)
    say(f"{len(captured.graph.operations)} operators; estimating their times")
    return _named(estimated(model, captured, device).graph, reference, twin, model)


def _silent(_: str) -> None:
    pass


def _checked(task: Task) -> Task:
    if task.compile:
        raise InputError(
            f"profile --operators: got Task(compile={task.compile!r}), need a task that is not"
            " compiled: compiled code has no operators to plan. Profile Task(compile=False)."
        )
    return task


class TaskStep(nn.Module):
    """A task's model and loss, under its autocast, as a function of a micro-batch's tensors."""

    def __init__(self, task: Task, batch: MicroBatch) -> None:
        """Takes `batch` for how tensors are nested; it may be any micro-batch."""
        super().__init__()
        model = task.model
        self.model = model if isinstance(model, nn.Module) else nn.Sequential(*model)
        self.loss, self.cast, self.like = task.loss, task.autocast, batch

    def forward(self, *tensors: Tensor) -> Tensor:
        """The loss."""
        batch = self.like.filled(tensors)
        with casting(self.cast, tensors[0].device):
            result = result_of(self.model, batch.arguments)
            found, structure = returned(result, own_loss=self.loss is None)
            given = result if structure else found[0]
            loss: Tensor = self.loss(given, batch.target) if self.loss else given
            return loss


def _with_loss(task: Task, batch: MicroBatch) -> TaskStep:
    return TaskStep(task, batch).train()


def _named(graph: OperatorGraph, reference: str, task: Task, model: nn.Module) -> OperatorGraph:
    """`graph` under the task's name, with the optimizer's states and the sums of gradients."""
    trained = [each for each in model.parameters() if each.requires_grad]
    with gradient_buffers([model], task.accumulate):
        sums = [each for each in map(sum_of, trained) if each is not None]
        gradients = sum(each.nbytes for each in sums)
        states = step_cost(task, trained, lambda _: 0).state_bytes if trained else 0
    place, _, function = reference.rpartition(":")
    name = f"{Path(place).stem if place.endswith('.py') else place}:{function}"
    kept = Storage(name="optimizer states", bytes=states, kind=StorageKind.OPTIMIZER)
    return graph.model_copy(
        update={
            "name": name,
            "storages": (*graph.storages, *([kept] if states else [])),
            "gradient_bytes": gradients,
        }
    )
