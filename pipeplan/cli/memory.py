"""What `show` and `report` have in common: where each byte is, as tables, CSV and a picture."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipeplan.cli import common, output

if TYPE_CHECKING:
    from pipeplan.memory_terms import MemoryReport


def add_flags(verb: argparse.ArgumentParser) -> None:
    """The files that the report may go into."""
    verb.add_argument(
        "--csv",
        type=common.file,
        metavar="FILE",
        help="also write the bytes of each GPU, term by term; - is stdout",
    )
    verb.add_argument(
        "--memory-picture",
        type=common.file,
        metavar="FILE",
        help="also draw them over time, stacked by term (.png, .svg or .pdf)",
    )


def check(
    args: argparse.Namespace, others: Sequence[str] = (), reads: Sequence[str | None] = ()
) -> None:
    """Refuse files that could not be written, or are read, before anything is done.

    Raises:
        InputError: if there is one.
    """
    output.check_ending(args.memory_picture)
    output.check_outputs([*others, args.csv, args.memory_picture], args.force, reads)


def write(args: argparse.Namespace, report: MemoryReport | None) -> None:
    """The files that were asked for.

    Raises:
        InputError: if there is nothing to write.
    """
    from pipeplan.errors import InputError
    from pipeplan.report.memory import as_csv
    from pipeplan.report.memory_picture import draw_terms

    if report is None:
        if args.csv or args.memory_picture:
            raise InputError(
                "memory: got no plan that can be replayed and no run with a memory.json, need one"
                " for --csv and --memory-picture. pipeplan verify says what is wrong with a plan."
            )
        return
    if args.memory_picture:
        draw_terms(report, args.memory_picture)
        common.say(f"drawn: {args.memory_picture}")
    if args.csv:
        output.write(args.csv, as_csv(report), args.force)


def fills_stdout(args: argparse.Namespace) -> bool:
    """Whether stdout has the CSV: nothing else may stand behind it."""
    return bool(args.csv == "-")


def present(report: MemoryReport | None) -> None:
    """The tables, for people."""
    from pipeplan.report.memory_tables import memory_tables

    if report is None:
        return
    screen = common.screen()
    for part in memory_tables(report):
        screen.print(part)
