"""DeepSpeed's `PipelineModule.parts`: where each stage begins in the list of layers, and its end.

`parts[s]` to `parts[s + 1] - 1` are the layers of rank s. DeepSpeed has no argument for them; a
class that sets them takes six lines (docs/how-to/export.md). The order of computes is DeepSpeed's
own, 1F1B.
"""

from __future__ import annotations

import json
from itertools import accumulate

from pipeplan.errors import InputError
from pipeplan.exporters.expressible import check, placement
from pipeplan.exporters.modules import stage_modules
from pipeplan.plan import Plan


def deepspeed(plan: Plan) -> str:
    """The first layer of each stage and the number of layers, as JSON; a layer is a module.

    Raises:
        InvalidPlanError: if the plan breaks a rule.
        InputError: if a rank has several stages, or a cut lies inside of a module.
    """
    check(plan, "DeepSpeed")
    gpus = [stage.gpu for stage in plan.stages]
    if len(set(gpus)) < len(gpus):
        raise InputError(
            f"export to DeepSpeed: stages on ranks {placement(plan)}: need one stage on each rank."
            " Plan again with --method contiguous."
        )
    stages = stage_modules(plan, "DeepSpeed")
    return json.dumps([0, *accumulate(map(len, stages))]) + "\n"
