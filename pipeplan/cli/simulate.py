"""`pipeplan simulate`: lower a plan, replay it, compare what happens with what it claims."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from pipeplan.cli import common, output

if TYPE_CHECKING:
    from pipeplan.plan import Plan
    from pipeplan.simulator import Simulation

_EXAMPLE = """\
pipeplan simulate plan.json
pipeplan simulate plan.json --clock eager --microbatches 64 --trace trace.json"""


def add(verbs: common.Verbs) -> None:
    """The verb and its flags."""
    verb = common.add_verb(
        verbs, "simulate", run, "replay a plan from fill to drain, by time and by byte", _EXAMPLE
    )
    verb.add_argument("plan", metavar="PLAN", help="plan.json; - is stdin")
    verb.add_argument(
        "--clock",
        choices=("plan", "eager"),
        default="plan",
        help="start ops when planned, or as early as inputs and order allow (plan)",
    )
    verb.add_argument(
        "--microbatches", type=common.count(), metavar="N", help="how many to replay"
    )
    verb.add_argument(
        "--trace", type=common.file, metavar="FILE", help="write a Chrome/Perfetto trace"
    )
    verb.add_argument("--force", action="store_true", help="replace a trace that exists")


def run(args: argparse.Namespace) -> int:
    """Replay `args.plan`; 4 where it does not do what it claims."""
    from pipeplan.errors import InvalidPlanError
    from pipeplan.lowering import lower
    from pipeplan.plan import Plan
    from pipeplan.report.page.schedule import replayed
    from pipeplan.report.trace import chrome_trace
    from pipeplan.simulator import disagreements, simulate

    if args.trace:
        output.check_output(args.trace, args.force, [args.plan])
    plan = common.read(Plan, args.plan)
    simulation = simulate(plan, lower(plan), clock=args.clock, microbatches=args.microbatches)
    if args.trace:
        levels = {gpu: simulation.levels(gpu) for gpu in range(len(plan.cluster.gpus))}
        trace = chrome_trace(plan, replayed(simulation.spans()), levels)
        output.write(args.trace, trace, args.force)
        common.say(f"trace: {args.trace} (open it in Perfetto or chrome://tracing)")
    alone = args.trace == "-"  # nothing may stand behind it on stdout
    whole = args.clock == "plan" and args.microbatches is None
    found = list(disagreements(plan, simulation)) if whole else []
    if args.json and not alone:
        common.emit(_figures(simulation))
    elif not alone:
        _present(plan, simulation)
    if found:
        lines = "\n".join(f"  {each}" for each in found)
        raise InvalidPlanError(f"{args.plan}: the replay differs from the plan:\n{lines}", found)
    common.tell_unmarked(plan.chain)
    size = len(plan.cluster.gpus)
    common.then(
        f"torchrun --nproc-per-node {size} -m pipeplan.launch --plan {{}} --out run", args.plan
    )
    return 0


def _figures(simulation: Simulation) -> dict[str, object]:
    period = simulation.period_ns
    return {
        "clock": simulation.clock,
        "microbatches": simulation.microbatches,
        "period_ns": None if period is None else float(period),
        "step_ns": simulation.step_ns,
        "makespan_ns": simulation.makespan_ns,
        "in_flight": simulation.in_flight,
        "bubble": simulation.bubble,
        "peak_bytes": [row.peak_bytes for row in simulation.memory],
    }


def _present(plan: Plan, simulation: Simulation) -> None:
    from pipeplan.report import tables

    title = f"{simulation.microbatches} micro-batches on the {simulation.clock} clock"
    planned = {row.gpu: row.peak_bytes for row in plan.memory}  # a wrong plan may lack some
    rows = [
        tables.PredictedMeasured(
            f"peak of {name}", "bytes", planned[index], simulation.memory[index].peak_bytes
        )
        for index, name in enumerate(plan.cluster.labels)
        if index in planned
    ]
    if simulation.period_ns is not None:
        period = float(simulation.period_ns)
        rows.insert(0, tables.PredictedMeasured("period", "ns", plan.period_ns, period))
    names = ("plan", "replay", "difference")
    common.screen().print(tables.comparison_table(rows, title, names))
    if simulation.period_ns is None:
        common.say("too few micro-batches for a steady period: peaks may lie below the plan's")
