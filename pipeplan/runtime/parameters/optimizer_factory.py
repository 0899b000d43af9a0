"""The user's optimizer and learning-rate schedule, made for the parameters of each layer."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from pipeplan.errors import InputError
from pipeplan.gradients import (
    MakeOptimizer,
    MakeSchedule,
    given,
    optimizer_of,
    own_tensors,
    schedule_of,
)
from pipeplan.runtime.parameters.state_room import StateRoom


@dataclass(frozen=True, slots=True)
class OptimizerFactory:
    """How parameters are optimized: what the task says of it."""

    optimizer: MakeOptimizer
    scheduler: MakeSchedule | None = None
    accumulate: torch.dtype | None = None
    """In which gradients of weights in 16 bits add up."""
    master_weights: bool = False
    """Whether copies in 32 bits of such weights are stepped."""
    originals: Mapping[nn.Parameter, nn.Parameter] = field(default_factory=dict)
    """Copies of shared parameters -> the parameters that the user knows."""
    rooms: Mapping[nn.Parameter, tuple[str, int]] = field(default_factory=dict)
    """What the plan's chain has for optimizers (`rooms_of`)."""

    def begin(
        self, layers: Iterable[Mapping[nn.Parameter, nn.Parameter]], step: int
    ) -> LayerOptimizers:
        """New optimizers whose schedules have made `step` steps, one per layer with parameters.

        A schedule is a function of the number of updates, so it is replayed, not stored: a run
        may go on with another number of stages.

        Args:
            layers: per layer each parameter with what is stepped for it.
            step: updates made.

        Raises:
            InputError: if either function cannot work here.
        """
        stepped = [layer for layer in layers if layer]
        each = tuple(map(self._made, stepped))
        if any(isinstance(optimizer, LBFGS) for optimizer in each):
            raise InputError(
                "task: optimizer: got LBFGS, which computes the loss again and looks at all"
                " parameters at once; need one whose step() takes no argument, such as AdamW"
            )
        schedules = tuple(self._schedules(each, step))
        rooms = tuple(map(self._room, stepped))
        return LayerOptimizers(each, schedules, tuple(set[str]() for _ in each), rooms)

    def _room(self, layer: Mapping[nn.Parameter, nn.Parameter]) -> StateRoom | None:
        """That of the layers in which its parameters count: copies may be of several."""
        rooms = dict(self.rooms[parameter] for parameter in layer if parameter in self.rooms)
        masters = [each for parameter, each in layer.items() if each.dtype != parameter.dtype]
        size, copied = sum(rooms.values()), sum(each.nbytes for each in masters)
        return StateRoom(", ".join(rooms), size, copied) if rooms else None

    def _made(self, layer: Mapping[nn.Parameter, nn.Parameter]) -> Optimizer:
        known = {
            self.originals.get(parameter, parameter): each for parameter, each in layer.items()
        }
        optimizer = optimizer_of(self.optimizer, known)
        own_tensors(optimizer)
        return optimizer

    def _schedules(self, each: Iterable[Optimizer], step: int) -> Iterator[LRScheduler]:
        if self.scheduler is None:
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch: schedule stepped before the optimizer
            for optimizer in each:
                scheduler = schedule_of(self.scheduler, optimizer)
                for _ in range(step):
                    scheduler.step()
                yield scheduler


@dataclass(frozen=True, slots=True)
class LayerOptimizers:
    """The optimizers of some layers, one per layer, which step one after the other.

    What a step takes for a while then ends with its layer, whether the optimizer goes through its
    parameters one by one or takes all of them at once: a stage needs what its largest layer needs,
    and `capture` measures just that, layer by layer (W of docs/reference/model.md, section 4).
    """

    each: tuple[Optimizer, ...]
    schedules: tuple[LRScheduler, ...]
    """One per optimizer, or none at all."""
    written: tuple[set[str], ...]
    """Per optimizer the entries of its groups that its steps have changed: state that lies there,
    as some optimizers count or estimate for a whole group."""
    rooms: tuple[StateRoom | None, ...]
    """Per optimizer; None where the chain does not tell."""

    def step(self, sums: Mapping[nn.Parameter, Tensor | None]) -> None:
        """Update all parameters from their gradients, which `sums` has in whatever type.

        None for a parameter that no gradient has reached in this step.

        Raises:
            InputError: if an optimizer keeps more than the plan's chain counts.
        """
        rows = zip(self.each, self.written, self.rooms, strict=True)
        for optimizer, written, room in rows:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            before = _marks(optimizer)
            with given(parameters, [sums[parameter] for parameter in parameters]):
                optimizer.step()
            written.update(name for _, name, _ in _marks(optimizer) - before)
            if room:
                room.check(optimizer)

    def move_on(self, *, skipped: bool) -> None:
        """Take the schedules one update further, also behind one that was `skipped`."""
        with warnings.catch_warnings():  # torch: a skipped first step is none before this one
            warnings.simplefilter("ignore" if skipped else "default")
            for schedule in self.schedules:
                schedule.step()

    def learning_rates(self) -> dict[nn.Parameter, float]:
        """Of the next step; without those of optimizers that have none."""
        groups = [group for optimizer in self.each for group in optimizer.param_groups]
        return {
            p: float(group["lr"]) for group in groups if "lr" in group for p in group["params"]
        }

    def parameters(self) -> Iterator[tuple[nn.Parameter, Optimizer]]:
        """Every parameter with the optimizer that has its state."""
        for optimizer in self.each:
            for group in optimizer.param_groups:
                yield from ((parameter, optimizer) for parameter in group["params"])

    def entries(self) -> Iterator[tuple[nn.Parameter, dict[str, Any]]]:
        """Of each parameter what steps have written into its group."""
        for optimizer, written in zip(self.each, self.written, strict=True):
            for group in optimizer.param_groups:
                found = {name: group[name] for name in sorted(written) if name in group}
                yield from ((parameter, found) for parameter in group["params"])

    def put_entries(self, entries: Mapping[nn.Parameter, Mapping[str, Any]]) -> None:
        """Let groups have what `entries` of their parameters say."""
        for optimizer, written in zip(self.each, self.written, strict=True):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    group.update(entries[parameter])
                    written.update(entries[parameter])


_Mark = tuple[int, str, object]
"""Number of a group, an entry of it, something that changes when the entry does."""


def _marks(optimizer: Optimizer) -> set[_Mark]:
    """Of all that groups have beside parameters."""
    return {
        (number, name, _mark(value))
        for number, group in enumerate(optimizer.param_groups)
        for name, value in group.items()
        if name != "params"
    }


def _mark(value: object) -> object:
    if isinstance(value, Tensor):
        return id(value), value._version  # noqa: SLF001  torch has no public name for it
    return value if isinstance(value, (bool, int, float, str)) else repr(value)


def kept_fields(
    optimizers: LayerOptimizers,
) -> Iterator[tuple[nn.Parameter, Optimizer, Mapping[str, bool]]]:
    """What a step leaves in the state of each parameter, as torch's own optimizers do it.

    A twin steps on a few zeros: which fields there are depends on the group and on the number of
    dimensions (Adafactor). Nothing is known of other optimizers, which may look at more.

    Returns:
        Each parameter with its optimizer and the names of its fields; True for those that have
        the parameter's shape.
    """
    known: dict[tuple[object, ...], dict[str, bool]] = {}
    for optimizer in optimizers.each:
        make: Callable[..., Optimizer] = type(optimizer)
        if make is not getattr(torch.optim, make.__name__, None):
            continue
        for group in optimizer.param_groups:
            options = tuple(
                (name, repr(value)) for name, value in group.items() if name != "params"
            )
            for parameter in group["params"]:
                kind = (make, options, parameter.dim(), parameter.dtype, parameter.device)
                if kind not in known:
                    known[kind] = _twins_fields(make, group, parameter)
                yield parameter, optimizer, known[kind]


def _twins_fields(
    make: Callable[..., Optimizer], group: Mapping[str, Any], parameter: nn.Parameter
) -> dict[str, bool]:
    """Those of a parameter with other sizes, no two of them the same and none of them 1."""
    sizes = tuple(range(2, parameter.dim() + 2))
    zeros = nn.Parameter(parameter.new_zeros(sizes))
    zeros.grad = torch.zeros_like(zeros)
    twin = make([{**group, "params": [zeros]}])
    twin.step()
    return {
        name: isinstance(value, Tensor) and value.dim() > 0 and value.shape == zeros.shape
        for name, value in twin.state[zeros].items()
    }
