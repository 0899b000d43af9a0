"""What only the page of a run shows: operations that were late, durations, training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeplan.report.page.data import Cell, Column, DataTable

MOST_DELAYS = 25
"""So many operations are listed: those that fell behind most."""


@dataclass(frozen=True, slots=True)
class Delay:
    """How an operation came to start when it did, in ns."""

    label: str
    gpu: str
    planned_ns: int
    """Start, since the step began; so is the next."""
    measured_ns: int
    before: str
    """The operation before it on its GPU."""
    longer_ns: int
    """What that one took longer than planned."""
    waited_ns: int
    waited_for: str | None
    """What on another GPU made the input."""
    between_ns: int
    """What the process did between the two, and did not wait for input."""
    gap_ns: int
    """Planned between the two."""

    @property
    def late_ns(self) -> int:
        """Behind the plan."""
        return self.measured_ns - self.planned_ns

    @property
    def added_ns(self) -> int:
        """What of it is new since the operation before."""
        return self.longer_ns + self.waited_ns + self.between_ns - self.gap_ns

    @property
    def why(self) -> str:
        """The largest part, in words."""
        source = f" for {self.waited_for}" if self.waited_for else ""
        parts = {
            f"{self.before} took longer": self.longer_ns,
            f"waited{source}": self.waited_ns,
            f"work between {self.before} and it": self.between_ns,
        }
        return max(parts, key=lambda name: parts[name])


@dataclass(frozen=True, slots=True)
class Delays:
    """The operations that fell behind the plan most."""

    delays: tuple[Delay, ...]
    title: str = "What was late, and why"
    note: str = (
        "What an operation is later than the one before it on its GPU: that one took longer than"
        " planned, it waited for its input, the process did something in between; less the gap"
        " that was planned."
    )

    def tables(self) -> Sequence[DataTable]:
        """The largest first."""
        columns = (
            Column("operation"),
            Column("GPU"),
            Column("fell behind by", "ns"),
            Column("because"),
            Column("planned start", "ns"),
            Column("late in all", "ns"),
            Column("longer before", "ns"),
            Column("waited", "ns"),
            Column("in between", "ns"),
            Column("planned gap", "ns"),
        )
        worst = sorted(self.delays, key=lambda each: -each.added_ns)[:MOST_DELAYS]
        rows = tuple(map(_delay_row, (each for each in worst if each.added_ns > 0)))
        return (DataTable("delays", self.title, columns, rows),)


def _delay_row(each: Delay) -> tuple[Cell, ...]:
    why = each.label, each.gpu, each.added_ns, each.why, each.planned_ns, each.late_ns
    return (*why, each.longer_ns, each.waited_ns, each.between_ns, each.gap_ns)


@dataclass(frozen=True, slots=True)
class Duration:
    """How long one kind of operation of a stage takes, in ns."""

    gpu: str
    operation: str
    count: int
    planned_ns: int
    mean_ns: float
    longest_ns: int


@dataclass(frozen=True, slots=True)
class Durations:
    """Operations of the step, planned and measured."""

    durations: tuple[Duration, ...]
    title: str = "Operations"
    note: str = "Of the step that is shown; waits for messages are left out."

    def tables(self) -> Sequence[DataTable]:
        """One row per stage and kind."""
        columns = (
            Column("operation"),
            Column("GPU"),
            Column("times", "count"),
            Column("planned", "ns"),
            Column("measured, mean", "ns"),
            Column("error", "change"),
            Column("longest", "ns"),
        )
        rows = tuple(map(_duration_row, self.durations))
        return (DataTable("operations", self.title, columns, rows),)


def _duration_row(each: Duration) -> tuple[Cell, ...]:
    error = (each.mean_ns - each.planned_ns) / each.planned_ns if each.planned_ns else None
    measured = each.planned_ns, each.mean_ns, error, each.longest_ns
    return each.operation, each.gpu, each.count, *measured


@dataclass(frozen=True, slots=True)
class TrainedStep:
    """A line of metrics.jsonl; None where it does not tell."""

    step: int
    loss: float | None
    step_ns: int
    per_s: float | None
    """Samples, or what else the task counts."""
    norm: float | None = None
    """Of the gradients, where a run logs it."""


@dataclass(frozen=True, slots=True)
class TrainingSteps:
    """Loss, time and throughput over the steps."""

    steps: tuple[TrainedStep, ...]
    title: str = "Training"
    note: str = ""

    def tables(self) -> Sequence[DataTable]:
        """One row per step."""
        columns = (
            Column("step", "count"),
            Column("loss", "number"),
            Column("gradient norm", "number"),
            Column("time", "ns"),
            Column("throughput", "rate"),
        )
        rows = tuple(
            (each.step, each.loss, each.norm, each.step_ns, each.per_s) for each in self.steps
        )
        return (DataTable("training", self.title, columns, rows).filled(),)


@dataclass(frozen=True, slots=True)
class ValidatedStep:
    """A line of validation.jsonl; None for what was not finite."""

    step: int
    values: Mapping[str, float | None]
    """Of the loss and each metric, by name."""


@dataclass(frozen=True, slots=True)
class Validations:
    """Loss and metrics on the validation data."""

    steps: tuple[ValidatedStep, ...]
    title: str = "Validation"
    note: str = "Of the newest weights after each step."

    @property
    def names(self) -> list[str]:
        """Of all that any validation tells."""
        return list(dict.fromkeys(name for each in self.steps for name in each.values))

    def tables(self) -> Sequence[DataTable]:
        """One row per validation."""
        names = self.names
        columns = (Column("step", "count"), *(Column(name, "number") for name in names))
        rows = tuple((each.step, *map(each.values.get, names)) for each in self.steps)
        return (DataTable("validation", self.title, columns, rows),)
