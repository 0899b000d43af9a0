"""What the page of a comparison shows: schedules beside each other, on one cluster or more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeplan.report.page.data import Cell, Column, DataTable


@dataclass(frozen=True, slots=True)
class JudgedSchedule:
    """A schedule on one cluster."""

    name: str
    semantics: str
    period_ns: float
    """Per micro-batch."""
    per_s: float
    """Samples."""
    parts: tuple[tuple[str, float], ...]
    """Shares of the GPUs' time: work first, then each cause of idle time."""
    peak_bytes: int
    """Of the fullest GPU."""
    over_bytes: int
    """Beyond the budget of some GPU; 0 or less where it fits."""


@dataclass(frozen=True, slots=True)
class Schedules:
    """All schedules on one cluster."""

    name: str
    """A word for files."""
    title: str
    schedules: tuple[JudgedSchedule, ...]
    absent: tuple[tuple[str, str], ...] = ()
    """Schedules that are not there, and why."""
    note: str = ""

    def tables(self) -> Sequence[DataTable]:
        """One row per schedule, and per missing one."""
        causes = [name for name, _ in self.schedules[0].parts[1:]] if self.schedules else []
        columns = (
            Column("schedule"),
            Column("mode"),
            Column("period per micro-batch", "ns"),
            Column("samples", "rate"),
            Column("idle", "share"),
            *(Column(cause, "share") for cause in causes),
            Column("largest peak", "bytes"),
            Column("over budget by", "bytes"),
        )
        rows = tuple(map(_schedule_row, self.schedules))
        judged = DataTable(self.name, self.title, columns, rows).filled()
        heads = Column("schedule"), Column("reason")
        missing = DataTable(f"{self.name}-left-out", "Left out", heads, self.absent)
        return (judged, missing) if self.absent else (judged,)


def _schedule_row(each: JudgedSchedule) -> tuple[Cell, ...]:
    shares = [share for _, share in each.parts]
    over = each.over_bytes if each.over_bytes > 0 else None
    times = each.period_ns, each.per_s, 1 - shares[0], *shares[1:]
    return each.name, each.semantics, *times, each.peak_bytes, over


@dataclass(frozen=True, slots=True)
class PeriodOverMemory:
    """Periods per micro-batch over memory per GPU, for one number of GPUs."""

    name: str
    title: str
    points: tuple[tuple[str, tuple[tuple[int, float], ...]], ...]
    """(bytes per GPU, ns) of each kind of plan."""
    bound: tuple[tuple[int, float], ...]
    """Proven for every plan of as much memory or less."""
    note: str = ""

    def tables(self) -> Sequence[DataTable]:
        """One row per point."""
        columns = Column("kind"), Column("memory", "bytes"), Column("period", "ns")
        kinds = (*self.points, ("proven bound", self.bound))
        rows = tuple((kind, *point) for kind, points in kinds for point in points)
        return (DataTable(self.name, self.title, columns, rows),)
