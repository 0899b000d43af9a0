"""What the solver answers: the best plan found, what it claims of it, and what it proved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from pipeplan.ilp.incumbent import BoundName
from pipeplan.ilp.memory import in_flight, in_flight_until_update, memory_rows
from pipeplan.ilp.objective import step_ns
from pipeplan.ilp.recompute.search_result import SearchResult
from pipeplan.ilp.schedule import to_ops
from pipeplan.plan import Improvement, MemoryRow, Op, Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """The best schedule found; times in ns, sizes in bytes.

    Attributes:
        stages: In layers of the problem's chain, with what each recomputes and offloads.
        k: Micro-batches per period.
        period_ns: Of k micro-batches.
        microbatches: Per optimizer step: as asked for, or raised to what (R6) needs.
        step_ns: (T5) of that many micro-batches.
        ops: The periodic schedule (T4).
        memory: Each GPU's bytes by (M1)-(M8), as the solver counts them.
        in_flight: Micro-batches in flight of each stage of the schedule that was solved, in which
            a recomputed run of layers is one layer.
        bounds: Proven lower bounds in ns per micro-batch, by what they are valid for.
        gap: (period per micro-batch - bound) / bound; None where nothing is proven.
        gap_bound: The bound that the gap uses.
        optimal: Whether the period per micro-batch equals that bound.
        contiguous: The best contiguous plan's period per micro-batch in ns, if one was found.
        seconds: Wall time of the search.
        notes: What users should know of the search.
        history: Every better plan and every higher bound, in the order they were found.
    """

    stages: tuple[Stage, ...]
    k: int
    period_ns: int
    microbatches: int
    step_ns: int
    ops: tuple[Op, ...]
    memory: tuple[MemoryRow, ...]
    in_flight: tuple[int, ...]
    bounds: Mapping[BoundName, Fraction]
    gap: float | None
    gap_bound: BoundName
    optimal: bool
    contiguous: Fraction | None
    seconds: float
    notes: tuple[str, ...]
    history: tuple[Improvement, ...]

    @property
    def per_microbatch(self) -> Fraction:
        """Nanoseconds of the period that one micro-batch takes."""
        return Fraction(self.period_ns, self.k)


def solution(solved: SearchResult, history: tuple[Improvement, ...]) -> Solution:
    """The answer of a search that found a plan."""
    state = solved.state
    costs, best, microbatches = state.costs, state.best, state.options.microbatches
    assert best is not None
    if costs.semantics == "2bw" and not state.options.limit_versions:
        microbatches = max(microbatches, max(in_flight_until_update(costs, best)) - 1)
    return Solution(
        stages=solved.stages,
        k=best.k,
        period_ns=best.period,
        microbatches=microbatches,
        step_ns=step_ns(costs, best, microbatches),
        ops=to_ops(costs, best),
        memory=memory_rows(state.counted, best, claims=True),
        in_flight=in_flight(costs, best),
        bounds=dict(state.bounds),
        gap=state.gap,
        gap_bound=state.gap_bound,
        optimal=state.bound == best.per_microbatch,
        contiguous=state.contiguous,
        seconds=state.options.clock.wall_s,
        notes=tuple(state.notes),
        history=history,
    )
