"""The data side: each micro-batch's tensors, checked against what the plan was made for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from pipeplan.errors import InputError
from pipeplan.task import TensorSpec


class TaskFeed:
    """Asks the task for a micro-batch wherever a stage needs one; nothing is kept."""

    def __init__(
        self, data: Callable[[int], tuple[Tensor, Tensor]], specs: Sequence[TensorSpec]
    ) -> None:
        """Takes `Task.data` and the specs of boundary 0."""
        self._data = data
        self._specs = tuple(specs)

    def input(self, microbatch: int) -> list[Tensor]:
        """Boundary 0 of `microbatch`.

        Raises:
            InputError: if a shape or dtype differs from the one the plan was made for.
        """
        value = self._data(microbatch)[0]
        tensors = list(value) if isinstance(value, tuple) else [value]
        got = [(tuple(tensor.shape), str(tensor.dtype)) for tensor in tensors]
        need = [(spec.shape, spec.dtype) for spec in self._specs]
        if got != need:
            raise InputError(
                f"task.data({microbatch}): got input {got}, need {need}. Every micro-batch must"
                " have the same shape; leave out a last one that is smaller."
            )
        return tensors

    def target(self, microbatch: int) -> Tensor:
        """The target of `microbatch`."""
        return self._data(microbatch)[1]
