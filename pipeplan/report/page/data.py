"""Tables of numbers with units: what pages, JSON and CSV are made of."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Unit = Literal["text", "count", "number", "ns", "bytes", "share", "change", "rate", "seconds"]
"""`change` is a share with its sign; `rate` is per second; `number` has no unit."""
Cell = str | int | float | None
"""None where a quantity was not predicted, or not measured."""


@dataclass(frozen=True, slots=True)
class Column:
    """The head of a column, and what its cells count."""

    name: str
    unit: Unit = "text"


@dataclass(frozen=True, slots=True)
class DataTable:
    """Rows under named columns; a row may have units of its own."""

    name: str
    """Identifies the table in a file: a word."""
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    units: tuple[Unit, ...] = ()
    """Of the `number` cells of each row, where rows differ."""

    def filled(self) -> DataTable:
        """Without the columns that nothing is known of."""
        kept = [
            place
            for place in range(len(self.columns))
            if not self.rows or any(row[place] is not None for row in self.rows)
        ]
        return replace(
            self,
            columns=tuple(self.columns[place] for place in kept),
            rows=tuple(tuple(row[place] for place in kept) for row in self.rows),
        )

    def unit(self, row: int, column: int) -> Unit:
        """What a cell counts."""
        told = self.columns[column].unit
        return self.units[row] if told == "number" and self.units else told
