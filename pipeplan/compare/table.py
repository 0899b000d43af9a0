"""A comparison for people and for machines."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from pipeplan.compare.ours import OURS
from pipeplan.compare.points import Comparison, ComparisonPoint
from pipeplan.compare.rows import Absent, Row
from pipeplan.units import format_bytes, format_ns

LEGEND = (
    "idle: share of the GPUs' time without work, made of imbal (uneven work), comm (links take"
    " longer),\nwait (for memory or a fixed order), fill (filling and draining at a flush)"
)
"""What the columns of idle time are; docs/explanation/baselines.md has the formulas."""
_SHARES = ("imbalance", "communication", "waiting", "fill_drain")


def point_table(comparison: Comparison, point: ComparisonPoint) -> Table:
    """One point: of every row period, throughput, idle time by cause, bytes, does it fit."""
    gpus = point.cluster.gpus
    memories = sorted({gpu.budget_bytes for gpu in gpus})
    reserved = " beyond a reserve" if any(gpu.reserve_bytes for gpu in gpus) else ""
    memory = " to ".join(map(format_bytes, dict.fromkeys((memories[0], memories[-1]))))
    bound = "" if point.bound_ns is None else f", no plan below {format_ns(point.bound_ns)}"
    count = "1 GPU" if len(gpus) == 1 else f"{len(gpus)} GPUs"
    shown = Table(
        title=f"{comparison.chain.name}: {count} of {memory}{reserved}{bound}",
        title_justify="left",
        box=None,
        padding=(0, 1, 0, 0),
    )
    shown.add_column("schedule", no_wrap=True)
    shown.add_column("mode")
    for name in ("period", "samples/s", "idle", "imbal", "comm", "wait", "fill"):
        shown.add_column(name, justify="right")
    rows = [row for row in point.rows if isinstance(row, Row)]
    size, unit = _unit(max((peak for row in rows for peak in row.peak_bytes), default=0))
    shown.add_column(f"peaks, {unit}", justify="right", overflow="fold")
    shown.add_column("fits", justify="right")
    for row in rows:
        shown.add_row(*_cells(comparison, row, size), style="" if row.fits else "dim")
    return shown


def _unit(largest: int) -> tuple[int, str]:
    """Bytes and name of the unit in which `largest` has digits before the point."""
    for power, name in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if largest >= 1024**power:
            return 1024**power, name
    return 1, "B"


def _cells(comparison: Comparison, row: Row, size: int) -> list[str | Text]:
    rate = row.samples_per_second(comparison.chain.microbatch_size, comparison.microbatches)
    shares = [row.bubble.total, *(getattr(row.bubble, name) for name in _SHARES)]
    return [
        Text(row.name, style="bold" if row.name == OURS else ""),
        row.semantics,
        format_ns(row.period_ns),
        f"{rate:,.4g}",
        *(f"{share:.0%}" for share in shares),
        " ".join(f"{peak / size:.1f}" for peak in row.peak_bytes),
        "yes" if row.fits else Text(_missing(row), style="red"),
    ]


def _missing(row: Row) -> str:
    """What a row that does not fit has too little of."""
    if row.over_bytes > 0:
        return f"{format_bytes(row.over_bytes)} over"
    return f"needs M = {row.needed_microbatches}"


def absences(point: ComparisonPoint) -> list[str]:
    """Why what is missing in the table is missing, line by line."""
    return [f"{row.name}: {row.reason}" for row in point.rows if isinstance(row, Absent)]


def loss(point: ComparisonPoint) -> str | None:
    """What to shout if somebody beats our plan."""
    if point.lost is None:
        return None
    ours = point.row(OURS)
    beaten = "has no plan" if ours is None else f"takes {format_ns(ours.period_ns)}"
    return (
        f"LOST: {point.lost.name} takes {format_ns(point.lost.period_ns)} per micro-batch on"
        f" {len(point.cluster.gpus)} GPUs of {point.memory_bytes} bytes, pipeplan {beaten}."
        " Give the planner more time (--time-limit), and please report it with the chain."
    )


def data(comparison: Comparison) -> dict[str, object]:
    """Everything as JSON: times in ns, sizes in bytes."""
    return {
        "chain": comparison.chain.name,
        "chain_digest": comparison.chain.digest(),
        "microbatches": comparison.microbatches,
        "points": [_point(comparison, point) for point in comparison.points],
        "clouds": [
            {
                "gpus": cloud.gpus,
                "partitions_left_out": cloud.left_out,
                "points": [list(point) for point in cloud.points],
            }
            for cloud in comparison.clouds
        ],
    }


def _point(comparison: Comparison, point: ComparisonPoint) -> dict[str, object]:
    return {
        "gpus": len(point.cluster.gpus),
        "memory_bytes": [gpu.memory_bytes for gpu in point.cluster.gpus],
        "reserve_bytes": [gpu.reserve_bytes for gpu in point.cluster.gpus],
        "bound_ns": None if point.bound_ns is None else float(point.bound_ns),
        "lost_to": None if point.lost is None else point.lost.name,
        "rows": [
            _absent(row) if isinstance(row, Absent) else _row(comparison, row)
            for row in point.rows
        ],
    }


def _absent(row: Absent) -> dict[str, object]:
    return {"name": row.name, "absent": row.reason}


def _row(comparison: Comparison, row: Row) -> dict[str, object]:
    size, microbatches = comparison.chain.microbatch_size, comparison.microbatches
    return {
        "name": row.name,
        "semantics": row.semantics,
        "period_ns": float(row.period_ns),
        "period_ns_exact": [row.period_ns.numerator, row.period_ns.denominator],
        "samples_per_s": row.samples_per_second(size, microbatches),
        "idle": row.bubble.total,
        **{f"idle_{name}": getattr(row.bubble, name) for name in _SHARES},
        "peak_bytes": list(row.peak_bytes),
        "fits": row.fits,
        "over_bytes": row.over_bytes,
        "needed_microbatches": row.needed_microbatches,
        "detail": row.detail,
    }
