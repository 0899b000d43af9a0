"""Cells of tables as people read them."""

from __future__ import annotations

from pipeplan.report.page.data import Cell, DataTable, Unit
from pipeplan.units import format_bytes, format_ns

_ENDINGS: dict[Unit, str] = {"rate": " /s", "seconds": " s"}


def shown(value: Cell, unit: Unit) -> str:
    """`value` with its unit; a dash where there is no number."""
    if value is None:
        return "" if unit == "text" else "-"
    if isinstance(value, str) or unit in ("text", "count"):
        return str(value)
    if unit == "ns":
        return format_ns(value)
    if unit == "bytes":
        return format_bytes(round(value))
    if unit == "share":
        return f"{value:.1%}"
    if unit == "change":
        return f"{value:+.1%}"
    return f"{value:,.4g}{_ENDINGS.get(unit, '')}"


def shown_rows(table: DataTable) -> list[list[tuple[Cell, str]]]:
    """Of each cell the value and its text."""
    return [
        [(value, shown(value, table.unit(row, column))) for column, value in enumerate(cells)]
        for row, cells in enumerate(table.rows)
    ]
