"""What a run validates its weights on, and which are the best. Data only, without torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from pipeplan.errors import InputError

LOSS = "loss"
"""The name of the task's loss among metrics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """Micro-batches on which `launch --validate-every` evaluates the newest weights.

    Raises:
        InputError: if a field is none of what it must be.
    """

    data: Callable[[int], Any]
    """As `Task.data`, with tensors of the same shapes and types: micro-batch number, from 0."""
    microbatches: int
    """How many there are."""
    metrics: Mapping[str, Callable[[Any, Any], Any]] = field(default_factory=dict)
    """Name -> (output, target) -> number or scalar tensor, the mean over the micro-batch; both as
    the task's loss gets them. What is told is the mean over all micro-batches."""

    def __post_init__(self) -> None:
        if isinstance(self.microbatches, bool) or not isinstance(self.microbatches, int):
            raise InputError(
                f"validation: microbatches: got {self.microbatches!r}, need an integer"
            )
        if self.microbatches < 1:
            raise InputError(f"validation: microbatches: got {self.microbatches}, need at least 1")
        for name, metric in self.metrics.items():
            if not isinstance(name, str) or not name or name == LOSS or ":" in name:
                raise InputError(
                    f"validation: metrics: got the name {name!r}, need a text without colon other"
                    f" than {LOSS!r}, which is the task's own"
                )
            if not callable(metric):
                raise InputError(
                    f"validation: metric {name!r}: got a {type(metric).__name__}, need a function"
                    " (output, target) -> number"
                )

    def __str__(self) -> str:
        """What ranks must have alike, whose functions lie at other places of memory."""
        return f"{self.microbatches} micro-batches ({', '.join([LOSS, *self.metrics])})"


@dataclass(frozen=True, slots=True)
class BestRule:
    """Which weights are the best: those with the lowest or the highest value of a metric."""

    metric: str
    highest: bool

    @classmethod
    def parse(cls, text: str) -> Self:
        """`METRIC`, `METRIC:min` or `METRIC:max`.

        Raises:
            InputError: if it is none of them.
        """
        metric, _, way = text.partition(":")
        if not metric or way not in ("", "min", "max") or text.endswith(":"):
            raise InputError(
                f"got {text!r}, need loss or a metric of the task, lowest (NAME) or highest"
                " (NAME:max)"
            )
        return cls(metric, way == "max")
