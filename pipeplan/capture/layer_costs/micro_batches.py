"""Micro-batches, all of one shape."""

from __future__ import annotations

import torch
from torch import Tensor

from pipeplan.errors import InputError
from pipeplan.task import Task


class MicroBatches:
    """Fetches micro-batches of a task and refuses one that is unlike the first.

    A plan is made for one size: buffers, bytes and times are those of micro-batch 0.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self._first = tuple(map(_kind, task.microbatch(0)))

    def fetch(self, number: int) -> tuple[Tensor, Tensor]:
        """(input, target) of micro-batch `number`.

        Raises:
            InputError: if data fails, or gives another shape or type than for micro-batch 0.
        """
        pair = self._task.microbatch(number)
        names = ("input", "target")
        for name, value, need in zip(names, pair, self._first, strict=True):
            got = _kind(value)
            if got != need:
                raise InputError(
                    f"task: data({number}): got {name} {_text(got)}, need {_text(need)}, as"
                    " data(0) gives: all micro-batches have one shape. Leave out what remains"
                    " of the samples, or choose a size of micro-batches that divides them."
                )
        return pair


Kind = tuple[tuple[int, ...], torch.dtype]


def _kind(value: Tensor) -> Kind:
    return tuple(value.shape), value.dtype


def _text(kind: Kind) -> str:
    return f"of shape {list(kind[0])}, {kind[1]}"
