"""Results that are kept part by part, so that a benchmark goes on where it was stopped."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from rich.table import Table

from pipeplan.cli import common
from pipeplan.whole_file import replace

Part = dict[str, Any]


class Keyed(Protocol):
    """An instance of a benchmark."""

    @property
    def key(self) -> str:
        """What identifies its row."""

    @property
    def parts(self) -> Sequence[str]:
        """What is measured of it."""


Instance = TypeVar("Instance", bound=Keyed)


class Store:
    """Rows by key in a file that is whole after every part."""

    def __init__(self, path: Path) -> None:
        """Reads what the file has; it may be missing."""
        self._path = path
        self.rows: dict[str, Part] = {}
        if path.exists():
            self.rows = json.loads(path.read_text(encoding="utf-8"))

    def put(self, key: str, name: str, part: Part) -> None:
        """Keep one part of one row."""
        self.rows.setdefault(key, {})[name] = part
        replace(self._path, json.dumps(self.rows, indent=1) + "\n")


def measure_missing(
    text: str | None,
    result: Path,
    cases: Iterable[Instance],
    planned: Callable[[Instance, float, str], Part],
    table: tuple[Sequence[str], Callable[[Instance, Part], Sequence[str]]],
    limit_s: int = 15,
) -> int:
    """The command of a benchmark: measures the parts that its file lacks, prints one table.

    Args:
        text: of `--help`.
        result: the file, unless `--out` says another.
        cases: one row each.
        planned: a part of a case within so many seconds.
        table: titles of columns, and the cells of a row.
        limit_s: the limit of each part, unless `--limit` says another.
    """
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--limit",
        type=common.duration,
        default=limit_s * 10**9,
        metavar="TIME",
        help=f"of work ({limit_s}s)",
    )
    parser.add_argument("--out", type=Path, default=result, metavar="FILE", help="%(default)s")
    args = parser.parse_args()
    store, (titles, cells) = Store(args.out), table
    shown = Table(*titles, box=None, pad_edge=False)
    for case in cases:
        row = store.rows.setdefault(case.key, {})
        for name in case.parts:
            if name not in row:
                store.put(case.key, name, planned(case, args.limit / 1e9, name))
                print(f"{case.key} {name}", file=sys.stderr, flush=True)
        shown.add_row(*cells(case, row))
    common.screen().print(shown)
    return 0


def measure_rows(
    text: str | None, result: Path, rows: Mapping[str, Callable[[], Part]]
) -> dict[str, Part]:
    """The command of a benchmark whose rows are chosen by name; none: what its file lacks.

    Args:
        text: of `--help`.
        result: the file, which is whole after each row.
        rows: what measures each.

    Returns:
        All rows of the file.
    """
    names = chosen_names(text, list(rows))
    found: dict[str, Part] = json.loads(result.read_text()) if result.exists() else {}
    for name in names or [each for each in rows if each not in found]:
        print(name, file=sys.stderr, flush=True)
        found[name] = rows[name]()
        print(json.dumps(found[name]), file=sys.stderr, flush=True)
        result.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return found


def chosen_names(text: str | None, known: Sequence[str]) -> list[str]:
    """The arguments of a benchmark whose rows are chosen by name; none: what its file lacks."""
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    shown = ", ".join(known)
    parser.add_argument("names", nargs="*", type=one_of(known), metavar="NAME", help=shown)
    return list(parser.parse_args().names)


def one_of(known: Sequence[str]) -> Callable[[str], str]:
    """The type of an argument that is one of these; `choices` refuses no arguments at all."""

    def checked(name: str) -> str:
        if name not in known:
            raise argparse.ArgumentTypeError(f"there is no {name!r}; known are {', '.join(known)}")
        return name

    return checked
