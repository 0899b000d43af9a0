"""What `show`, `report` and `compare` have in common: a page for people, its data for programs."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

from pipeplan.cli import common, output

if TYPE_CHECKING:
    from pipeplan.report.page import Page


def add_flags(verb: argparse.ArgumentParser) -> None:
    """The files that the page and its data may go into."""
    verb.add_argument(
        "--html",
        type=common.file,
        metavar="FILE",
        help="also write all of it as one page for a browser",
    )
    verb.add_argument(
        "--data",
        type=common.file,
        metavar="FILE",
        help="also write the numbers of that page (.json or .csv)",
    )


def checked(args: argparse.Namespace) -> list[str]:
    """The files that were asked for.

    Raises:
        InputError: if the ending of one is none that can be written.
    """
    output.check_ending(args.html, ("html",), "page")
    output.check_ending(args.data, ("json", "csv"), "data")
    return [file for file in (args.html, args.data) if file]


def write(args: argparse.Namespace, make: Callable[[], Page]) -> None:
    """Write the files that were asked for; `make` is called only if there are any.

    Raises:
        InputError: if one cannot be written.
    """
    from pipeplan.report.page import as_csv, as_json, render

    if not args.html and not args.data:
        return
    page = make()
    if args.html:
        output.write(args.html, render(page), args.force)
        common.say(f"page: {args.html} (open it in a browser)")
    if args.data:
        text = as_json(page) if args.data.endswith(".json") else as_csv(page)
        output.write(args.data, text, args.force)
