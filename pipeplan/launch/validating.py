"""When a launched run validates, and which of its checkpoints is the best by it."""

from __future__ import annotations

import time
from collections.abc import Mapping

from pipeplan.callbacks import Callback, ValidationResult
from pipeplan.launch.best import BestSoFar
from pipeplan.launch.checks import Setup
from pipeplan.runtime.checkpoint import storage
from pipeplan.runtime.session import Session
from pipeplan.runtime.validation import validate
from pipeplan.validation import LOSS


class Validator:
    """One rank's side; all ranks validate together, between two steps."""

    def __init__(self, setup: Setup, session: Session, follower: Callback) -> None:
        """Takes the run, and what earlier validations said if it goes on from there.

        Raises:
            InputError: if the validations of the run that is resumed cannot be read.
        """
        options = setup.options
        self._validation = setup.task.validation
        self._every = options.validate_every
        self._last = options.steps
        self._session, self._follower, self._out = session, follower, options.out
        self.best = BestSoFar(options.keep_best) if options.keep_best else None
        """None where nobody asked for it."""
        if self.best and options.resume:
            self.best.recall(options.resume, setup.first_step)
        if self.best:
            self.best = session.gather(self.best)[setup.plan.stages[-1].gpu]

    def try_out(self) -> None:
        """Validate one micro-batch: what cannot work fails before anything is trained.

        Raises:
            InputError: if data or metrics do not fit the task.
        """
        if self._every and self._validation:
            validate(self._session, self._validation, 1)

    def validated(self) -> ValidationResult | None:
        """Validate if it is due after the steps done; None if it is not."""
        step, validation = self._session.steps, self._validation
        if not self._every or not validation or (step % self._every and step != self._last):
            return None
        begin = time.monotonic_ns()
        values = validate(self._session, validation, validation.microbatches)
        result = ValidationResult(
            step=step,
            loss=values[LOSS],
            metrics={name: value for name, value in values.items() if name != LOSS},
            microbatches=validation.microbatches,
            elapsed_ns=time.monotonic_ns() - begin,
            best=self._is_best(values),
        )
        self._follower.validation(result)
        return result

    def _is_best(self, values: Mapping[str, float]) -> bool | None:
        if self.best is None or self._out is None:
            return None
        return self.best.offer(values, storage.step_folder(self._out, self._session.steps))
