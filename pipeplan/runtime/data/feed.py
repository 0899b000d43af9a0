"""The data side: each micro-batch's tensors, checked against what the plan was made for.

A rank asks for parts of one micro-batch at different moments: the input for its first layer, again
for layers that are fed it, the target before the loss, some of them a second time where layers are
computed again. All come from one call of `data`: then they belong together even where `data` draws
anew at every call. What is still to be asked for waits in the host's memory, as part of loading
data, and is given up with its last use.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor

from pipeplan.errors import InputError, InternalError
from pipeplan.plan import Plan
from pipeplan.runtime.transport.host_staging import moved
from pipeplan.task import SplitModel, Task

_CPU = torch.device("cpu")


class Feed(Protocol):
    """The data of each micro-batch."""

    def input(self, microbatch: int) -> list[Tensor]:
        """Boundary 0; a fresh list."""

    def target(self, microbatch: int) -> Tensor:
        """What the loss compares with."""


@dataclass(frozen=True, slots=True)
class Uses:
    """How often a rank asks for the two parts of one micro-batch."""

    inputs: int
    targets: int

    @classmethod
    def of(cls, plan: Plan, split: SplitModel, rank: int, *, trains: bool = True) -> Self:
        """What `rank` needs: once per first layer, fed layer and loss, twice if computed again.

        Args:
            plan: stages, and which of their layers are computed again.
            split: which layers are fed the input.
            rank: one of the plan's GPUs.
            trains: whether there are backwards, so that layers are computed again.
        """
        inputs = targets = 0
        for stage in plan.hosted(rank):
            runs = stage.remat.recompute if trains and stage.remat else ()
            for layer in range(stage.first, stage.last + 1):
                times = 2 if any(first <= layer <= last for first, last in runs) else 1
                inputs += (layer == 0) + times * bool(split.fed_to(layer))
                targets += times * (layer == len(split.layers) - 1)
        return cls(inputs, targets)


@dataclass(slots=True)
class _Part:
    """One tensor of a micro-batch and how often it will still be asked for."""

    tensor: Tensor | None
    left: int

    def take(self) -> Tensor:
        """A tensor that the caller owns: the last one gets what was loaded, others a copy."""
        if self.tensor is None:
            raise InternalError(
                "feed: a part of a micro-batch is asked for more often than planned"
            )
        tensor, self.left = self.tensor, self.left - 1
        if self.left:
            return tensor.clone()
        self.tensor = None
        return tensor

    def wait(self) -> None:
        """Off the GPU, if it was loaded there: no plan has room for what is not used yet."""
        if self.tensor is not None:
            self.tensor = self.tensor.to(_CPU)


class TaskFeed:
    """Asks the task once for each micro-batch that this rank needs something of."""

    def __init__(
        self,
        task: Task,
        split: SplitModel,
        uses: Uses,
        number: Callable[[int], int] = lambda microbatch: microbatch,
        device: torch.device = _CPU,
    ) -> None:
        """Takes what the data come from.

        Args:
            task: gives them.
            split: says of which shape the input must be.
            uses: how often each part is going to be asked for.
            number: micro-batch -> its number in the data.
            device: where the stages want them.
        """
        self._task = task
        self._specs = split.boundaries[0]
        self._uses = uses
        self._number = number
        self._device = device
        self._open: dict[int, tuple[_Part, _Part]] = {}

    def input(self, microbatch: int) -> list[Tensor]:
        """Boundary 0 of `microbatch`.

        Raises:
            InputError: if a shape or dtype differs from the one the plan was made for.
        """
        return [self._take(microbatch, 0)]

    def target(self, microbatch: int) -> Tensor:
        """The target of `microbatch`."""
        return self._take(microbatch, 1)

    def _take(self, microbatch: int, part: int) -> Tensor:
        parts = self._open.pop(microbatch, None) or self._fetch(self._number(microbatch))
        tensor = parts[part].take()
        if any(each.left for each in parts):
            for each in parts:
                each.wait()
            self._open[microbatch] = parts
        return moved(tensor, self._device)

    def _fetch(self, number: int) -> tuple[_Part, _Part]:
        source, target = self._task.microbatch(number)
        got = [(tuple(source.shape), str(source.dtype))]
        need = [(spec.shape, spec.dtype) for spec in self._specs]
        if got != need:
            raise InputError(
                f"task.data({number}): got input {got}, need {need}. Every micro-batch must"
                " have the same shape; leave out a last one that is smaller."
            )
        wanted = zip((source, target), (self._uses.inputs, self._uses.targets), strict=True)
        first, second = (_Part(tensor if uses else None, uses) for tensor, uses in wanted)
        return first, second
