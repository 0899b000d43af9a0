"""The names of modules by stage: torchtitan's `parallelism.module_fqns_per_model_part`.

One list per stage, as JSON, which is TOML and Python as well. torchtitan (`pipeline_module_split`)
keeps of a model's members, and of the members of its rows, those that are named. It puts stage s
on rank s mod P, or forth and back for V-shaped schedules, each rank with as many stages.
"""

from __future__ import annotations

import json

from pipeplan.errors import InputError
from pipeplan.exporters.expressible import check, check_untied, is_looped, is_v_shaped, placement
from pipeplan.exporters.modules import stage_modules
from pipeplan.plan import Plan


def torchtitan(plan: Plan) -> str:
    """The modules of each stage; the order of computes goes with them as `torch_csv`.

    Raises:
        InvalidPlanError: if the plan breaks a rule.
        InputError: if torchtitan cannot cut or place the model as the plan does.
    """
    check(plan, "torchtitan")
    check_untied(plan, "torchtitan")
    if not (is_looped(plan) or is_v_shaped(plan)):
        raise InputError(
            f"export to torchtitan: stages on ranks {placement(plan)}: need as many stages on each"
            " rank, in turn (0 1 0 1) or forth and back (0 1 1 0). Plan again with --method"
            " contiguous or --pin, or build the stages yourself for torch-csv."
        )
    stages = stage_modules(plan, "torchtitan")
    for name in (name for stage in stages for name in stage):
        first, _, rest = name.partition(".")
        if rest and not rest.isdigit():
            raise InputError(
                f"export to torchtitan: module {name!r}: got one inside of {first!r}, need members"
                " of the model, or of its rows (layers.0): torchtitan cuts nowhere else. Build"
                " the stages yourself for torch-csv."
            )
    return "[\n" + ",\n".join(f"  {json.dumps(stage)}" for stage in stages) + "\n]\n"
