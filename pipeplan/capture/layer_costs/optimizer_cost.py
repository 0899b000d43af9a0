"""What the user's optimizer keeps, needs and takes for one layer's parameters."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_iter

from pipeplan.capture.layer_costs.device_clock import ModelDevice
from pipeplan.capture.layer_costs.roofline import Roofline
from pipeplan.devices import Device
from pipeplan.errors import InputError
from pipeplan.gradients import (
    cast_back,
    given,
    holding,
    optimizer_of,
    own_tensors,
    schedule_of,
    stepped,
    sum_of,
)
from pipeplan.livebytes import LiveBytes, storage_bytes
from pipeplan.split_model import SplitModel
from pipeplan.task import Task

Work = Callable[[], None]
Users = Mapping[nn.Parameter, nn.Parameter]
"""Parameters that stand for others -> those that the user knows."""
Timer = Callable[[Work], int]
"""Runs the work, as often as it likes, and says how many nanoseconds it takes once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerCost:
    """Of one step on one layer's parameters."""

    step_ns: int = 0
    """Division of the gradients by micro-batches, update and zeroing of the gradients."""
    state_bytes: int = 0
    """All tensors of the optimizer's state, step counters included, and master weights."""
    workspace_bytes: int = 0
    """Most bytes alive at once during the step, beyond parameters, gradients and state: casts of
    gradients among them."""


COLD_BYTES = 64 * 2**20
"""Written before each step that is timed: more than caches hold for one rank."""


def median_timer(repeats: int, place: ModelDevice) -> Timer:
    """A timer that measures `repeats` times and takes the median.

    Caches hold nothing of the parameters when a step begins, as behind the backwards of a run.
    """
    clock = place.clock
    others = torch.empty(COLD_BYTES, dtype=torch.int8, device=place.device)

    def time(work: Work) -> int:
        marks: list[tuple[Any, Any]] = []
        for _ in range(repeats):
            others.zero_()
            begin = clock.mark()
            work()
            marks.append((begin, clock.mark()))
        lengths: list[int] = [clock.between(begin, end) for begin, end in marks]
        return statistics.median_low(lengths)

    return time


def roofline_timer(device: Device) -> Timer:
    """A timer that estimates."""

    def time(work: Work) -> int:
        roofline = Roofline(device)
        with roofline:
            work()
        return round(roofline.ns)

    return time


def total_cost(costs: Iterable[OptimizerCost]) -> OptimizerCost:
    """What optimizers cost that step one after the other."""
    each = tuple(costs)
    return OptimizerCost(
        step_ns=sum(one.step_ns for one in each),
        state_bytes=sum(one.state_bytes for one in each),
        workspace_bytes=max((one.workspace_bytes for one in each), default=0),
    )


def step_kind(task: Task, parameters: Sequence[nn.Parameter], users: Users) -> object:
    """What makes the steps of two layers cost the same: shapes, and groups with their options."""
    known = {users.get(each, each): each for each in parameters}
    places = {each: place for place, each in enumerate(parameters)}
    groups = tuple(
        (
            tuple(places[each] for each in group["params"]),
            *(
                (n, repr(value))
                for n, value in group.items()
                if n not in ("params", "param_names")
            ),
        )
        for group in _begun(task, known).param_groups
    )
    return groups, tuple((tuple(p.shape), p.stride(), p.dtype) for p in parameters)


def step_cost(
    task: Task, parameters: Sequence[nn.Parameter], timer: Timer, users: Users | None = None
) -> OptimizerCost:
    """Steps the task's optimizer of `parameters` as a rank does; they keep their values.

    The first steps, which make the state, do not count for the time, but for the bytes. With fake
    parameters all of this is fake, too, but for the step counters, which torch keeps apart and
    looks at.

    Args:
        task: gives the optimizer, and whether it steps master weights.
        parameters: trainable ones, with gradient buffers; at least one.
        timer: of one step.
        users: those of `parameters` that stand for others, with the ones that the user knows.

    Raises:
        InputError: if the optimizer cannot be made for them, or its step fails.
    """
    values = [parameter.detach().clone() for parameter in parameters]
    try:
        with torch.no_grad():
            found = _measure(task, parameters, timer, users or {})
    except InputError:
        raise
    except Exception as error:
        raise _failed(error) from error
    with torch.no_grad():
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value)
    return found


def _measure(
    task: Task, parameters: Sequence[nn.Parameter], timer: Timer, users: Users
) -> OptimizerCost:
    found = (sum_of(parameter) for parameter in parameters)
    gradients = [gradient for gradient in found if gradient is not None]
    masters = stepped(parameters, master_weights=task.master_weights)
    known = [*parameters, *gradients]
    live = LiveBytes([*known, *masters])

    def update() -> None:
        with given(masters, gradients):
            optimizer.step()
        cast_back(parameters, masters)

    with live:
        theirs = [users.get(each, each) for each in parameters]
        with live.paused():  # or memory of those that the user knows would count
            optimizer = _begun(task, dict(zip(theirs, masters, strict=True)))
            _fake_state(optimizer)
        live.count(_state(optimizer))
        update()
        live.count(_state(optimizer))
        update()
        _age(optimizer)
        for _ in range(2):  # what the first of them decides may show in the second (ASGD)
            update()
    state_bytes = storage_bytes([*known, *masters, *_state(optimizer)]) - storage_bytes(known)

    def step() -> None:
        for gradient in gradients:
            gradient.div_(1)
        update()
        for gradient in gradients:
            gradient.zero_()

    return OptimizerCost(
        step_ns=timer(step),
        state_bytes=state_bytes,
        workspace_bytes=live.peak - storage_bytes(known) - state_bytes,
    )


def _failed(error: Exception) -> InputError:
    return InputError(
        f"task: optimizer: failed on one layer's parameters: {type(error).__name__}: {error}."
        " It must be a torch.optim.Optimizer, or a function that makes one, for any part of the"
        " model, with step() without arguments."
    )


def check_optimizing(task: Task, model: SplitModel) -> None:
    """Refuse an optimizer or a schedule that cannot be made for a layer.

    Layers may have no values; an optimizer that looks at them finds zeros.

    Raises:
        InputError: if it cannot.
    """
    for layer in model.layers:
        trained = [each for each in layer.parameters() if each.requires_grad]
        zeros = {each: _zeros_like(each) for each in trained}
        if zeros:
            with holding(zeros):
                _begun(task, {model.originals.get(each, each): each for each in trained})


def _zeros_like(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(torch.zeros(parameter.shape, dtype=parameter.dtype))


def _begun(task: Task, known: Mapping[nn.Parameter, nn.Parameter]) -> Optimizer:
    """The task's optimizer with what its schedule sets at the start, such as a momentum."""
    try:
        optimizer = optimizer_of(task.optimizer, known)
    except InputError:
        raise
    except Exception as error:
        raise _failed(error) from error
    own_tensors(optimizer)
    if task.scheduler is not None:
        schedule_of(task.scheduler, optimizer)
    return optimizer


def _fake_state(optimizer: Optimizer) -> None:
    """What was made at once of parameters that held fake values: torch leaves it on `meta`."""
    for parameter, entry in optimizer.state.items():
        mode = parameter.fake_mode if isinstance(parameter, FakeTensor) else None
        for name, value in entry.items() if mode else ():
            if isinstance(value, Tensor) and value.device.type == "meta":
                assert mode is not None
                with mode:
                    entry[name] = torch.empty_like(value, device=parameter.device)


def _state(optimizer: Optimizer) -> list[Tensor]:
    entries = list(optimizer.state.values())
    return [value for value in tree_iter(entries) if isinstance(value, Tensor)]


_MANY_STEPS = 10_000_000
"""Past all phases of torch's optimizers (ASGD averages from step 1,000,000 on); floats go on."""


def _age(optimizer: Optimizer) -> None:
    """Let the optimizer believe that it has made many steps.

    Some change their ways meanwhile: RAdam with its sixth step, ASGD when it begins to average.
    """
    for entry in (*optimizer.state.values(), *optimizer.param_groups):
        count = entry.get("step") if isinstance(entry, dict) else None
        if isinstance(count, Tensor) and count.numel() == 1:
            count.fill_(_MANY_STEPS)
        elif isinstance(count, int | float):
            entry["step"] = _MANY_STEPS
