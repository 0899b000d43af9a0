"""Who follows a run, told as one: files, the log, TensorBoard, the callbacks of the task."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pipeplan.callbacks import (
    Callback,
    RunEnd,
    RunStart,
    SavedCheckpoint,
    StepMetrics,
    ValidationResult,
)
from pipeplan.errors import InputError
from pipeplan.launch.best import FILE
from pipeplan.launch.checks import Setup
from pipeplan.launch.logs import JsonLog, MetricsFile, TextLog, ValidationFile, drop_after
from pipeplan.launch.tensorboard import TensorBoard


class Followers(Callback):
    """Tells each of several in turn; nobody on ranks that tell nothing."""

    def __init__(self, each: Sequence[Callback] = ()) -> None:
        """Takes them."""
        self._each = each

    def start(self, run: RunStart) -> None:
        """See `Callback`, as all others."""
        for each in self._each:
            each.start(run)

    def step(self, step: StepMetrics) -> None:
        """See `start`."""
        for each in self._each:
            each.step(step)

    def validation(self, result: ValidationResult) -> None:
        """See `start`."""
        for each in self._each:
            each.validation(result)

    def checkpoint(self, saved: SavedCheckpoint) -> None:
        """See `start`."""
        for each in self._each:
            each.checkpoint(saved)

    def end(self, end: RunEnd) -> None:
        """See `start`."""
        for each in self._each:
            each.end(end)


class TaskCallback(Callback):
    """A callback of the task, whose errors say which it is, what it was told, and of which step.

    Raises:
        InputError: in every method, if the user's fails.
    """

    def __init__(self, callback: Callback) -> None:
        """Takes the user's."""
        self._callback = callback
        self._name = type(callback).__name__

    def start(self, run: RunStart) -> None:
        """See `Callback`, as all others."""
        self._call("start", run.first_step, lambda: self._callback.start(run))

    def step(self, step: StepMetrics) -> None:
        """See `start`."""
        self._call("step", step.step, lambda: self._callback.step(step))

    def validation(self, result: ValidationResult) -> None:
        """See `start`."""
        self._call("validation", result.step, lambda: self._callback.validation(result))

    def checkpoint(self, saved: SavedCheckpoint) -> None:
        """See `start`."""
        self._call("checkpoint", saved.step, lambda: self._callback.checkpoint(saved))

    def end(self, end: RunEnd) -> None:
        """See `start`."""
        self._call("end", end.step, lambda: self._callback.end(end))

    def _call(self, event: str, step: int, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            raise InputError(
                f"task: callback {self._name}.{event} failed at step {step}:"
                f" {type(error).__name__}: {error}. Mend it, or leave it out of Task.callbacks."
            ) from error


def followers_of(setup: Setup) -> Followers:
    """Those of the rank that tells: files of --out cut to what is resumed, then the log.

    Raises:
        InputError: if a file of --out is none that a run wrote.
    """
    options, task = setup.options, setup.task
    made: list[Callback] = []
    if options.out:
        metrics, validations = options.out / "metrics.jsonl", options.out / FILE
        drop_after(metrics, setup.first_step)
        drop_after(validations, setup.first_step)
        made += [MetricsFile(metrics), ValidationFile(validations)]
        if options.tensorboard:
            made.append(TensorBoard(options.out / "tensorboard"))
    if options.json or options.log_format == "json":
        made.append(JsonLog(steps_alone=options.json))
    else:
        made.append(TextLog(options.steps, task.unit))
    return Followers([*made, *map(TaskCallback, task.callbacks)])
