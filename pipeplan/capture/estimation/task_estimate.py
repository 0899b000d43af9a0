"""Estimates a task without memory or computing: exact bytes, times from a roofline."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)

from pipeplan.capture.estimation.layer_signature import LayerSignature, layer_signature
from pipeplan.capture.fake_tensors.fake_model import ProcessorKernels, weightless_twin
from pipeplan.capture.layer_costs import layer_bytes, optimizer_cost, roofline
from pipeplan.capture.layer_costs.chain_layers import (
    LayerCost,
    SplitTimes,
    chain_layers,
    stepped_parameters,
)
from pipeplan.capture.layer_costs.layer_bytes import LayerBytes
from pipeplan.capture.layer_costs.layer_run import layer_run
from pipeplan.capture.layer_costs.layer_timer import gradient_buffers
from pipeplan.capture.layer_costs.micro_batches import MicroBatches
from pipeplan.capture.layer_costs.optimizer_cost import OptimizerCost
from pipeplan.capture.layer_costs.whole_backwards import told
from pipeplan.capture.split import module_of, split
from pipeplan.capture.user_model.loss_state import restored_loss
from pipeplan.chain import Chain
from pipeplan.devices import Device
from pipeplan.errors import InputError
from pipeplan.layout import kept
from pipeplan.nested import MicroBatch
from pipeplan.repeat import check_data
from pipeplan.split_model import SplitModel
from pipeplan.task import Task
from pipeplan.units import counted

Progress = Callable[[str], None]
Found = tuple[LayerBytes, tuple[int, int, int], int]
"""Bytes of a layer; ns of its forward, its backward, its forward without autograd; of its
backward, those for weights."""


def estimate_task(
    task: Task,
    device: Device,
    progress: Progress | None = None,
    *,
    max_layers: int | None = None,
) -> Chain:
    """The chain of `task` as `device` would run it; nothing of the model's size is allocated.

    Bytes are those that `profile_task` measures on the processor, to the byte. Times are
    estimates (docs/explanation/capture.md, section 5), and the chain says so.

    Args:
        task: its model may have parameters without memory (`weightless`); it is not touched.
        device: what the times are for.
        progress: told what happens.
        max_layers: as for `split`.

    Raises:
        InputError: if the task cannot be split, or looks at values, or its data do not repeat.
    """
    say = progress or (lambda _: None)
    if task.compile:
        raise InputError(
            f"profile: mode fake: got Task(compile={task.compile!r}), need a task that is not"
            " compiled: times and bytes of compiled code are known once it has been compiled and"
            " run. Profile with --mode measured, or estimate and run Task(compile=False)."
        )
    check_data(task)
    batches = MicroBatches(task)
    batches.fetch(1)
    with torch.random.fork_rng(devices=[]), _values_unknown(), restored_loss(task.loss):
        twin, mode = weightless_twin(task)
        model = split(twin, max_layers)
        say(f"split into {counted(len(model.layers), 'layer')}")
        for note in model.notes:
            say(note)
        with gradient_buffers(model.layers, task.accumulate):
            batch = batches.fetch(0)
            kernels = ProcessorKernels()
            with mode, kernels:
                found = _walk(model, twin, batch.mapped(mode.from_tensor), device, say)
            for line in told(model.names, [size.whole for size, _, _ in found]):
                say(line)
            steps = _steps(model, task, device, _users(twin, task))
            costs = [
                LayerCost(
                    forward_ns=f,
                    backward_ns=b,
                    split=SplitTimes(weight_ns=min(w, b) if size.split else None),
                    forward_light_ns=light,
                    size=size,
                    step=step,
                )
                for (size, (f, b, light), w), step in zip(found, steps, strict=True)
            ]
            layers = chain_layers(model, costs, task)
    return Chain(
        name=type(task.model).__name__,
        source=f"estimated for {device.name} with torch {torch.__version__}",
        task_digest=model.digest(),
        mode="estimated",
        microbatch_size=model.microbatch_size,
        input_bytes=sum(each.nbytes for each in model.entry(batch.inputs)),
        device={
            "device": device.name,
            "figures": device.source,
            "torch": torch.__version__,
            **_inexact(kernels.inexact, say),
        },
        tied=model.tied(task.tied),
        layers=layers,
    )


def _walk(
    model: SplitModel, task: Task, batch: MicroBatch, device: Device, say: Progress
) -> list[Found]:
    """Each layer's bytes and times; layers that do the same are looked at once."""
    values = model.entry(batch.inputs)
    known: dict[LayerSignature, Found] = {}
    result: list[Found] = []
    last = len(model.layers) - 1
    for index in range(len(model.layers)):
        run = layer_run(model, index, values, batch, task.loss)
        mark, outputs = layer_signature(run)
        held = layer_bytes.held_by(result[-1][0] if result else None, run)
        mark = (index == last, run.splits, held, *mark)
        if mark not in known:
            size = layer_bytes.measure_bytes(run, held)
            times = roofline.estimate_times(run, device)
            weight = roofline.estimate_weights(run, device) if size.split else 0
            known[mark] = size, times, weight
        result.append(known[mark])
        values = tuple(kept(value.detach()) for value in outputs)
    say(f"{len(known)} of {len(model.layers)} layers differ and were examined")
    return result


def _users(twin: Task, task: Task) -> dict[nn.Parameter, nn.Parameter]:
    """Fake parameters -> those of the user's model, which an optimizer may know by identity."""
    both = zip(module_of(twin).parameters(), module_of(task).parameters(), strict=True)
    return dict(both)


def _steps(
    model: SplitModel, task: Task, device: Device, users: optimizer_cost.Users
) -> list[OptimizerCost]:
    """The optimizer's cost of each layer; the same groups of the same shapes cost the same.

    Not inside the fake mode: what is made from nothing (step counters) stays real, so an
    optimizer may look at it.
    """
    timer = optimizer_cost.roofline_timer(device)
    known: dict[object, OptimizerCost] = {}

    def cost(parameters: list[nn.Parameter]) -> OptimizerCost:
        kind = optimizer_cost.step_kind(task, parameters, users)
        if kind not in known:
            known[kind] = optimizer_cost.step_cost(task, parameters, timer, users)
        return known[kind]

    return [optimizer_cost.total_cost(map(cost, each)) for each in stepped_parameters(model, task)]


def _inexact(operations: set[str], say: Progress) -> dict[str, str]:
    if not operations:
        return {}
    names = ", ".join(sorted(operations))
    say(f"bytes of these operations are not known exactly without running them: {names}")
    return {"inexact_bytes": names}


@contextmanager
def _values_unknown() -> Iterator[None]:
    """Explains what fails because nothing is computed."""
    try:
        yield
    except InputError as error:
        if isinstance(error.__cause__, DataDependentOutputException | DynamicOutputShapeException):
            raise InputError(
                f"{error} It looks at values, and mode fake has only shapes."
                " Profile with --mode measured."
            ) from error
        raise
