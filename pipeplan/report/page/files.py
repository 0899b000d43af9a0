"""The data of a page for other programs: JSON section by section, CSV value by value."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

from pipeplan.report.page.sections import Page


def as_json(page: Page) -> str:
    """Each table as a list of rows by column; ns, bytes, shares of 1."""
    return (
        json.dumps({"title": page.title, "tables": data(page)}, indent=1, allow_nan=False) + "\n"
    )


def data(page: Page) -> dict[str, list[dict[str, Any]]]:
    """The rows of each table by its name."""
    return {
        table.name: [
            {column.name: cell for column, cell in zip(table.columns, row, strict=True)}
            for row in table.rows
        ]
        for section in page.sections
        for table in section.tables()
    }


def as_csv(page: Page) -> str:
    """One line per value: table, row, column, unit, value."""
    file = io.StringIO()
    lines = csv.writer(file, lineterminator="\n")
    lines.writerow(("table", "row", "column", "unit", "value"))
    for section in page.sections:
        for table in section.tables():
            for number, row in enumerate(table.rows):
                for place, (column, cell) in enumerate(zip(table.columns, row, strict=True)):
                    value = "" if cell is None else cell
                    lines.writerow(
                        (table.name, number, column.name, table.unit(number, place), value)
                    )
    return file.getvalue()
