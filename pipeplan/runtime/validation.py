"""Loss and metrics of the newest weights on the validation data, between two steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from pipeplan.errors import InputError
from pipeplan.nested import layer_loss
from pipeplan.runtime.session import Session
from pipeplan.validation import LOSS, Validation


def validate(session: Session, validation: Validation, microbatches: int) -> dict[str, float]:
    """The mean of the loss, and of each metric, over micro-batches 0..microbatches-1.

    All ranks call it with an empty pipeline, and all get it. The first replica evaluates: running
    statistics are each replica's own, and checkpoints have those of the first.

    Raises:
        InputError: if the data do not fit, or a metric fails or gives no number.
        RankError: if another rank is gone.
    """
    job = session.job
    own = {
        name: layer_loss(metric, job.split.returned) for name, metric in validation.metrics.items()
    }
    scores = _Scores(own)
    values: list[dict[str, float]] = []
    if session.shard.replica == 0:
        task = replace(job.task, data=validation.data)
        try:
            losses = session.evaluate_numbers(range(microbatches), task, scores.hear)
        except InputError as error:
            raise InputError(f"validation: {error}") from error
        values = scores.beside(losses)
    told = next(each for each in session.gather(values) if each)
    return {name: sum(each[name] for each in told) / microbatches for name in (LOSS, *own)}


@dataclass(frozen=True, slots=True)
class _Scores:
    """What metrics say of micro-batches, in their order, on the rank of the last stage."""

    metrics: Mapping[str, Callable[[Any, Any], Any]]
    found: list[dict[str, Any]] = field(default_factory=list)
    """By metric; where they were computed."""

    def hear(self, output: Any, target: Any) -> None:
        """Take what the loss of the next micro-batch is given."""
        self.found.append({name: self._score(name, output, target) for name in self.metrics})

    def _score(self, name: str, output: Any, target: Any) -> Any:
        try:
            value = self.metrics[name](output, target)
        except Exception as error:
            raise InputError(f"metric {name!r} failed: {type(error).__name__}: {error}") from error
        if isinstance(value, Tensor) and value.numel() == 1:
            return value.detach()
        if isinstance(value, int | float):
            return value
        got = f"shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise InputError(
            f"metric {name!r}: got {got}, need a number or a tensor of one number: its .mean()?"
        )

    def beside(self, losses: Mapping[int, float]) -> list[dict[str, float]]:
        """Loss and metrics of each micro-batch; empty where losses are not known."""
        return [
            {LOSS: losses[number], **{name: float(value) for name, value in scores.items()}}
            for number, scores in enumerate(self.found)
        ]
