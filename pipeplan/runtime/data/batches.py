"""Micro-batches out of the user's batches, or out of the task's data by number."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from pipeplan.errors import InputError
from pipeplan.nested import ModelArguments, Structure, ordered, text_of
from pipeplan.runtime.arguments import rows_in
from pipeplan.runtime.data.feed import Feed
from pipeplan.runtime.transport.host_staging import moved
from pipeplan.split_model import SplitModel

Inputs = Any
"""Nested tensors, as `Task.data` gives them."""


class BatchFeed:
    """The data of a `Pipeline`: batches that were given for a step, else the task's."""

    def __init__(
        self,
        feed: Feed,
        split: SplitModel,
        microbatches: int,
        device: torch.device,
        *,
        own_loss: bool = False,
    ) -> None:
        """Takes what the batches must fit.

        Args:
            feed: of the task.
            split: of which shape micro-batches are.
            microbatches: per step.
            device: where the stages want them.
            own_loss: whether the model computes its loss itself and needs no target.
        """
        self._feed = feed
        self._device = device
        self._split = split
        self._microbatches = microbatches
        self._own_loss = own_loss
        self._batches: dict[int, Batch] = {}

    def give(self, step: int, batch: Batch) -> None:
        """Use `batch` for `step`, until `forget`; those of earlier steps are forgotten."""
        self._batches = {step: batch}

    def forget(self) -> None:
        """From here on the task's data, also for steps that a batch was given for."""
        self._batches = {}

    def batch(
        self, call: str, inputs: Inputs | None, target: Any, microbatches: int | None
    ) -> Batch:
        """A batch of `microbatches` micro-batches; None takes as many as it has.

        Args:
            call: what was called with it, for errors.
            inputs: of the model; None where this rank needs none.
            target: of the loss; None where this rank needs none.
            microbatches: how many it must have.

        Raises:
            InputError: if there is anything but tensors, the rows do not divide into them, or a
                micro-batch has another shape than the plan was made for.
        """
        arguments = (
            None
            if inputs is None
            else ModelArguments.of(rows_in(f"{call}: inputs", inputs), self._split.arguments)
        )
        compared = ordered(rows_in(f"{call}: target", target), self._split.target)
        structure, wanted = Structure.of(compared)
        if arguments is not None:
            _check(call, "inputs", arguments.structure, self._split.arguments)
        if target is not None:
            _check(call, "target", structure, self._split.target)
        tensors = list(arguments.tensors) if arguments else []
        given = [*tensors, *wanted]
        if not given:
            raise InputError(f"{call}: got neither inputs nor a target, need one of them")
        specs, size = self._split.input_specs, self._split.microbatch_size
        sizes = [spec.shape[0] if spec.shape else 1 for spec in specs[: len(tensors)]]
        sizes += [size] * (len(given) - len(sizes))
        rows = [tensor.shape[0] for tensor in given]
        count = rows[0] // max(1, sizes[0]) if microbatches is None else microbatches
        if rows[0] == 0 or rows != [count * each for each in sizes]:
            raise InputError(
                f"{call}: got {rows} rows, need"
                f" {count or 1} micro-batches of {size}. Every micro-batch must have the"
                " shape the plan was made for; leave out a last batch that is smaller."
            )
        parts = [_parts(tensor, count) for tensor in tensors]
        got = [(tuple(part[0].shape), str(part[0].dtype)) for part in parts]
        need = [(spec.shape, spec.dtype) for spec in specs]
        if tensors and got != need:
            raise InputError(f"{call}: got micro-batches {got}, need {need}")
        targets = None if target is None else (structure, [_parts(each, count) for each in wanted])
        return Batch(
            call, self._split, parts, targets, count, self._device, own_loss=self._own_loss
        )

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
        feed, number = self._source(microbatch)
        return feed.input(number)

    def fed(self, microbatch: int, places: Sequence[int]) -> list[Tensor]:
        """See `Feed`."""
        feed, number = self._source(microbatch)
        return feed.fed(number, places)

    def target(self, microbatch: int) -> Any:
        """See `Feed`."""
        feed, number = self._source(microbatch)
        return feed.target(number)

    def _source(self, microbatch: int) -> tuple[Feed, int]:
        """Who has the micro-batch, and its number there."""
        batch = self._batches.get(microbatch // self._microbatches)
        return (
            (self._feed, microbatch) if batch is None else (batch, microbatch % self._microbatches)
        )


class Batch:
    """A batch cut into micro-batches; what it lacks this rank does not need."""

    def __init__(
        self,
        call: str,
        split: SplitModel,
        inputs: list[list[Tensor]],
        targets: tuple[Structure, list[list[Tensor]]] | None,
        count: int,
        device: torch.device,
        *,
        own_loss: bool,
    ) -> None:
        self._call = call
        self._device, self._own_loss = device, own_loss
        self._inputs = inputs
        self._targets = targets
        self._entry = split.entry(range(len(inputs))) if inputs else ()
        self.count = count

    def input(self, microbatch: int) -> list[Tensor]:
        """See `Feed`.

        Raises:
            InputError: if no inputs were given.
        """
        return self.fed(microbatch, self._entry)

    def fed(self, microbatch: int, places: Sequence[int]) -> list[Tensor]:
        """See `Feed`; errors as for `input`."""
        if not self._inputs:
            raise InputError(f"{self._call}: got no inputs, which this rank needs for its stages")
        return [self._moved(self._inputs[place][microbatch]) for place in places]

    def target(self, microbatch: int) -> Any:
        """See `Feed`.

        Raises:
            InputError: if no target was given, and the loss compares with one.
        """
        if self._own_loss:
            return None
        if self._targets is None:
            raise InputError(
                f"{self._call}: got no target, which the rank of the last stage needs"
            )
        structure, parts = self._targets
        return structure.filled([self._moved(rows[microbatch]) for rows in parts])

    def _moved(self, rows: Tensor) -> Tensor:
        there = moved(rows, self._device)
        return rows.clone() if there is rows else there  # the batch is the user's


def _check(call: str, name: str, got: Structure, need: Structure | None) -> None:
    """Refuse what is nested in another way than the task's data are."""
    if need not in (None, got):
        is_call = name == "inputs"
        raise InputError(
            f"{call}: {name}: got {text_of(got, is_call=is_call)}, need"
            f" {text_of(need, is_call=is_call)}, whose tensors have a first dimension that counts"
            " the rows of all micro-batches"
        )


def _parts(tensor: Tensor, count: int) -> list[Tensor]:
    return list(tensor.detach().chunk(count))
