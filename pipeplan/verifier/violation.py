"""What a broken rule looks like: its name, the place, both numbers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Rule(StrEnum):
    """Names of the rules in the order of judgement (docs/reference/model.md, section 6)."""

    STAGES = "stages"
    OPS = "ops"
    TIED = "tied"
    DURATIONS = "durations"
    SHIFTS = "shifts"
    PRECEDENCE = "precedence"
    GPU = "gpu"
    LINK = "link"
    FIFO = "fifo"
    VERSIONS = "versions"
    MEMORY = "memory"
    BUDGET = "budget"
    HOST = "host"
    STEP = "step"
    BOUNDS = "bounds"
    DIGESTS = "digests"


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken rule: `where` is the place in the plan or period, `message` has the numbers."""

    rule: Rule
    where: str
    message: str

    def __str__(self) -> str:
        return f"{self.rule}, {self.where}: {self.message}"
