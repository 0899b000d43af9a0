"""Launches on forked ranks, as tests ask faults.py for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pipeplan import lowering
from pipeplan.plan import Plan
from pipeplan.program import Action, ActionKind
from tests.case_scripts import printed

STEPS = 6
TIMEOUT_S = 600
"""So long that `launched` fails where a rank waits for it."""
_COMPUTES = (ActionKind.F, ActionKind.B)


def place(plan: Plan, rank: int, phase: str) -> str:
    """Where in the rank's list the phase is: its second compute, one amid step 3, its last."""
    if phase == "save":
        return "save 2"
    pattern = lowering.lower(plan)
    actions = list(pattern.actions(rank, STEPS * plan.microbatches))
    computes: list[Action] = [action for action in actions if action.kind in _COMPUTES]
    index = {"warm-up": 1, "steady": len(computes) // 2, "drain": len(computes) - 1}[phase]
    return str(computes[index])


Told = list[dict[str, Any]]
"""What each rank did; see faults.py."""


def spec(
    folder: Path, plan: Plan, *words: str, fault: dict[str, Any] | None = None, attempt: int = 0
) -> dict[str, Any]:
    """One launch of `plan` into `folder`/run; `words` come behind the others and so count."""
    ranks = len(plan.cluster.gpus)
    file = folder / f"plan{ranks}.json"
    file.write_text(plan.to_json())
    given = ["--plan", str(file), "--steps", str(STEPS), "--timeout", f"{TIMEOUT_S}s", *words]
    given += ["--out", str(folder / "run")] if "--resume" not in words else []
    return {
        "ranks": ranks,
        "words": given,
        "fault": fault,
        "attempt": attempt,
        "folder": str(folder),
    }


def launched(*specs: dict[str, Any], timeout_s: float = 240) -> list[Told]:
    """One launch after the other."""
    script = Path(__file__).with_name("faults.py")
    lines = printed(script, json.dumps(specs), timeout_s=timeout_s)
    told: list[Told] = json.loads(lines[-1])
    return told
