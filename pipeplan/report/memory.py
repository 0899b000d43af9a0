"""Where every byte of a GPU is: the report of a plan, and of a run beside its plan."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeplan.errors import PipeplanError
from pipeplan.lowering import lower
from pipeplan.memory_terms import GpuTerms, Instant, MemoryReport, Purpose, Room, StagePlace
from pipeplan.plan import Plan
from pipeplan.program import Pattern
from pipeplan.report.memory_advice import lower_peak
from pipeplan.simulator import simulate
from pipeplan.units import format_bytes

FILE = "memory.json"
"""The report in the folder of a run."""


def planned_memory(plan: Plan, pattern: Pattern | None = None) -> MemoryReport | None:
    """The report of `plan`; None where it cannot be replayed."""
    try:
        simulation = simulate(plan, lower(plan) if pattern is None else pattern)
    except PipeplanError:
        return None
    predicted = tuple(simulation.terms(gpu) for gpu in range(len(plan.cluster.gpus)))
    more = dict(_more_than_terms(plan, predicted))
    return MemoryReport(
        plan_digest=plan.digest(),
        semantics=plan.semantics,
        memory_model=plan.memory_model,
        gpus=tuple(
            Room(
                name=name,
                memory_bytes=gpu.memory_bytes,
                reserve_bytes=gpu.reserve_bytes,
                plan_peak_bytes=more.get(index),
                lower=lower_peak(plan, memory),
            )
            for index, (name, gpu, memory) in enumerate(
                zip(plan.cluster.labels, plan.cluster.gpus, predicted, strict=True)
            )
        ),
        stages=tuple(StagePlace(gpu=stage.gpu, layers=stage.layers) for stage in plan.stages),
        predicted=predicted,
    )


def _more_than_terms(plan: Plan, predicted: Sequence[GpuTerms]) -> Iterator[tuple[int, int]]:
    """GPUs of which the plan says more, as it may where tensors ride along, and what it says."""
    if any(layer.riding for layer in plan.chain.layers):
        for row in plan.memory:
            if row.peak_bytes > predicted[row.gpu].peak.size:
                yield row.gpu, row.peak_bytes


def memory_of_run(
    plan: Plan, pattern: Pattern, found: Sequence[tuple[tuple[int, GpuTerms] | None, int | None]]
) -> MemoryReport | None:
    """The report of `plan` beside what its ranks measured, where any did.

    Args:
        plan: what was run.
        pattern: the lowered plan.
        found: per rank what was measured, and what its allocator kept; as for `with_measured`.

    Returns:
        None where the plan cannot be replayed.
    """
    report = planned_memory(plan, pattern)
    if report is None or not any(measured for measured, _ in found):
        return report
    return with_measured(report, [each for each, _ in found], [kept for _, kept in found])


def with_measured(
    report: MemoryReport,
    found: Sequence[tuple[int, GpuTerms] | None],
    reserves: Sequence[int | None],
) -> MemoryReport:
    """`report` beside what a run measured.

    Args:
        report: of its plan.
        found: per rank the step, 1 being the run's first, and what was measured of it.
        reserves: per rank, what its allocator kept beyond tensors; None where it has none.
    """
    steps = [each[0] for each in found if each is not None and each[1].peak.action]
    rooms = zip(report.gpus, reserves, strict=True)
    fields = {
        "measured": tuple(None if each is None else each[1] for each in found),
        "step": max(steps, default=None),
        "gpus": tuple(
            room.model_copy(update={"measured_reserve_bytes": kept}) for room, kept in rooms
        ),
    }
    return MemoryReport.model_validate({**dict(report), **fields})


def read_memory(folder: str | Path) -> MemoryReport | None:
    """The report in the folder of a run; None where that has none (of an older version, say)."""
    file = Path(folder) / FILE
    return MemoryReport.read(file) if file.is_file() else None


def has_memory_alone(folder: str | Path) -> bool:
    """Whether the folder is no launch's but has the report that a `Pipeline` gave a script."""
    place = Path(folder)
    return (place / FILE).is_file() and not (place / "run.json").is_file()


@dataclass(frozen=True, slots=True)
class Compared:
    """One term of one stage at the peak of its GPU; bytes, 0 where one side has none of it."""

    gpu: int
    stage: int
    purpose: Purpose
    predicted: int
    measured: int | None
    """None where the run, or the plan alone, measured nothing."""
    parts: str
    """`3 x 2.00 MiB`, of the prediction."""


def measured_of(report: MemoryReport, gpu: int) -> GpuTerms | None:
    """What was measured of one GPU."""
    return report.measured[gpu] if report.measured else None


def slack_bytes(report: MemoryReport, gpu: int) -> int:
    """What the budget of one GPU left, as measured; where nothing was, as predicted."""
    found = measured_of(report, gpu) or report.predicted[gpu]
    return report.gpus[gpu].budget_bytes - found.peak.size


def over_budget(report: MemoryReport) -> list[str]:
    """A line for each GPU that held more than its budget in the run."""
    return [
        f"{room.name} held {format_bytes(-slack)} more than its budget of"
        f" {format_bytes(room.budget_bytes)}: the model is not what was profiled, or its profile"
        " counts less than this machine keeps. Profile and plan again, or plan with a larger"
        " --reserve."
        for gpu, room in enumerate(report.gpus)
        if measured_of(report, gpu) and (slack := slack_bytes(report, gpu)) < 0
    ]


def above_terms(report: MemoryReport) -> list[str]:
    """A line for each GPU of which the plan says more than its terms."""
    return [
        f"{room.name}: the plan's peak is {format_bytes(room.plan_peak_bytes)}, because it counts"
        " a tensor that several layers take as it is (a skip) for each of them; these terms count"
        " it once"
        for room in report.gpus
        if room.plan_peak_bytes is not None
    ]


def compared(report: MemoryReport, gpu: int) -> list[Compared]:
    """Every term at the peak, predicted and measured, stage by stage.

    Where the measured peak is reached more than once, the instant of the predicted kind counts.
    """
    told, found = report.predicted[gpu].peak, measured_of(report, gpu)
    sizes = told.by_purpose()
    real = found.like(told).by_purpose() if found else {}
    order = {purpose: place for place, purpose in enumerate(Purpose)}
    keys = sorted({*sizes, *real}, key=lambda key: (key[0], order[key[1]]))
    return [
        Compared(
            gpu,
            stage,
            purpose,
            sizes.get((stage, purpose), 0),
            real.get((stage, purpose), 0) if found else None,
            _parts(told, stage, purpose),
        )
        for stage, purpose in keys
    ]


def _parts(instant: Instant, stage: int, purpose: Purpose) -> str:
    mine = (each for each in instant.terms if (each.stage, each.purpose) == (stage, purpose))
    return "+".join(f"{each.count}x{each.each_bytes}" for each in mine)


def measured_terms(report: MemoryReport) -> Iterator[dict[str, object]]:
    """Every term that a run measured as plain data, beside its prediction."""
    for gpu in range(len(report.gpus)):
        found = measured_of(report, gpu)
        if found is None:
            continue
        told = report.predicted[gpu].peak
        where = f"{report.semantics}: rank {gpu}"
        yield _term(f"{where}, peak in step {report.step}", told.size, found.peak.size, gpu)
        for each in compared(report, gpu):
            name = f"{where}, stage {each.stage}, {each.purpose}"
            more = {"stage": each.stage, "term": str(each.purpose)}
            yield _term(name, each.predicted, each.measured or 0, gpu) | more


def _term(name: str, predicted: int, measured: int, rank: int) -> dict[str, object]:
    return {
        "name": name,
        "unit": "bytes",
        "predicted": predicted,
        "measured": measured,
        "error": _error(predicted, measured),
        "rank": rank,
    }


def _error(predicted: int, measured: int) -> float | None:
    """(measured - predicted) / predicted; None where something came from nothing."""
    if not predicted:
        return None if measured else 0.0
    return (measured - predicted) / predicted


_FIELDS = ("gpu", "name", "stage", "term", "predicted_bytes", "predicted_parts", "measured_bytes")


def as_csv(report: MemoryReport) -> str:
    """The terms of every GPU at its peak, then what they add up to and the room for it."""
    file = io.StringIO()
    table = csv.writer(file, lineterminator="\n")
    table.writerow(_FIELDS)
    for gpu in range(len(report.gpus)):
        table.writerows(_rows(report, gpu))
    return file.getvalue()


def _rows(report: MemoryReport, gpu: int) -> Iterator[Iterable[object]]:
    room, told, found = report.gpus[gpu], report.predicted[gpu], measured_of(report, gpu)
    for each in compared(report, gpu):
        measured = "" if each.measured is None else each.measured
        yield gpu, room.name, each.stage, each.purpose, each.predicted, each.parts, measured
    peak, host = ("", "") if found is None else (found.peak.size, found.host_size)
    kept = "" if room.measured_reserve_bytes is None else room.measured_reserve_bytes
    budget = room.budget_bytes
    left = budget - found.peak.size if found else ""
    for name, predicted, parts, measured in (
        ("peak", told.peak.size, told.peak.action, peak),
        ("budget", budget, "", budget if found else ""),
        ("slack", budget - told.peak.size, "", left),
        ("reserve", room.reserve_bytes, "", kept),
        ("on_host", told.host_size, "", host),
    ):
        yield gpu, room.name, "", name, predicted, parts, measured
