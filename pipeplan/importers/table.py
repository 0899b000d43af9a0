"""A CSV table of layers: one row per layer, columns named as the fields of a chain's layer."""

from __future__ import annotations

import csv
import io

from pipeplan.chain import Chain, Layer
from pipeplan.errors import InputError
from pipeplan.units import parse_time_ns, shown

_UNITS = ("ns", "us", "ms", "s")
_REQUIRED = ("name", "forward_ns", "backward_ns", "output_bytes")
_FIELDS = tuple(
    field for field in Layer.model_fields if field not in ("riding", "modules", "options")
)
"""What a cell can fill; the others are lists of records, or of exporters."""
_SIGNED = (
    "forward_workspace_bytes", "forward_light_workspace_bytes",
    "backward_workspace_bytes", "input_backward_workspace_bytes",
)  # fmt: skip
"""Sizes that may be below zero."""


def csv_layers(
    text: str,
    name: str,
    input_bytes: int = 0,
    *,
    microbatch_size: int = 1,
    where: str = "table",
) -> Chain:
    """The chain whose layers are the rows of `text`.

    The first row names the columns: fields of `Layer` but `riding`, `modules` and `options`;
    required are name, forward_ns, backward_ns and output_bytes. A time may be given in another
    unit by another suffix: `forward_ms`. Sizes are whole bytes, below zero where the field may
    be, times decimal numbers (rounded up to whole ns), `parameters` are separated by spaces; an
    empty cell means the field's default.

    Args:
        text: the table.
        name: of the chain.
        input_bytes: size of the model's input, in bytes per micro-batch.
        microbatch_size: that the table was made for.
        where: names the table in errors, such as its path.

    Raises:
        InputError: if the text is no such table.
    """
    lines = io.StringIO(text.removeprefix("\ufeff"), newline="")
    reader = csv.reader(lines, strict=True, skipinitialspace=True)
    layers: list[dict[str, object]] = []
    try:
        columns = _columns(next(reader, []), where)
        for row in reader:
            if row:
                layers.append(_layer(columns, row, f"{where}: line {reader.line_num}"))
    except csv.Error as error:
        raise InputError(f"{where}: line {reader.line_num}: is not CSV: {error}") from None
    data = {
        "name": name,
        "source": "CSV table",
        "mode": "imported",
        "microbatch_size": microbatch_size,
        "input_bytes": input_bytes,
        "layers": layers,
    }
    return Chain.from_data(data, where)


def _columns(header: list[str], where: str) -> list[tuple[str, str]]:
    """(field, unit) of each column; the unit is empty where the field is no time."""
    place = f"{where}: line 1"
    columns: list[tuple[str, str]] = []
    for title in (cell.strip() for cell in header):
        base, _, unit = title.rpartition("_")
        timed = f"{base}_ns" in _FIELDS and unit in _UNITS
        field = f"{base}_ns" if timed else title
        if field not in _FIELDS:
            raise InputError(
                f"{place}: got the column {shown(title)}, need fields of a layer:"
                f" {', '.join(_FIELDS)}"
            )
        if field in dict(columns):
            raise InputError(f"{place}: got {field} in two columns, need it in one")
        columns.append((field, unit if timed else ""))
    for field in _REQUIRED:
        if field not in dict(columns):
            units = ", ".join(_UNITS)
            raise InputError(
                f"{place}: got no column {field}, need {', '.join(_REQUIRED)}; times with any of"
                f" {units} at the end"
            )
    return columns


def _layer(columns: list[tuple[str, str]], row: list[str], place: str) -> dict[str, object]:
    if len(row) != len(columns):
        raise InputError(f"{place}: got {len(row)} cells, need {len(columns)} as in the first row")
    cells = zip(columns, (cell.strip() for cell in row), strict=True)
    return {
        field: _value(field, unit, cell, f"{place}: {_titled(field, unit)}")
        for (field, unit), cell in cells
        if cell
    }


def _titled(field: str, unit: str) -> str:
    """The column's own title."""
    return f"{field.removesuffix('_ns')}_{unit}" if unit else field


def _value(field: str, unit: str, cell: str, place: str) -> object:
    if field == "name":
        return cell
    if field == "parameters":
        return cell.split()
    if unit:
        return parse_time_ns(f"{cell} {unit}", place)
    digits = cell.removeprefix("-") if field in _SIGNED else cell
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 20):
        raise InputError(f"{place}: got {shown(cell)}, need whole bytes")
    return int(cell)
