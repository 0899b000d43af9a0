"""What the search for a step plan compares: stages with a rule, and the step they give."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pipeplan.ilp.step.instance import StepInstance
from pipeplan.ilp.step.list_scheduler import DispatchingRule, StepTimes

EARLY: Final = 0.1
"""What the average end of a GPU counts beside the latest one."""


@dataclass(slots=True)
class Candidate:
    """Stages and a rule, and the step they give."""

    of: StepInstance
    rule: DispatchingRule
    times: StepTimes
    reserve: tuple[int, ...]
    """By GPU: bytes that exact counts of its schedules were beyond the scheduler's own."""
    beyond: int
    """Micro-batches of the step that `times` leaves out."""

    @property
    def cost(self) -> float:
        """The expected end of the whole step; among equals, GPUs that end early are better."""
        early = EARLY * sum(self.times.ends) / len(self.times.ends)
        return self.times.end + self.beyond * self.of.load_ns + early

    @property
    def due_to_stages(self) -> float:
        """The share of the time beyond the mean work that stages explain, whatever the rule."""
        of = self.of
        return (of.least_ns - of.mean_ns) / max(1.0, self.times.end - of.mean_ns)


@dataclass(slots=True)
class Contender:
    """Stages before local search, and the best rule so far."""

    of: StepInstance
    best: Candidate | None = None
