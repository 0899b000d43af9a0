"""One period of a plan as text: GPUs and links as rows, time from left to right between bars.

    gpu0 |1F2----0F3----0B1===========|
    gpu1 |<======2F1-------2B1=======>|

An op shows as stage, kind and the micro-batch it handles in this period, then fills its time. What
crosses the end of the period leaves with `>` and comes in at the left with `<`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from pipeplan.plan import Op, OpKind, Plan
from pipeplan.units import format_ns

_FILL = {OpKind.F: "-", OpKind.B: "=", OpKind.SEND_F: "~", OpKind.SEND_B: "~"}
LEGEND = (
    "0F3 = stage 0, forward, micro-batch 3; - forward, = backward, ~ transfer, . idle,"
    " > and < continue over the period's end"
)


@dataclass(frozen=True, slots=True)
class Row:
    """A GPU or link and what happens on it."""

    name: str
    ops: tuple[Op, ...]


def grid(plan: Plan, width: int = 96, marked: Collection[str] = ()) -> str:
    """One steady period of `plan` as text of at most about `width` columns.

    Args:
        plan: any well-formed plan, a broken one included.
        width: columns in all; at least 40 are used.
        marked: labels of ops (`Op.label`) to fill with `!`, where something is wrong.

    Returns:
        A head line with the scale, one line per GPU and per link in use, a legend.
    """
    resources = rows(plan)
    margin = max(len(row.name) for row in resources)
    columns = max(40, width) - margin - 3
    hidden = 0
    lines = []
    for row in resources:
        cells = ["."] * columns
        # Longest first: what is shorter than a column takes one that nothing else needs.
        for op in sorted(row.ops, key=lambda op: -op.duration_ns):
            hidden += not _draw(cells, plan, op, "!" if op.label in marked else _FILL[op.kind])
        lines.append(f"{row.name:<{margin}} |{''.join(cells)}|")
    batches = "1 micro-batch" if plan.k == 1 else f"{plan.k} micro-batches"
    head = (
        f"one period: {format_ns(plan.period_ns)} for {batches};"
        f" a column is {format_ns(plan.period_ns / columns)}"
    )
    note = [f"({hidden} ops shorter than a column are not drawn)"] if hidden else []
    return "\n".join([head, *lines, LEGEND, *note]) + "\n"


def microbatch(plan: Plan, op: Op) -> int:
    """The micro-batch that `op` handles in the first period in which every op of the plan runs."""
    return plan.k * (max(each.shift for each in plan.ops) - op.shift) + op.copy_


def label(plan: Plan, op: Op, earlier: int = 0) -> str:
    """`0F3`: stage, direction, micro-batch handled `earlier` periods before the shown one."""
    return f"{op.stage}{op.kind.value[-1]}{microbatch(plan, op) - earlier * plan.k}"


def rows(plan: Plan) -> tuple[Row, ...]:
    """GPUs first, then the links in use: `0>1` one way, `0-1` where both ways share the link."""
    gpus = [
        Row(gpu.name, tuple(op for op in plan.ops if op.gpu == index))
        for index, gpu in enumerate(plan.cluster.gpus)
    ]
    links = plan.cluster.links
    used: dict[tuple[int, int], list[Op]] = {}
    for op in plan.ops:
        if op.link is not None:
            used.setdefault(links.resource(*op.link), []).append(op)
    arrow = ">" if links.duplex == "full" else "-"
    return (
        *gpus,
        *(Row(f"{one}{arrow}{two}", tuple(ops)) for (one, two), ops in sorted(used.items())),
    )


def _draw(cells: list[str], plan: Plan, op: Op, fill: str) -> bool:
    """Put `op` into `cells`; False where it is too short for a column and none is free."""
    columns, period = len(cells), plan.period_ns
    first = op.start_ns * columns // period
    length = min((op.start_ns + op.duration_ns) * columns // period - first, columns)
    if length < 1:
        if cells[first] != ".":
            return False
        length = 1
    text = label(plan, op)
    if length <= len(text):
        text = op.kind.value[-1].upper()
        fill = fill if fill == "!" else text.lower()
    shown = text[:length].ljust(length, fill)
    for offset, char in enumerate(shown):
        cells[(first + offset) % columns] = char
    if first + length > columns:
        cells[0] = "<"
        if first < columns - 1:
            cells[columns - 1] = ">"
    return True
