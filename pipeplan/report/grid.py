"""One period of a plan as text: GPUs and links as rows, time from left to right between bars.

    gpu0 |1F2----0F3----0B1===========|
    gpu1 |<======2F1-------2B1=======>|

An op shows as stage, kind and the micro-batch it handles in this period, then fills its time. What
crosses the end of the period leaves with `>` and comes in at the left with `<`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from rich.cells import cell_len, set_cell_size

from pipeplan.plan import Op, OpKind, Plan
from pipeplan.units import counted, format_ns, printable

_FILL = {OpKind.F: "-", OpKind.B: "=", OpKind.I: "=", OpKind.W: "+"}
_TRANSFER = "~"
LETTER = {
    OpKind.F: "F",
    OpKind.B: "B",
    OpKind.I: "I",
    OpKind.W: "W",
    OpKind.SEND_F: "F",
    OpKind.SEND_B: "B",
    OpKind.OFFLOAD: "O",
    OpKind.PREFETCH: "P",
}
LEGEND = (
    "0F3 = stage 0, forward, micro-batch 3 (Fff where that has no room); - forward, = backward,"
    " ~ transfer, . idle, > and < continue over the period's end"
)
HOST_LEGEND = "O to the host, P back"
SPLIT_LEGEND = "I backward of activations, W + of weights"


@dataclass(frozen=True, slots=True)
class GridRow:
    """A GPU, a link or a GPU's way to the host, and what happens on it."""

    name: str
    ops: tuple[Op, ...]


def grid(plan: Plan, width: int = 96, marked: Collection[str] = ()) -> str:
    """One steady period of `plan` as text of at most about `width` columns.

    Args:
        plan: any well-formed plan, a broken one included.
        width: columns in all; at least 40 are used.
        marked: labels of ops (`Op.label`) to fill with `!`, where something is wrong.

    Returns:
        A head line with the scale, one line per GPU, link and way to the host in use, a legend.
    """
    resources = grid_rows(plan)
    margin = max(cell_len(row.name) for row in resources)
    columns = max(40, width) - margin - 3
    hidden = 0
    lines = []
    for row in resources:
        cells = ["."] * columns
        # Longest first: what is shorter than a column takes one that nothing else needs.
        for op in sorted(row.ops, key=lambda op: -op.duration_ns):
            hidden += not _draw(
                cells, plan, op, "!" if op.label in marked else _FILL.get(op.kind, _TRANSFER)
            )
        lines.append(f"{set_cell_size(row.name, margin)} |{''.join(cells)}|")
    head = (
        f"{window(plan)}: {format_ns(plan.period_ns)} for {counted(plan.k, 'micro-batch')};"
        f" a column is {format_ns(plan.period_ns / columns)}"
    )
    note = [f"({hidden} ops shorter than a column are not drawn)"] if hidden else []
    legend = "; ".join([LEGEND, *more_legends(plan)])
    return "\n".join([head, *lines, legend, *note]) + "\n"


def short(name: str, most: int = 24) -> str:
    """`name` on one line of at most `most` characters: its begin, and its end with the numbers."""
    shown = printable(name)
    head = most // 3
    return shown if len(shown) <= most else f"{shown[:head]}…{shown[head + 1 - most :]}"


def window(plan: Plan) -> str:
    """What a picture of the period shows: all of a step, if it is a step plan (T6)."""
    whole = plan.semantics == "flush" and plan.k == plan.microbatches
    return "one step" if whole and not any(op.shift for op in plan.ops) else "one period"


def more_legends(plan: Plan) -> list[str]:
    """What only some plans have: halves of a backward, ways to the host."""
    halves = any(op.kind in (OpKind.I, OpKind.W) for op in plan.ops)
    away = any(op.kind.is_host for op in plan.ops)
    return [*([SPLIT_LEGEND] if halves else []), *([HOST_LEGEND] if away else [])]


def microbatch(plan: Plan, op: Op) -> int:
    """The micro-batch that `op` handles in the first period in which every op of the plan runs."""
    return plan.k * (max(each.shift for each in plan.ops) - op.shift) + op.copy_


def label(plan: Plan, op: Op, earlier: int = 0) -> str:
    """`0F3`: stage, letter, micro-batch handled `earlier` periods before the one shown."""
    return f"{op.stage}{LETTER[op.kind]}{microbatch(plan, op) - earlier * plan.k}"


def grid_rows(plan: Plan) -> tuple[GridRow, ...]:
    """GPUs first, then the links and the ways to the host that are in use.

    `0>1` is one way, `0-1` a link that both ways share; so are `0>host`, `host>0` and `0-host`.
    """
    gpus = {index: GridRow(short(name), ()) for index, name in enumerate(plan.cluster.labels)}
    used: dict[tuple[int, int], list[Op]] = {}
    ways: dict[tuple[int, str], list[Op]] = {}
    for op in plan.ops:
        if op.link is not None:
            used.setdefault(plan.cluster.links.resource(*op.link), []).append(op)
        elif op.gpu is not None and op.kind.is_host:
            ways.setdefault((op.gpu, _way(plan, op.kind, op.gpu)), []).append(op)
        elif op.gpu is not None:
            gpus[op.gpu] = replace(gpus[op.gpu], ops=(*gpus[op.gpu].ops, op))
    arrow = ">" if plan.cluster.links.duplex == "full" else "-"
    return (
        *gpus.values(),
        *(GridRow(f"{one}{arrow}{two}", tuple(ops)) for (one, two), ops in sorted(used.items())),
        *(GridRow(name, tuple(ops)) for (_, name), ops in sorted(ways.items())),
    )


def _way(plan: Plan, kind: OpKind, gpu: int) -> str:
    if plan.cluster.host and plan.cluster.host.duplex == "half":
        return f"{gpu}-host"
    return f"{gpu}>host" if kind is OpKind.OFFLOAD else f"host>{gpu}"


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
        text = LETTER[op.kind]
        fill = fill if fill == "!" else text.lower()
    shown = text[:length].ljust(length, fill)
    for offset, char in enumerate(shown):
        cells[(first + offset) % columns] = char
    if first + length > columns:
        cells[0] = "<"
        if first < columns - 1:
            cells[columns - 1] = ">"
    return True
