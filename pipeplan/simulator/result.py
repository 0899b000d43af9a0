"""What a replay reports."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal

from pipeplan.errors import InvalidPlanError
from pipeplan.memory_terms import GpuTerms
from pipeplan.plan import MemoryRow, OpKind
from pipeplan.simulator.engine import Times

Clock = Literal["plan", "eager"]


@dataclass(frozen=True, slots=True)
class Discrepancy:
    """One thing that the replay found different from what the plan says."""

    what: str
    """A word for the kind, such as `order`, `link`, `memory`."""
    where: str
    message: str

    def __str__(self) -> str:
        return f"{self.what}, {self.where}: {self.message}"


@dataclass(frozen=True, slots=True)
class Span:
    """A compute on a GPU or a transfer on a link or to the host, from `start_ns` to `end_ns`."""

    kind: OpKind
    stage: int
    microbatch: int
    place: int | tuple[int, int]
    """(from, to) of a SEND; GPU of a compute, and of OFFLOAD and PREFETCH, which take its way."""
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class Peak:
    """The first event after which a GPU holds the most bytes."""

    time_ns: int
    event: str
    """`2F0`, or `end of 2F0`; empty where nothing happens on the GPU."""


@dataclass(frozen=True, slots=True)
class Simulation:
    """One replay from empty to empty. Tuples have one entry per GPU unless stated."""

    clock: Clock
    microbatches: int
    period_ns: Fraction | None
    """Measured, of k micro-batches, between fill and drain; None if the run is too short."""
    makespan_ns: int
    """From the first start of an op to the last end, transfers and updates included."""
    step_ns: int | None
    """One optimizer step: (T5) on the plan clock; as measured on the eager clock with updates."""
    in_flight: tuple[int, ...]
    """Per stage, the most micro-batches between start of F and end of B (or I)."""
    memory: tuple[MemoryRow, ...]
    """The terms at the peak."""
    peaks: tuple[Peak, ...]
    fill_peak_bytes: tuple[int, ...]
    """Before the first micro-batch has left; states included in all three."""
    steady_peak_bytes: tuple[int, ...]
    drain_peak_bytes: tuple[int, ...]
    """After the last micro-batch has entered; without the update that follows a flush."""
    bubble: tuple[float, ...]
    """Share of the steady time in which the GPU computes nothing."""
    left_bytes: tuple[int, ...]
    """Bytes beside the states that nothing has given back when the program ends."""
    discrepancies: tuple[Discrepancy, ...] = ()
    times: Times = field(repr=False, kw_only=True)
    levels: Callable[[int], Iterator[tuple[int, int]]] = field(
        repr=False, compare=False, kw_only=True
    )
    """By GPU: (time in ns, bytes it holds from then on, states included), event by event."""
    terms: Callable[[int], GpuTerms] = field(repr=False, compare=False, kw_only=True)
    """By GPU: its bytes term by term, at the worst instants and over one period."""

    def spans(self) -> Iterator[Span]:
        """Every compute and transfer of the run, op by op, micro-batches in order."""
        for kind, stage, place, microbatch, start, end in self.times.rows():
            yield Span(kind, stage, microbatch, place, start, end)


def refuse_invalid(found: list[Discrepancy], clock: str) -> None:
    """Raises InvalidPlanError listing `found`, if anything was."""
    if not found:
        return
    shown = [f"- {each}" for each in found[:20]]
    if len(found) > 20:
        shown.append(f"- and {len(found) - 20} more")
    text = "\n".join(shown)
    raise InvalidPlanError(f"replay on the {clock} clock: differs from the plan:\n{text}", found)
