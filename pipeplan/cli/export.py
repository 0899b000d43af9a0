"""`pipeplan export`: a plan as a file that another tool reads."""

from __future__ import annotations

import argparse

from pipeplan.cli import common, helptext, output
from pipeplan.units import counted

_EXAMPLE = """\
pipeplan export plan.json --format torch-csv -o schedule.csv
pipeplan export plan.json --format megatron -o -"""

FORMATS = ("torch-csv", "torchtitan", "megatron", "deepspeed")
"""Those of `pipeplan.exporters`, which is not imported to parse a command."""


def add(verbs: common.Verbs) -> None:
    """The verb and its flags."""
    text = "write a flush plan for another tool: torch's schedule, or where others cut the model"
    verb = common.add_verb(verbs, "export", run, text, _EXAMPLE)
    verb.add_argument("plan", metavar="PLAN", help="plan.json; - is stdin")
    kind = verb.add_argument("--format", choices=FORMATS, required=True, help="who reads it")
    helptext.detail(kind, "See [Use a plan in other tools](../how-to/export.md).")
    common.add_output(verb, "FILE")


def run(args: argparse.Namespace) -> int:
    """Write `args.plan` in the format, and say which rank is which GPU."""
    from pipeplan.exporters import FORMATS, rank_gpus
    from pipeplan.plan import Plan

    output.check_output(args.output, args.force, [args.plan])
    plan = common.read(Plan, args.plan)
    text = FORMATS[args.format](plan)
    output.write(args.output, text, args.force)
    ranks = rank_gpus(plan)
    if ranks != tuple(range(len(plan.cluster.gpus))):
        told = ", ".join(f"rank {rank} is GPU {gpu}" for rank, gpu in enumerate(ranks))
        common.say(f"note: ranks are GPUs in the order of their first stages: {told}")
    if args.output == "-":
        return 0
    if args.json:
        common.emit({"file": args.output, "format": args.format, "rank_gpus": ranks})
    else:
        print(
            f"{args.output}: {counted(len(ranks), 'rank')}, {counted(len(plan.stages), 'stage')},"
            f" {counted(plan.microbatches, 'micro-batch')} per step"
        )
    if args.format == "torchtitan":
        common.then("pipeplan export {} --format torch-csv -o schedule.csv", args.plan)
    return 0
