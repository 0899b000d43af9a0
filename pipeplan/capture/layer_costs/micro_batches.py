"""Micro-batches, all of one shape."""

from __future__ import annotations

from typing import Any

from pipeplan.errors import InputError
from pipeplan.nested import MicroBatch, Structure
from pipeplan.task import Task


class MicroBatches:
    """Fetches micro-batches of a task and refuses one that is unlike the first.

    A plan is made for one size: buffers, bytes and times are those of micro-batch 0.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self._first = _kinds(MicroBatch.of(task, 0))

    def fetch(self, number: int) -> MicroBatch:
        """Micro-batch `number`.

        Raises:
            InputError: if data fails, or gives another shape or type than for micro-batch 0.
        """
        batch = MicroBatch.of(self._task, number)
        names = ("input", "target")
        for name, got, need in zip(names, _kinds(batch), self._first, strict=True):
            if got != need:
                raise InputError(
                    f"task: data({number}): got {name} {got}, need {need}, as"
                    " data(0) gives: all micro-batches have one shape. Leave out what remains"
                    " of the samples, or choose a size of micro-batches that divides them."
                )
        return batch


def _kinds(batch: MicroBatch) -> tuple[str, ...]:
    """Shapes, types and structure of input and target, for people."""
    return _text(batch.arguments.filled()), _text(batch.target)


def _text(value: Any) -> str:
    structure, tensors = Structure.of(value)
    kinds = [f"of shape {list(tensor.shape)}, {tensor.dtype}" for tensor in tensors]
    plain = [leaf for leaf in structure.leaves if isinstance(leaf, bool | int | float | str)]
    return "; ".join([*kinds, *(f"beside {leaf!r}" for leaf in plain)])
