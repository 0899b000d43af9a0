"""The memory table against what the plan's model counts: rules `memory`, `budget`, `host`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipeplan.plan import Plan
from pipeplan.verifier import memory_exact, memory_paper
from pipeplan.verifier.ledger import Terms
from pipeplan.verifier.offload import host, host_bytes
from pipeplan.verifier.timetable import Timetable
from pipeplan.verifier.violation import Rule, Violation


def peaks(table: Timetable) -> tuple[Terms, ...]:
    """The terms at each GPU's first peak, in the plan's memory model."""
    if table.plan.memory_model == "exact":
        return memory_exact.peaks(table)
    return memory_paper.peaks(table)


def judge_memory(table: Timetable) -> Iterator[Violation]:
    """All that is said of bytes: needs order on each GPU."""
    plan, computed, away = table.plan, peaks(table), host_bytes(table)
    yield from check_rows(plan, computed, away)
    yield from budget(plan, computed)
    yield from host(plan, away)


def check_rows(plan: Plan, computed: Sequence[Terms], away: Sequence[int]) -> Iterator[Violation]:
    """One row per GPU in order, equal to what is computed, the budget too.

    Args:
        plan: whose table is judged.
        computed: per GPU, the terms at its first peak.
        away: per GPU, (H7).
    """
    got = [row.gpu for row in plan.memory]
    need = list(range(len(plan.cluster.gpus)))
    if got != need:
        yield Violation(
            Rule.MEMORY,
            "memory",
            f"got {len(got)} rows of GPUs {_short(got)}, need {len(need)}, one of each in order",
        )
        return
    for row, terms, size in zip(plan.memory, computed, away, strict=True):
        expected = {f"{name}_bytes": value for name, value in terms._asdict().items()}
        expected["peak_bytes"] = terms.total
        expected["budget_bytes"] = usable(plan, row.gpu)
        expected["host_bytes"] = size
        for field, value in expected.items():
            if getattr(row, field) != value:
                yield Violation(
                    Rule.MEMORY,
                    f"GPU {row.gpu}, {field}",
                    f"got {getattr(row, field)}, need {value}",
                )


def _short(values: list[int]) -> str:
    return f"{values[:8]}" if len(values) <= 8 else f"{values[:8]}..."


def budget(plan: Plan, computed: Sequence[Terms]) -> Iterator[Violation]:
    """No peak exceeds what its GPU has for plans."""
    for gpu, terms in enumerate(computed):
        limit = usable(plan, gpu)
        if terms.total > limit:
            yield Violation(
                Rule.BUDGET,
                f"GPU {gpu}",
                f"got peak {terms.total} bytes, need at most {limit}: {terms.total - limit} over"
                f" (states {terms.states}, saved {terms.saved}, working {terms.working},"
                f" direct {terms.direct}, messages {terms.message})",
            )


def usable(plan: Plan, gpu: int) -> int:
    """(M8): the GPU's memory without its reserve."""
    device = plan.cluster.gpus[gpu]
    return device.memory_bytes - device.reserve_bytes
