"""What a page shows, section by section: plain data, before anything is drawn.

The page, its JSON and its CSV are made of these values alone. Times are in ns, sizes in bytes,
shares are of 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from pipeplan.report.page.data import Cell, Column, DataTable, Unit

Source = Literal["planned", "measured"]

CAUSES = (
    "A GPU idles while its next input is computed on another GPU (other stages), while it is on"
    " its way (messages), or though it is there (order: the plan's order, room in memory, and in a"
    " run what the process does in between). Before the first and behind the last operation of a"
    " step it idles for fill and drain."
)


class Section(Protocol):
    """A part of a page."""

    @property
    def title(self) -> str:
        """Its heading."""

    @property
    def note(self) -> str:
        """What a reader must know to read it."""

    def tables(self) -> Sequence[DataTable]:
        """All its data."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One quantity: planned, and measured where a run told."""

    name: str
    unit: Unit
    planned: Cell
    measured: Cell = None
    remark: str = ""

    @property
    def error(self) -> float | None:
        """(measured - planned) / planned; None where there is no such number."""
        planned, measured = self.planned, self.measured
        if not isinstance(planned, int | float) or not isinstance(measured, int | float):
            return None
        return (measured - planned) / planned if planned else None


@dataclass(frozen=True, slots=True)
class KeyFigures:
    """What a plan promises and a run did, in numbers."""

    figures: tuple[Figure, ...]
    title: str = "Key figures"
    note: str = ""
    name: str = "figures"
    """A word for files."""

    def tables(self) -> Sequence[DataTable]:
        """One row per quantity."""
        columns = (
            Column("quantity"),
            Column("planned", "number"),
            Column("measured", "number"),
            Column("error", "change"),
            Column("remark"),
        )
        rows = tuple(
            (each.name, each.planned, each.measured, each.error, each.remark or None)
            for each in self.figures
        )
        units = tuple(each.unit for each in self.figures)
        return (DataTable(self.name, self.title, columns, rows, units).filled(),)


@dataclass(frozen=True, slots=True)
class Bar:
    """An operation or a transfer on its lane; a period's bar may cross the ends of it."""

    label: str
    """`0F3`: stage, letter, micro-batch."""
    kind: str
    stage: int
    microbatch: int
    start_ns: int
    end_ns: int
    waited_ns: int = 0
    """Before `start_ns`: how long its GPU waited for the input. Only of measured ones."""


@dataclass(frozen=True, slots=True)
class Lane:
    """A GPU, a link or a GPU's way to the host."""

    name: str
    source: Source
    bars: tuple[Bar, ...]


@dataclass(frozen=True, slots=True)
class Timeline:
    """What happens where and when, in one period or one step."""

    title: str
    length_ns: int
    """Bars lie between 0 and this."""
    lanes: tuple[Lane, ...]
    note: str = ""

    def tables(self) -> Sequence[DataTable]:
        """One row per bar."""
        where = Column("place"), Column("source"), Column("operation")
        times = Column("start", "ns"), Column("end", "ns"), Column("waited", "ns")
        rows = tuple(
            (lane.name, lane.source, bar.label, bar.start_ns, bar.end_ns, bar.waited_ns)
            for lane in self.lanes
            for bar in lane.bars
        )
        return (DataTable("timeline", self.title, (*where, *times), rows),)


@dataclass(frozen=True, slots=True)
class Idle:
    """How a GPU spends a window of time; the parts add up to `window_ns`."""

    gpu: str
    source: Source
    window_ns: int
    parts: tuple[tuple[str, int], ...]
    """Work first, then each cause of idle time, in ns."""


@dataclass(frozen=True, slots=True)
class IdleTime:
    """Why GPUs compute nothing, as `idle` says."""

    gpus: tuple[Idle, ...]
    title: str = "Where the time goes"
    note: str = CAUSES

    def tables(self) -> Sequence[DataTable]:
        """One row per GPU and source, one column per part."""
        names = [name for name, _ in self.gpus[0].parts] if self.gpus else []
        columns = (
            Column("GPU"),
            Column("source"),
            *(Column(name, "ns") for name in names),
            Column("idle", "share"),
        )
        return (DataTable("idle", self.title, columns, tuple(map(_idle_row, self.gpus))),)


def _idle_row(idle: Idle) -> tuple[Cell, ...]:
    times = [time for _, time in idle.parts]
    return idle.gpu, idle.source, *times, 1 - times[0] / max(1, idle.window_ns)


@dataclass(frozen=True, slots=True)
class MemorySeries:
    """Bytes of one GPU over time, term by term."""

    gpu: str
    source: Source
    budget_bytes: int
    peak_bytes: int
    peak_at: str
    """The action during which it is reached."""
    length_ns: int
    times_ns: tuple[int, ...]
    terms: tuple[tuple[str, tuple[int, ...]], ...]
    """By name; bytes from each time on."""


@dataclass(frozen=True, slots=True)
class TermRow:
    """One term of one stage at the peak of its GPU, in bytes."""

    gpu: str
    stage: int
    term: str
    planned: int
    measured: int | None


@dataclass(frozen=True, slots=True)
class MemoryOverTime:
    """Where the bytes of each GPU are."""

    series: tuple[MemorySeries, ...]
    rows: tuple[TermRow, ...]
    title: str = "Memory"
    note: str = ""

    def tables(self) -> Sequence[DataTable]:
        """The peaks beside the budgets, then their terms."""
        peaks = tuple(map(_peak_row, self.series))
        terms = tuple(
            (row.gpu, row.stage, row.term, row.planned, row.measured) for row in self.rows
        )
        sizes = (Column("peak", "bytes"), Column("budget", "bytes"), Column("slack", "bytes"))
        head = Column("GPU"), Column("stage", "count"), Column("term")
        both = Column("planned", "bytes"), Column("measured", "bytes")
        places = Column("GPU"), Column("source")
        return (
            DataTable("peaks", "Peaks", (*places, *sizes, Column("at")), peaks),
            DataTable("terms", "Terms at the peak", (*head, *both), terms).filled(),
        )


def _peak_row(series: MemorySeries) -> tuple[Cell, ...]:
    slack = series.budget_bytes - series.peak_bytes
    sizes = series.peak_bytes, series.budget_bytes, slack
    return series.gpu, series.source, *sizes, series.peak_at or "-"


@dataclass(frozen=True, slots=True)
class StageRow:
    """A stage of the plan."""

    stage: int
    gpu: str
    layers: str
    forward_ns: int
    backward_ns: int
    away: str | None
    """What it recomputes or offloads."""


@dataclass(frozen=True, slots=True)
class Stages:
    """Which layers are where."""

    stages: tuple[StageRow, ...]
    title: str = "Stages"
    note: str = ""

    def tables(self) -> Sequence[DataTable]:
        """One row per stage."""
        columns = (
            Column("stage", "count"),
            Column("GPU"),
            Column("layers"),
            Column("forward", "ns"),
            Column("backward", "ns"),
            Column("recomputed or offloaded"),
        )
        rows = tuple(
            (each.stage, each.gpu, each.layers, each.forward_ns, each.backward_ns, each.away)
            for each in self.stages
        )
        return (DataTable("stages", self.title, columns, rows).filled(),)


@dataclass(frozen=True, slots=True)
class SearchStep:
    """A better plan or a higher bound; ns per micro-batch."""

    work_s: float
    strategy: str
    period_ns: float | None
    bound_ns: float | None


@dataclass(frozen=True, slots=True)
class SearchProgress:
    """How the solver came to the plan."""

    steps: tuple[SearchStep, ...]
    title: str = "The search"
    note: str = ""

    def tables(self) -> Sequence[DataTable]:
        """One row per improvement."""
        when = Column("after", "seconds"), Column("strategy or prover")
        columns = (*when, Column("period", "ns"), Column("bound", "ns"))
        rows = tuple(
            (each.work_s, each.strategy, each.period_ns, each.bound_ns) for each in self.steps
        )
        return (DataTable("search", self.title, columns, rows),)


@dataclass(frozen=True, slots=True)
class Page:
    """Everything that one page shows."""

    title: str
    subtitle: str
    sections: tuple[Section, ...]
    facts: tuple[str, ...] = ()
    """Lines below the title."""
