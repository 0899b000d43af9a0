"""What the rank with the losses measures of a step."""

from __future__ import annotations

import pytest

from pipeplan.callbacks import Callback, StepMetrics
from pipeplan.launch import progress as measured
from pipeplan.launch.progress import Progress
from pipeplan.plan import Semantics
from tests import launch_task

UPDATE = 7


class Heard(Callback):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.steps: list[StepMetrics] = []

    def step(self, metrics: StepMetrics) -> None:
        """Of one step."""
        self.steps.append(metrics)


@pytest.mark.parametrize(("semantics", "late"), [("flush", False), ("2bw", False), ("2bw", True)])
def test_a_step_lasts_from_end_to_end(
    semantics: Semantics, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under flush with its update; under 2bw an update may come with those of later steps.

    All steps but the first take as long: the last one, too, whose update is not the next's.
    """
    clock = iter([0]) if semantics == "2bw" else iter(range(0, 10**6, 100 + UPDATE))
    monkeypatch.setattr(measured, "now_ns", lambda: next(clock))
    plan, heard = launch_task.plan(1, semantics), Heard()
    progress = Progress(plan, units_per_microbatch=3, follower=heard)
    m, steps, last = plan.microbatches, 4, len(plan.stages) - 1
    for step in range(steps):
        for number in range(step * m, (step + 1) * m):
            progress.loss(number, 1.0)
            progress.backward(number, 100 * (step + 1) - m + number % m)
        if not late:
            progress.updated(last, step)
    for step in range(steps):
        if late:
            progress.updated(last, step)
        progress.stepped(step, 1.0, (0.1,))
    took = 100 + (UPDATE if semantics == "flush" else 0)
    assert [each.step_ns for each in heard.steps[1:]] == [took] * (steps - 1)
    assert heard.steps[-1].units_per_s == pytest.approx(3 * m / (took / 1e9))
    assert progress.measured().best_step_ns == took
