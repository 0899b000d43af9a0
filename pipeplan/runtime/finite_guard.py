"""Numbers that are not finite: training on would only spread them, saving them lose the good ones.

Losses are looked at where they are read anyway, norms where they clip, weights before they are
saved: none of it waits for a GPU that nobody waits for yet.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pipeplan.runtime.interfaces import Observer
from pipeplan.runtime.parameters.extremes import extremes
from pipeplan.runtime.stages.stage import StageRunner


class FiniteGuard:
    """Remembers what was not finite first, and lets all ranks stop."""

    def __init__(self, stop: Callable[[], None], *, ignores: bool, skips: bool) -> None:
        """Nothing was found yet.

        Args:
            stop: lets all ranks stop.
            ignores: whether the user wants to train on.
            skips: whether loss scaling skips such steps: then a loss may be anything.
        """
        self._stop = stop
        self._ignores = ignores
        self._skips = skips
        self.found: tuple[int, str] | None = None
        """Step, from 0, and what in it is not finite."""

    def nonfinite(self, step: int, what: str) -> None:
        """Take note that `what` is not finite in `step`."""
        if self._ignores or self.found:
            return
        self.found = (step, what)
        self._stop()

    def loss(self, step: int, microbatch: int, stage: int, value: float) -> None:
        """Look at the loss that `stage` found."""
        if not self._skips and not math.isfinite(value):
            self.nonfinite(step, f"the loss of micro-batch {microbatch} (stage {stage})")

    def weights(self, step: int, stages: Iterable[StageRunner]) -> None:
        """Look at the weights that would be saved after `step`."""
        if self._ignores or self.found:
            return
        for stage in stages:
            for parameter, name in stage.names.items():
                if not all(end.isfinite() for end in extremes(parameter.detach())):
                    self.nonfinite(step, f"the weight {name!r} (stage {stage.spec.index})")
                    return


@dataclass(frozen=True, slots=True)
class GuardedObserver(Observer):
    """Passes everything on, and shows each loss to the guard."""

    observer: Observer
    guard: FiniteGuard
    microbatches: int
    last: int
    """The last stage."""

    def loss(self, microbatch: int, value: float) -> None:
        """See `Observer`."""
        self.observer.loss(microbatch, value)
        self.guard.loss(microbatch // self.microbatches, microbatch, self.last, value)

    def backward(self, microbatch: int, end_ns: int) -> None:
        """See `Observer`."""
        self.observer.backward(microbatch, end_ns)

    def updated(self, stage: int, step: int) -> None:
        """See `Observer`."""
        self.observer.updated(stage, step)

    def stepped(self, step: int, norm: float, rates: tuple[float, ...]) -> None:
        """See `Observer`."""
        self.observer.stepped(step, norm, rates)


def first_of(found: Iterable[tuple[int, str] | None]) -> str:
    """What is wrong first, of what each rank found; empty if nothing is."""
    wrong = sorted(each for each in found if each)
    return f"step {wrong[0][0] + 1}: {wrong[0][1]} is not finite" if wrong else ""
