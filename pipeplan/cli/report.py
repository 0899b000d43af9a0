"""`pipeplan report`: predicted beside measured, for finished runs."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from pipeplan.cli import common

_EXAMPLE = """\
pipeplan report run
pipeplan report run run-instrumented"""


def add(verbs: common.Verbs) -> None:
    """The verb and its flags."""
    text = "put a run's measured period and peaks beside what its plan predicted"
    verb = common.add_verb(verbs, "report", run, text, _EXAMPLE)
    verb.add_argument(
        "runs",
        nargs="+",
        metavar="RUN_DIR",
        help="--out folder of a launch; bytes come from runs with --instrument, times from others",
    )


def run(args: argparse.Namespace) -> int:
    """Report `args.runs` as one table."""
    from pipeplan.errors import InputError
    from pipeplan.report import tables
    from pipeplan.report.run import comparisons, read

    rows = comparisons([read(folder) for folder in args.runs])
    if not rows:
        raise InputError(
            f"{', '.join(args.runs)}: too short, nothing was measured. Run more steps."
        )
    if args.json:
        common.emit([{**asdict(row), "error": row.error} for row in rows])
    else:
        common.screen().print(tables.comparison_table(rows, ", ".join(args.runs)))
    return 0
