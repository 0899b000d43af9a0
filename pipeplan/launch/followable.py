"""Whether a task has what flags want to follow its run by, asked before anything is trained."""

from __future__ import annotations

from pipeplan.callbacks import CALLED
from pipeplan.errors import InputError
from pipeplan.launch.options import LaunchOptions
from pipeplan.launch.tensorboard import check_installed
from pipeplan.task import Task
from pipeplan.validation import LOSS


def check_followed(options: LaunchOptions, task: Task) -> None:
    """Refuse what nobody can follow a run by.

    Raises:
        InputError: if there is no validation data, metric or package that a flag needs, or a
            callback is none.
    """
    validation = task.validation
    if options.validate_every and validation is None:
        raise InputError(
            "launch: got --validate-every, and a task without validation data. Give"
            " Task(validation=pipeplan.Validation(data=.., microbatches=..)), or leave it out."
        )
    if options.keep_best and validation:
        known = [LOSS, *validation.metrics]
        if options.keep_best.metric not in known:
            raise InputError(
                f"launch: --keep-best: got {options.keep_best.metric!r}, need one of"
                f" {', '.join(known)}. Give the task's Validation a metric of that name."
            )
    if validation and validation.metrics and task.loss is None:
        raise InputError(
            "task: validation: got metrics with loss=None: the model computes its loss itself, and"
            " nothing else of it is known. Leave metrics out, or give Task.loss."
        )
    for callback in task.callbacks:
        missing = [name for name in CALLED if not callable(getattr(callback, name, None))]
        if missing:
            raise InputError(
                f"task: callbacks: got a {type(callback).__name__} without {', '.join(missing)},"
                " need a pipeplan.Callback. Let its class derive from it."
            )
    if options.tensorboard:
        check_installed()
