"""The CSV of computes that torch's `_PipelineScheduleRuntime._load_csv(file)` reads.

A row per rank; a cell per forward (F), backward (B) or half of one (I, W), such as `2F0`: stage,
kind, micro-batch. torch itself adds messages, the gathering of sharded weights (UNSHARD) and the
reduction of gradients, each version those that it knows (torch.distributed.pipelining.schedules).
"""

from __future__ import annotations

import csv
import io

from pipeplan.exporters.expressible import check, check_untied, rank_gpus
from pipeplan.lowering import lower
from pipeplan.plan import Plan
from pipeplan.program import ActionKind

_COMPUTES = (ActionKind.F, ActionKind.B, ActionKind.I, ActionKind.W)


def torch_csv(plan: Plan) -> str:
    """One step of `plan`, from fill to drain: what each rank computes, in order.

    Raises:
        InvalidPlanError: if the plan breaks a rule.
        InputError: if torch's runtime cannot do what the plan does.
    """
    check(plan, "torch")
    check_untied(plan, "torch")
    step = lower(plan).unroll(plan.microbatches)
    text = io.StringIO(newline="")
    rows = csv.writer(text, lineterminator="\n")
    for gpu in rank_gpus(plan):
        rows.writerow(action for action in step.ranks[gpu] if action.kind in _COMPUTES)
    return text.getvalue()
