"""Micro-batches out of the user's batches, or out of the task's data by number."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from pipeplan.errors import InputError
from pipeplan.runtime.arguments import tensors_of
from pipeplan.runtime.data.feed import Feed
from pipeplan.task import TensorSpec

Inputs = Tensor | Sequence[Tensor]


class BatchFeed:
    """The data of a `Pipeline`: batches that were given for a step, else the task's."""

    def __init__(
        self,
        feed: Feed,
        specs: Sequence[TensorSpec],
        size: int,
        microbatches: int,
        device: torch.device,
    ) -> None:
        """Takes what the batches must fit.

        Args:
            feed: of the task.
            specs: of boundary 0.
            size: rows per micro-batch.
            microbatches: per step.
            device: where the stages want them.
        """
        self._feed = feed
        self._device = device
        self._specs = tuple(specs)
        self._size = size
        self._microbatches = microbatches
        self._batches: dict[int, Batch] = {}

    def give(self, step: int, batch: Batch) -> None:
        """Use `batch` for `step`, until `forget`; those of earlier steps are forgotten."""
        self._batches = {step: batch}

    def forget(self) -> None:
        """From here on the task's data, also for steps that a batch was given for."""
        self._batches = {}

    def batch(
        self, inputs: Inputs | None, target: Tensor | None, microbatches: int | None
    ) -> Batch:
        """A batch of `microbatches` micro-batches; None takes as many as it has.

        Raises:
            InputError: if there is anything but tensors, the rows do not divide into them, or a
                micro-batch has another shape than the plan was made for.
        """
        tensors = tensors_of("step: inputs", inputs)
        given = [*tensors, *tensors_of("step: target", None if target is None else (target,))]
        if not given:
            raise InputError("step: got neither inputs nor a target, need one of them")
        rows = given[0].shape[0]
        count = rows // self._size if microbatches is None else microbatches
        if rows == 0 or any(tensor.shape[0] != count * self._size for tensor in given):
            raise InputError(
                f"step: got {[tensor.shape[0] for tensor in given]} rows, need"
                f" {count or 1} micro-batches of {self._size}. Every micro-batch must have the"
                " shape the plan was made for; leave out a last batch that is smaller."
            )
        parts = [_parts(tensor, count) for tensor in tensors]
        got = [(tuple(part[0].shape), str(part[0].dtype)) for part in parts]
        need = [(spec.shape, spec.dtype) for spec in self._specs]
        if tensors and got != need:
            raise InputError(f"step: got micro-batches {got}, need {need}")
        targets = [] if target is None else _parts(target, count)
        return Batch(parts, targets, count, self._device)

    @contextmanager
    def replaced(self, feed: Feed) -> Iterator[None]:
        """Inside, all that asks for data gets it from `feed`."""
        kept = self._feed, self._batches
        self._feed, self._batches = feed, {}
        try:
            yield
        finally:
            self._feed, self._batches = kept

    def input(self, microbatch: int) -> list[Tensor]:
        """See `Feed`."""
        batch = self._batches.get(microbatch // self._microbatches)
        if batch is None:
            return self._feed.input(microbatch)
        return batch.input(microbatch % self._microbatches)

    def target(self, microbatch: int) -> Tensor:
        """See `Feed`."""
        batch = self._batches.get(microbatch // self._microbatches)
        if batch is None:
            return self._feed.target(microbatch)
        return batch.target(microbatch % self._microbatches)


class Batch:
    """A batch cut into micro-batches; what it lacks this rank does not need."""

    def __init__(
        self,
        inputs: list[list[Tensor]],
        targets: list[Tensor],
        count: int,
        device: torch.device,
    ) -> None:
        self._device = device
        self._inputs = inputs
        self._targets = targets
        self.count = count

    def input(self, microbatch: int) -> list[Tensor]:
        """See `Feed`.

        Raises:
            InputError: if no inputs were given.
        """
        if not self._inputs:
            raise InputError("step: got no inputs, which this rank needs for its stages")
        return [parts[microbatch].to(self._device, copy=True) for parts in self._inputs]

    def target(self, microbatch: int) -> Tensor:
        """See `Feed`.

        Raises:
            InputError: if no target was given.
        """
        if not self._targets:
            raise InputError("step: got no target, which the rank of the last stage needs")
        return self._targets[microbatch].to(self._device, copy=True)


def _parts(tensor: Tensor, count: int) -> list[Tensor]:
    return list(tensor.detach().chunk(count))
