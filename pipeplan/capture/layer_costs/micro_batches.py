"""Micro-batches, all of one shape."""

from __future__ import annotations

from typing import Any

from pipeplan.errors import InputError
from pipeplan.nested import MicroBatch, Structure, text_of
from pipeplan.task import Task


class MicroBatches:
    """Fetches micro-batches of a task and refuses one that is unlike the first.

    A plan is made for one size: buffers, bytes and times are those of micro-batch 0.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self._first = _parts(MicroBatch.of(task, 0))  # no tensor of it stays

    def fetch(self, number: int) -> MicroBatch:
        """Micro-batch `number`.

        Raises:
            InputError: if data fails, or gives what `check` refuses.
        """
        batch = self.given(number)
        self.check(number, batch)
        return batch

    def given(self, number: int) -> MicroBatch:
        """Micro-batch `number`, with the keys of its dicts in the order of micro-batch 0.

        Raises:
            InputError: if data fails.
        """
        (arguments, _), (target, _) = self._first
        return MicroBatch.of(self._task, number, arguments, target)

    def check(self, number: int, batch: MicroBatch) -> None:
        """Refuse a micro-batch with other shapes, types or plain values than micro-batch 0.

        Raises:
            InputError: if it has.
        """
        pairs = zip(("input", "target"), _parts(batch), self._first, strict=True)
        for name, (got, kinds), (need, wanted) in pairs:
            if kinds != wanted:
                raise InputError(
                    f"task: data({number}): got {name} {kinds}, need {wanted}, as"
                    " data(0) gives: all micro-batches have one shape. Leave out what remains"
                    " of the samples, or choose a size of micro-batches that divides them."
                )
            if got != need:
                is_call = name == "input"
                raise InputError(
                    f"task: data({number}): got {name} {text_of(got, is_call=is_call)}, need"
                    f" {text_of(need, is_call=is_call)}, as data(0) gives: what is no tensor is"
                    " the same in every micro-batch. Give what changes as a tensor."
                )


def _parts(batch: MicroBatch) -> tuple[tuple[Structure, str], ...]:
    """Structure, and shapes and types for people, of input and target."""
    return _part(batch.arguments.filled()), _part(batch.target)


def _part(value: Any) -> tuple[Structure, str]:
    structure, tensors = Structure.of(value)
    kinds = [f"of shape {list(tensor.shape)}, {tensor.dtype}" for tensor in tensors]
    return structure, "; ".join(kinds)
