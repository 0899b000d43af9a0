"""The data side: each micro-batch's tensors, checked against what the plan was made for.

A rank asks for parts of one micro-batch at different moments: the input for its first layer, again
for layers that are fed it, the target before the loss, some of them a second time where layers are
computed again. All come from one call of `data`: then they belong together even where `data` draws
anew at every call. What is still to be asked for waits in the host's memory, as part of loading
data, and is given up with its last use.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from pipeplan.errors import InputError, InternalError
from pipeplan.nested import MicroBatch, ModelArguments, mapped, text_of
from pipeplan.plan import Plan
from pipeplan.runtime.transport.host_staging import moved
from pipeplan.split_model import SplitModel
from pipeplan.task import LoadsAhead, Task

_CPU = torch.device("cpu")


class Feed(Protocol):
    """The data of each micro-batch."""

    def input(self, microbatch: int) -> list[Tensor]:
        """Boundary 0; a fresh list."""

    def fed(self, microbatch: int, places: Sequence[int]) -> list[Tensor]:
        """Tensors of the model's input, by their places in it; a fresh list."""

    def target(self, microbatch: int) -> Any:
        """What the loss compares with: nested tensors; None where the model has its own loss."""


@dataclass(frozen=True, slots=True)
class Uses:
    """How often a rank asks for the parts of one micro-batch."""

    inputs: tuple[int, ...]
    """For each tensor of the model's input."""
    targets: int

    @classmethod
    def of(cls, plan: Plan, split: SplitModel, rank: int, *, trains: bool = True) -> Self:
        """What `rank` needs: once per first layer, fed layer and loss, more if computed again.

        Args:
            plan: stages, and which of their layers are computed again.
            split: which layers are fed the input.
            rank: one of the plan's GPUs.
            trains: whether there are backwards, so that layers are computed again.
        """
        places = range(len(split.input_specs))
        inputs, targets = dict.fromkeys(places, 0), 0
        for stage in plan.hosted(rank):
            runs = stage.remat.recompute if trains and stage.remat else ()
            for layer in range(stage.first, stage.last + 1):
                times = 1 + sum(first <= layer <= last for first, last in runs)
                for place in split.entry(places) if layer == 0 else ():
                    inputs[place] += 1
                for place in split.fed_to(layer):
                    inputs[place] += times
                targets += times * (layer == len(split.layers) - 1)
        return cls(tuple(inputs.values()), targets)


@dataclass(slots=True)
class _Part:
    """A tensor of a micro-batch, or its target, and how often it will still be asked for."""

    value: Any
    left: int

    def take(self) -> Any:
        """Tensors that the caller owns: the last one gets what was loaded, others copies."""
        if not self.left:
            raise InternalError(
                "feed: a part of a micro-batch is asked for more often than planned"
            )
        value, self.left = self.value, self.left - 1
        if self.left:
            return mapped(torch.clone, value)
        self.value = None
        return value

    def wait(self) -> None:
        """Off the GPU, if it was loaded there: no plan has room for what is not used yet."""
        self.value = mapped(lambda tensor: tensor.to(_CPU), self.value)


class TaskFeed:
    """Asks the task once for each micro-batch that this rank needs something of."""

    def __init__(
        self,
        task: Task,
        split: SplitModel,
        uses: Uses,
        number: Callable[[int], int] = lambda microbatch: microbatch,
        device: torch.device = _CPU,
        *,
        ahead: bool = True,
    ) -> None:
        """Takes what the data come from.

        Args:
            task: gives them.
            split: says of which shape the input must be.
            uses: how often each part is going to be asked for.
            number: micro-batch -> its number in the data.
            device: where the stages want them.
            ahead: tell data that can load ahead which micro-batches come.
        """
        self._task = task
        self._loads = task.data if ahead and isinstance(task.data, LoadsAhead) else None
        self._coming: Iterator[Any] | None = None
        """Micro-batches that are loaded ahead."""
        self._asked: deque[int] = deque()
        """Their numbers, as far as they were asked for."""
        self._split = split
        self._uses = uses
        self._number = number
        self._device = device
        self._entry = split.entry(range(len(split.input_specs)))
        self._open: dict[int, list[_Part]] = {}
        """Parts of micro-batches that are still needed: inputs, behind them the target."""

    def input(self, microbatch: int) -> list[Tensor]:
        """Boundary 0 of `microbatch`.

        Raises:
            InputError: if a shape or dtype differs from the one the plan was made for.
        """
        return self._take(microbatch, self._entry)

    def fed(self, microbatch: int, places: Sequence[int]) -> list[Tensor]:
        """Tensors of the model's input, as `input`."""
        return self._take(microbatch, places)

    def target(self, microbatch: int) -> Any:
        """The target of `microbatch`."""
        return self._take(microbatch, [-1])[0]

    def _take(self, microbatch: int, places: Sequence[int]) -> list[Any]:
        parts = self._open.pop(microbatch, None) or self._fetch(microbatch)
        taken = [parts[place].take() for place in places]
        if any(each.left for each in parts):
            for each in parts:
                each.wait()
            self._open[microbatch] = parts
        return [mapped(lambda tensor: moved(tensor, self._device), value) for value in taken]

    def close(self) -> None:
        """Load nothing ahead any more."""
        self._coming = None
        self._asked.clear()

    def _fetch(self, microbatch: int) -> list[_Part]:
        number = self._number(microbatch)
        task, alike = self._loading(microbatch, number), self._split
        batch = MicroBatch.of(task, number, alike.arguments, alike.target)
        self._check(number, batch.arguments)
        values = (*batch.inputs, batch.target)
        uses = (*self._uses.inputs, self._uses.targets)
        pairs = zip(values, uses, strict=True)
        return [_Part(value if count else None, count) for value, count in pairs]

    def _loading(self, microbatch: int, number: int) -> Task:
        """The task; its data are what was loaded ahead, where that is micro-batch `number`."""
        if self._loads is None:
            return self._task
        if not self._asked or self._asked[0] != number:
            self.close()
            self._coming = self._loads.ahead(self._numbers(microbatch))
        coming = self._coming
        if coming is None:
            return self._task

        def due(_: int) -> Any:
            batch = next(coming)
            self._asked.popleft()
            return batch

        return replace(self._task, data=due)

    def _numbers(self, microbatch: int) -> Iterator[int]:
        """Numbers in the data from `microbatch` on, each noted when it is asked for."""
        for each in itertools.count(microbatch):
            number = self._number(each)
            self._asked.append(number)
            yield number

    def _check(self, number: int, arguments: ModelArguments) -> None:
        """Refuse inputs that the plan was not made for."""
        got = [(tuple(each.shape), str(each.dtype)) for each in arguments.tensors]
        need = [(spec.shape, spec.dtype) for spec in self._split.input_specs]
        if got != need:
            raise InputError(
                f"task.data({number}): got input {got}, need {need}. Every micro-batch must"
                " have the same shape; leave out a last one that is smaller."
            )
        nested = self._split.arguments
        if nested not in (None, arguments.structure):
            raise InputError(
                f"task.data({number}): got input {text_of(arguments.structure, is_call=True)},"
                f" need {text_of(nested, is_call=True)}, as data(0) gives: what is no tensor is"
                " the same in every micro-batch. Give what changes as a tensor."
            )
