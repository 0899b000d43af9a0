"""What the rank with the losses measures of a step."""

from __future__ import annotations

import pytest

from pipeplan.callbacks import Callback, StepMetrics
from pipeplan.launch import progress as measured
from pipeplan.launch.progress import Progress
from pipeplan.plan import Semantics
from tests import launch_task

WORK, UPDATE, PAUSE = 100, 7, 1000


class Heard(Callback):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.steps: list[StepMetrics] = []

    def step(self, metrics: StepMetrics) -> None:
        """Of one step."""
        self.steps.append(metrics)


CASES: list[tuple[Semantics, bool]] = [
    ("flush", False),
    ("flush", True),
    ("2bw", False),
    ("2bw", True),
]


class Clock:
    """Time that the test moves."""

    def __init__(self) -> None:
        self.ns = 0

    def __call__(self) -> int:
        """Now."""
        return self.ns


@pytest.mark.parametrize(("semantics", "waits"), CASES)
def test_a_step_lasts_from_end_to_end(
    semantics: Semantics, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its update; under 2bw one that waits is made in a later step, the last two at the end.

    Behind a pause (a validation), too. The best step is none that lacks an update.
    """
    clock = Clock()
    monkeypatch.setattr(measured, "now_ns", clock)
    plan, heard = launch_task.plan(1, semantics), Heard()
    progress = Progress(plan, units_per_microbatch=3, waits=waits, follower=heard)
    m, steps, last = plan.microbatches, 10, len(plan.stages) - 1
    late: list[int] = []

    def update(waiting: int) -> None:
        while len(late) > waiting:
            clock.ns += UPDATE
            progress.updated(last, late[0])
            progress.stepped(late.pop(0), 1.0, (0.1,))

    for step in range(steps):
        for number in range(step * m, (step + 1) * m):
            clock.ns += WORK // m
            progress.loss(number, 1.0)
            progress.backward(number, clock.ns)
            if number == step * m:
                update(1)
        late.append(step)
        update(1 if waits and semantics == "2bw" else 0)
        if step == 5 or step == steps - 1:
            update(0)
            clock.ns += PAUSE
            progress.resume_clock()
    took = WORK // m * m + UPDATE
    lengths = [each.step_ns for each in heard.steps]
    if waits and semantics == "2bw":
        begun = [took - UPDATE, took - UPDATE]
        assert lengths == [*begun, *[took] * 4, *begun, *[took] * 2]
    else:
        assert lengths == [took] * steps
    assert heard.steps[-1].units_per_s == pytest.approx(3 * m / (took / 1e9))
    assert progress.measured().best_step_ns == took
