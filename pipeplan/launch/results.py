"""run.json: what a run was predicted to be and what it was, the data of a report."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeplan import __version__
from pipeplan.action_times import FILE as TIMES
from pipeplan.action_times import ActionTimes
from pipeplan.launch.best import BestSoFar
from pipeplan.launch.checks import Setup
from pipeplan.launch.logs import json_number
from pipeplan.launch.progress import RunFigures
from pipeplan.memory_terms import GpuTerms
from pipeplan.plan import Plan
from pipeplan.report.memory import FILE, memory_of_run, over_budget
from pipeplan.report.remat import remat_shares
from pipeplan.report.run import PLAN
from pipeplan.runtime.startup.gpu_memory import GpuMemoryUse
from pipeplan.whole_file import replace

FORMAT = "pipeplan-run/1"


@dataclass(frozen=True, slots=True)
class RankResult:
    """What each rank adds at the end."""

    measured: RunFigures
    peak_bytes: int | None
    """Most live bytes at once; only with --instrument."""
    resident_bytes: int
    taken: GpuMemoryUse
    sampled: tuple[int, GpuTerms] | None = None
    """The step that was sampled, and its bytes term by term."""


def run_document(
    setup: Setup,
    ranks: list[RankResult],
    steps_done: int,
    ranks_here: int,
    best: BestSoFar | None = None,
) -> dict[str, Any]:
    """The content of run.json; `ranks_here` run on the first rank's machine."""
    plan = setup.plan
    return {
        "format": FORMAT,
        "plan_digest": plan.digest(),
        "task": setup.options.task or plan.chain.task,
        "task_digest": setup.task_digest,
        "semantics": plan.semantics,
        "microbatches": plan.microbatches,
        "k": plan.k,
        "seed": setup.seed,
        "first_step": setup.first_step,
        "steps": steps_done,
        "complete": steps_done == setup.options.steps,
        "instrumented": setup.options.instrument,
        "best": best.told() if best else None,
        "predicted": {
            "period_ns": plan.period_ns,
            "step_ns": plan.step_ns,
            "memory_model": plan.memory_model,
            "times": plan.chain.mode,
            "peak_bytes": [row.peak_bytes for row in plan.memory],
            "host_bytes": [row.host_bytes for row in plan.memory],
            "stages": [share.model_dump(mode="json") for share in remat_shares(plan)],
        },
        "measured": _measured(ranks),
        "versions": library_versions(),
        "host": {
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            "ranks": ranks_here,
            "device": setup.device.type,
        },
    }


def write(path: Path, content: dict[str, Any]) -> None:
    """Put `content` at `path` in one step."""
    replace(path, json.dumps(content, indent=1, allow_nan=False) + "\n")


def write_memory(out: Path, setup: Setup, ranks: list[RankResult]) -> list[str]:
    """memory.json: where each byte was predicted to be, and was in the sampled step.

    Returns:
        A line for each GPU that held more than its budget.
    """
    found = [(rank.sampled, rank.taken.beyond_tensors) for rank in ranks]
    report = memory_of_run(setup.plan, setup.pattern, found)
    if report is None:
        return []
    replace(out / FILE, report.to_json())
    return over_budget(report)


def write_times(out: Path, plan: Plan, times: ActionTimes | None) -> None:
    """plan.json, what was run, and actions.json, when, where that is known."""
    replace(out / PLAN, plan.to_json())
    if times is not None:
        replace(out / TIMES, times.to_json())


def library_versions() -> dict[str, str]:
    """What computed the numbers."""
    import torch

    return {
        "pipeplan": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }


def _measured(ranks: list[RankResult]) -> dict[str, Any]:
    teller = next((rank.measured for rank in ranks if rank.measured.periods), None)
    periods = teller.periods if teller else None
    return {
        "period_ns": periods.best_window_ns if periods else None,
        "period_window": periods.window if periods else None,
        "median_period_ns": periods.median_ns if periods else None,
        "step_ns": teller.best_step_ns if teller else None,
        "first_loss": json_number(teller.first_loss) if teller else None,
        "last_loss": json_number(teller.last_loss) if teller else None,
        "peak_bytes": [rank.peak_bytes for rank in ranks],
        "resident_bytes": [rank.resident_bytes for rank in ranks],
        "allocated_bytes": [rank.taken.allocated for rank in ranks],
        "reserved_bytes": [rank.taken.reserved for rank in ranks],
    }
