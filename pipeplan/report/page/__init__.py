"""Plans, runs and comparisons as one HTML page; the same data as JSON and CSV."""

from pipeplan.report.page.files import as_csv, as_json
from pipeplan.report.page.of_plan import plan_page
from pipeplan.report.page.of_run import run_page
from pipeplan.report.page.render import render
from pipeplan.report.page.replayed_step import ReplayedStep, replayed_rows
from pipeplan.report.page.run_files import read_files
from pipeplan.report.page.sections import Page

__all__ = [
    "Page",
    "ReplayedStep",
    "as_csv",
    "as_json",
    "plan_page",
    "read_files",
    "render",
    "replayed_rows",
    "run_page",
]
