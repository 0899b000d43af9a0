"""The step of a run that was told action by action, as a trace."""

from __future__ import annotations

from pipeplan.errors import InputError
from pipeplan.report.page.measured import MeasuredActivities
from pipeplan.report.page.run_files import RunFiles
from pipeplan.report.trace import chrome_trace


def trace_of(files: RunFiles) -> str:
    """The trace file's text, on the tracks of the plan's replay and with its names.

    Raises:
        InputError: if the run tells no times of actions.
    """
    if files.plan is None or files.times is None:
        raise InputError(
            f"run {files.folder}: got no times of actions, need a run of some steps on processors."
            " Train again."
        )
    measured = MeasuredActivities.of(files.plan, files.times)
    return chrome_trace(files.plan, (*measured.computes, *measured.messages), {})
