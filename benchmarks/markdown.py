"""Tables and lists of the result pages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Rows of cells below their head."""
    lines = [list(head), ["---"] * len(head), *(list(row) for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def bullets(lines: Iterable[str]) -> str:
    """A list with a line each."""
    return "\n".join(f"- {line.removeprefix('- ')}" for line in lines)
