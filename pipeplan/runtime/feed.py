"""The data side: each micro-batch's tensors, checked against what the plan was made for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pipeplan.errors import InputError
from pipeplan.task import Task, TensorSpec

_CPU = torch.device("cpu")


class TaskFeed:
    """Asks the task for a micro-batch wherever a stage needs one; nothing is kept."""

    def __init__(
        self,
        task: Task,
        specs: Sequence[TensorSpec],
        number: Callable[[int], int] = lambda microbatch: microbatch,
        device: torch.device = _CPU,
    ) -> None:
        """Takes what the data come from.

        Args:
            task: gives them.
            specs: of boundary 0.
            number: micro-batch -> its number in the data.
            device: where the stages want them.
        """
        self._number = number
        self._device = device
        self._task = task
        self._specs = tuple(specs)

    def input(self, microbatch: int) -> list[Tensor]:
        """Boundary 0 of `microbatch`.

        Raises:
            InputError: if a shape or dtype differs from the one the plan was made for.
        """
        number = self._number(microbatch)
        tensor = self._task.microbatch(number)[0]
        got = [(tuple(tensor.shape), str(tensor.dtype))]
        need = [(spec.shape, spec.dtype) for spec in self._specs]
        if got != need:
            raise InputError(
                f"task.data({number}): got input {got}, need {need}. Every micro-batch must"
                " have the same shape; leave out a last one that is smaller."
            )
        return [tensor.to(self._device)]

    def target(self, microbatch: int) -> Tensor:
        """The target of `microbatch`."""
        return self._task.microbatch(self._number(microbatch))[1].to(self._device)
