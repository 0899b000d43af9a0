"""The memory table against what the plan's model counts: rules `memory` and `budget`."""

from __future__ import annotations

from collections.abc import Iterator

from pipeplan.plan import Plan
from pipeplan.verifier import memory_exact, memory_paper
from pipeplan.verifier.ledger import Terms
from pipeplan.verifier.timetable import Timetable
from pipeplan.verifier.violation import Rule, Violation


def peaks(table: Timetable) -> tuple[Terms, ...]:
    """The terms at each GPU's first peak, in the plan's memory model."""
    if table.plan.memory_model == "exact":
        return memory_exact.peaks(table)
    return memory_paper.peaks(table)


def rows(plan: Plan, computed: tuple[Terms, ...]) -> Iterator[Violation]:
    """One row per GPU in order, equal to what is computed; the budget is the GPU's memory."""
    got = [row.gpu for row in plan.memory]
    need = list(range(len(plan.cluster.gpus)))
    if got != need:
        yield Violation(
            Rule.MEMORY,
            "memory",
            f"got {len(got)} rows of GPUs {_short(got)}, need {len(need)}, one of each in order",
        )
        return
    for row, terms in zip(plan.memory, computed, strict=True):
        expected = {f"{name}_bytes": value for name, value in terms._asdict().items()}
        expected["peak_bytes"] = terms.total
        expected["budget_bytes"] = plan.cluster.gpus[row.gpu].memory_bytes
        for field, value in expected.items():
            if getattr(row, field) != value:
                yield Violation(
                    Rule.MEMORY,
                    f"GPU {row.gpu}, {field}",
                    f"got {getattr(row, field)}, need {value}",
                )


def _short(values: list[int]) -> str:
    return f"{values[:8]}" if len(values) <= 8 else f"{values[:8]}..."


def budget(plan: Plan, computed: tuple[Terms, ...]) -> Iterator[Violation]:
    """No peak exceeds its GPU's memory."""
    for gpu, terms in enumerate(computed):
        limit = plan.cluster.gpus[gpu].memory_bytes
        if terms.total > limit:
            yield Violation(
                Rule.BUDGET,
                f"GPU {gpu}",
                f"got peak {terms.total} bytes, need at most {limit}: {terms.total - limit} over"
                f" (states {terms.states}, saved {terms.saved}, working {terms.working},"
                f" direct {terms.direct}, messages {terms.message})",
            )
