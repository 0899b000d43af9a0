"""`pipeplan report`: predicted beside measured, for finished runs."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from pipeplan.cli import common

if TYPE_CHECKING:
    from pipeplan.report.tables import PredictedMeasured

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
    """Report `args.runs` as one table; what stages do not keep as one more for each plan."""
    from pipeplan.errors import InputError
    from pipeplan.report import tables
    from pipeplan.report.run import comparisons, crowded, read, stage_tables

    runs = [read(folder) for folder in args.runs]
    rows = comparisons(runs)
    if not rows:
        raise InputError(
            f"{', '.join(args.runs)}: too short, nothing was measured. Run more steps."
        )
    if args.json:
        common.emit([_plain(row) for row in rows])
    else:
        screen = common.screen()
        screen.print(tables.comparison_table(rows, ", ".join(args.runs)))
        for table in stage_tables(runs, args.runs):
            screen.print(table)
        for line in crowded(runs, args.runs):
            print(line)
    return 0


def _plain(row: PredictedMeasured) -> dict[str, object]:
    """A quantity as plain data; a rank's peak has the stages it is of."""
    stages = [share.model_dump(mode="json") for share in row.stages]
    told = {"name": row.name, "unit": row.unit, "predicted": row.predicted}
    more = {"stages": stages} if stages else {}
    return {**told, "measured": row.measured, "error": row.error, **more}
