"""`pipeplan report`: predicted beside measured, for finished runs."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from pipeplan.cli import common, memory, output, page

if TYPE_CHECKING:
    from pipeplan.memory_terms import MemoryReport
    from pipeplan.report.run import TrainingRun
    from pipeplan.report.tables import PredictedMeasured

_EXAMPLE = """\
pipeplan report run
pipeplan report run --memory-picture memory.png --csv memory.csv
pipeplan report run run-instrumented"""


def add(verbs: common.Verbs) -> None:
    """The verb and its flags."""
    text = "put a run's measured period and bytes beside what its plan predicted"
    verb = common.add_verb(verbs, "report", run, text, _EXAMPLE)
    verb.add_argument(
        "runs",
        nargs="+",
        metavar="RUN_DIR",
        help="--out folder of a launch, or one with the memory.json of a Pipeline; peaks of whole"
        " runs come from runs with --instrument, times from others, terms of a sampled step from"
        " both",
    )
    memory.add_flags(verb)
    page.add_flags(verb)
    verb.add_argument(
        "--trace",
        type=common.file,
        metavar="FILE",
        help="also write the step of that page as a Chrome/Perfetto trace",
    )
    verb.add_argument("--force", action="store_true", help="replace files that exist")


def run(args: argparse.Namespace) -> int:
    """Report `args.runs` as one table; what stages do not keep as one more for each plan."""
    from pipeplan.errors import InputError
    from pipeplan.report.memory import has_memory_alone, measured_terms, read_memory
    from pipeplan.report.page import read_files, replayed_rows, run_page
    from pipeplan.report.run import comparisons, read
    from pipeplan.report.run_trace import trace_of

    files = [*page.checked(args), *([args.trace] if args.trace else [])]
    if files and len(args.runs) > 1:
        raise InputError(
            f"{', '.join(files)}: got {len(args.runs)} runs, need one for a page. Write a page of"
            " each."
        )
    memory.check(args, files)
    told = _one_per_plan(read_memory(folder) for folder in args.runs)
    launched = [folder for folder in args.runs if not has_memory_alone(folder)]
    runs = [read(folder) for folder in launched]
    rows = comparisons(runs)
    for each, folder in zip(runs, launched, strict=True):
        rows += replayed_rows(each, folder)
    memory.write(args, next(iter(told), None))
    if files:
        kept = read_files(args.runs[0])
        page.write(args, lambda: run_page(kept))
        if args.trace:
            output.write(args.trace, trace_of(kept), args.force)
    if not rows and launched:
        raise InputError(
            f"{', '.join(args.runs)}: too short, nothing was measured. Run more steps."
        )
    if memory.fills_stdout(args) or args.trace == "-":
        return 0
    if args.json:
        terms = [term for report in told for term in measured_terms(report)]
        common.emit([*map(_plain, rows), *terms])
        return 0
    _present(rows, runs, launched)
    for report in told:
        memory.present(report)
    return 0


def _present(
    rows: Sequence[PredictedMeasured], runs: Sequence[TrainingRun], folders: Sequence[str]
) -> None:
    """The tables of launched runs, and what to know of them."""
    from pipeplan.report import tables
    from pipeplan.report.run import crowded, stage_tables

    screen = common.screen()
    if rows:
        screen.print(tables.comparison_table(rows, ", ".join(folders)))
    for table in stage_tables(runs, folders):
        screen.print(table)
    for line in crowded(runs, folders):
        print(line)


def _one_per_plan(found: Iterable[MemoryReport | None]) -> list[MemoryReport]:
    """The first report of each plan."""
    kept: dict[str, MemoryReport] = {}
    for report in found:
        if report is not None:
            kept.setdefault(report.plan_digest, report)
    return list(kept.values())


def _plain(row: PredictedMeasured) -> dict[str, object]:
    """A quantity as plain data; a rank's peak has the stages it is of."""
    stages = [share.model_dump(mode="json") for share in row.stages]
    told = {"name": row.name, "unit": row.unit, "predicted": row.predicted}
    more = {"stages": stages} if stages else {}
    return {**told, "measured": row.measured, "error": row.error, **more}
