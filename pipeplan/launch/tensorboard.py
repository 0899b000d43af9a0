"""Scalars for TensorBoard, by torch's own writer, which needs the package `tensorboard`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeplan.callbacks import Callback, RunEnd, RunStart, StepMetrics, ValidationResult
from pipeplan.errors import InputError


class TensorBoard(Callback):
    """Writes the scalars of steps and validations into a folder."""

    def __init__(self, folder: Path) -> None:
        """Takes the folder."""
        self._folder = folder
        self._writer: Any = None

    def start(self, run: RunStart) -> None:
        """Begin a file; TensorBoard forgets what older ones have of the steps to come."""
        self._writer = _writer_class()(str(self._folder), purge_step=run.first_step + 1)

    def step(self, step: StepMetrics) -> None:
        """Loss, gradient norm, learning rates (several as 0, 1, ..), times and throughput."""
        scalars = {
            "train/loss": step.loss,
            "train/gradient_norm": step.gradient_norm,
            "train/step_seconds": step.step_ns / 1e9,
            "train/units_per_second": step.units_per_s,
        }
        several = len(step.learning_rates) > 1
        for number, rate in enumerate(step.learning_rates):
            scalars["train/learning_rate" + f"/{number}" * several] = rate
        self._write(scalars, step.step)

    def validation(self, result: ValidationResult) -> None:
        """Loss and metrics."""
        values = {"loss": result.loss, **result.metrics}
        self._write({f"validation/{name}": value for name, value in values.items()}, result.step)

    def end(self, end: RunEnd) -> None:
        """All is in the file."""
        self._writer.close()

    def _write(self, scalars: dict[str, float], step: int) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)


def check_installed() -> None:
    """Refuse what nothing can write.

    Raises:
        InputError: if the package is missing.
    """
    _writer_class()


def _writer_class() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise InputError(
            f"launch: --tensorboard: got no package tensorboard ({error}), which torch's writer"
            " needs: pip install tensorboard. Or leave it out: metrics.jsonl and --log-format json"
            " have the same numbers."
        ) from error
    return SummaryWriter
