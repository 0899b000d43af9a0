"""The memory report as tables of at most 100 columns: each GPU first, then stage by stage."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from pipeplan.memory_terms import GpuTerms, MemoryReport, Purpose
from pipeplan.report.grid import short
from pipeplan.report.memory import above_terms, compared, measured_of, over_budget, slack_bytes
from pipeplan.report.remat import spans
from pipeplan.units import format_bytes

P = Purpose
MOST_GPUS = 16
"""So many GPUs are shown stage by stage: the fullest ones."""
_NAMES = {
    P.WEIGHTS: "weights",
    P.OLDER_WEIGHTS: "weights, older version",
    P.GRADIENTS: "gradients",
    P.WAITING_GRADIENTS: "gradients, next step's",
    P.OPTIMIZER: "optimizer state, buffers",
    P.UPDATE: "workspace of OPT",
    P.SAVED: "saved activations",
    P.SAVED_FOR_W: "saved for W",
    P.WORK_F: "workspace of F",
    P.WORK_B: "workspace of B",
    P.WORK_I: "workspace of I",
    P.WORK_W: "workspace of W",
    P.OTHER: "other",
}
_HANDED = {
    P.DIRECT_F: ("activations", 0, 1, "on this GPU"),
    P.SENT_F: ("activations", 0, 1, "sent"),
    P.RECEIVED_F: ("activations", -1, 0, "received"),
    P.DIRECT_B: ("gradients", 0, -1, "on this GPU"),
    P.SENT_B: ("gradients", 0, -1, "sent"),
    P.RECEIVED_B: ("gradients", 1, 0, "received"),
}
"""What passes, from and to which stage counted from the one it belongs to, and how."""


def purpose_name(purpose: Purpose, stage: int) -> str:
    """A term for people; what passes between stages with both of them."""
    if purpose in _NAMES:
        return _NAMES[purpose]
    what, source, target, how = _HANDED[purpose]
    return f"{what} {stage + source}>{stage + target}, {how}"


def memory_tables(report: MemoryReport) -> Iterator[Table | str]:
    """The GPUs, the stages of the fullest ones, and what would lower each GPU's peak."""
    yield gpu_table(report)
    ranked = sorted(range(len(report.gpus)), key=lambda gpu: -report.predicted[gpu].peak.size)
    shown = sorted(ranked[:MOST_GPUS])
    yield term_table(report, shown)
    if len(shown) < len(ranked):
        yield f"{len(ranked) - len(shown)} more GPUs, less full: --csv or --json has them all"
    yield from over_budget(report)
    yield from above_terms(report)
    for gpu in shown:
        if report.gpus[gpu].lower:
            yield f"{short(report.gpus[gpu].name)}: {report.gpus[gpu].lower}"


def gpu_table(report: MemoryReport) -> Table:
    """Peak, room and the two largest instants of every GPU."""
    ran = any(report.measured)
    title = "memory per GPU" + (f", measured in step {report.step}" if report.step else "")
    table = Table(title=title, title_justify="left", collapse_padding=True, padding=(0, 1, 0, 0))
    table.add_column("GPU", overflow="fold")
    names = ["peak", "measured", "error"] if ran else ["peak"]
    for name in (*names, "budget", "slack", "reserve", "on host"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("peak at", "next at"):
        table.add_column(name, overflow="fold")
    for gpu, room in enumerate(report.gpus):
        told, found = report.predicted[gpu], measured_of(report, gpu)
        sizes = [format_bytes(told.peak.size)]
        if ran:
            sizes += _beside(told.peak.size, found.peak.size if found else None)
        slack = slack_bytes(report, gpu)
        kept = room.measured_reserve_bytes
        reserve = format_bytes(room.reserve_bytes)
        table.add_row(
            short(room.name),
            *sizes,
            format_bytes(room.budget_bytes),
            Text(format_bytes(slack), style="red" if slack < 0 else ""),
            reserve if kept is None else f"{reserve}, took {format_bytes(kept)}",
            format_bytes(told.host_size) if told.host_size else "-",
            told.peak.action or "-",
            _following(told),
        )
    return table


def _following(memory: GpuTerms) -> str:
    following = memory.following
    return f"{following.action}, {format_bytes(following.size)}" if following else "-"


def _beside(predicted: int, measured: int | None) -> list[str]:
    if measured is None:
        return ["-", "-"]
    if not predicted:
        return [format_bytes(measured), "-" if measured else "+0.00%"]
    return [format_bytes(measured), f"{(measured - predicted) / predicted:+.2%}"]


def term_table(report: MemoryReport, gpus: list[int]) -> Table:
    """Every term of the GPUs' stages at the peak; they add up to it."""
    ran = any(report.measured)
    table = Table(
        title="terms at the peak, stage by stage", title_justify="left", collapse_padding=True
    )
    table.add_column("GPU", overflow="fold")
    table.add_column("stage")
    table.add_column("term")
    for name in ("bytes each", "x", "bytes", *(("measured", "error") if ran else ("of peak",))):
        table.add_column(name, justify="right")
    for gpu in gpus:
        _add_gpu(table, report, gpu, ran)
    return table


def _add_gpu(table: Table, report: MemoryReport, gpu: int, ran: bool) -> None:
    told, found = report.predicted[gpu].peak, measured_of(report, gpu)
    name = short(report.gpus[gpu].name, 16)
    before = -1
    for each in compared(report, gpu):
        layers = spans([report.stages[each.stage].layers])
        stage = f"{each.stage} ({layers})" if each.stage != before else ""
        terms = [
            term for term in told.terms if (term.stage, term.purpose) == (each.stage, each.purpose)
        ]
        sizes = "\n".join(format_bytes(term.each_bytes) for term in terms) or "-"
        counts = "\n".join(str(term.count) for term in terms) or "-"
        last = (
            _beside(each.predicted, each.measured)
            if ran
            else [f"{each.predicted / max(1, told.size):.1%}"]
        )
        what = purpose_name(each.purpose, each.stage)
        total = format_bytes(each.predicted)
        table.add_row(name if before < 0 else "", stage, what, sizes, counts, total, *last)
        before = each.stage
    last = _beside(told.size, found.peak.size if found else None) if ran else ["100.0%"]
    table.add_row(
        "", "", f"peak, {told.action or 'nothing happens'}", "", "", format_bytes(told.size), *last
    )
    table.add_section()
