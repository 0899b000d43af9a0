"""`pipeplan show`: a plan as text, as JSON, as a picture; a chain as a table."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from pipeplan.cli import common, memory, output, page

if TYPE_CHECKING:
    from rich.console import Console

    from pipeplan.chain import Chain
    from pipeplan.plan import Plan

_EXAMPLE = """\
pipeplan show chain.json
pipeplan show plan.json
pipeplan show plan.json --html plan.html
pipeplan show plan.json --svg plan.svg --png plan.png
pipeplan show plan.json --memory-picture memory.png --csv memory.csv"""


_TEXT = (
    "print a plan: one period, bound and gap, where each byte of its GPUs is;"
    " or the layers of a chain"
)


def add(verbs: common.Verbs) -> None:
    """The verb and its flags."""
    verb = common.add_verb(verbs, "show", run, _TEXT, _EXAMPLE)
    verb.add_argument("plan", metavar="FILE", help="plan.json or chain.json; - is stdin")
    for kind in ("png", "svg"):
        verb.add_argument(
            f"--{kind}", type=common.file, metavar="FILE", help=f"also draw the plan into a {kind}"
        )
    memory.add_flags(verb)
    page.add_flags(verb)
    verb.add_argument("--force", action="store_true", help="replace files that exist")


def run(args: argparse.Namespace) -> int:
    """Show what is in `args.plan`; a plan need not be valid, only well-formed."""
    from pipeplan.chain import Chain
    from pipeplan.report.memory import planned_memory
    from pipeplan.report.page import plan_page
    from pipeplan.verifier import verify

    files = [file for file in (args.png, args.svg) if file]
    output.check_ending(args.png, ("png",))
    output.check_ending(args.svg, ("svg",))
    memory.check(args, [*files, *page.checked(args)], [args.plan])
    plan = _read(args.plan)
    if isinstance(plan, Chain):
        return _show_chain(plan, args)
    if files:
        from pipeplan.report.gantt import draw_gantt

        for file in files:
            draw_gantt(plan, file)
            common.say(f"drawn: {file}")
    report = planned_memory(plan)
    memory.write(args, report)
    page.write(args, lambda: plan_page(plan, report))
    if memory.fills_stdout(args):
        return 0
    if args.json:
        told = None if report is None else report.model_dump(mode="json")
        common.emit({**figures(plan), "memory_report": told})
    else:
        present(plan, common.screen())
        memory.present(report)
    broken = len(verify(plan))
    if broken:
        rules = "a rule" if broken == 1 else f"{broken} rules"
        name = common.named(args.plan)
        common.say(f"warning: {name} breaks {rules}: nothing of what is shown need hold")
    common.then("pipeplan verify {}", args.plan)
    return 0


def _read(path: str) -> Plan | Chain:
    """The plan or chain in `path`, told apart by its format.

    Raises:
        InputError: if it is neither.
    """
    from pipeplan.chain import Chain
    from pipeplan.plan import Plan

    return common.read_either(path, Chain, Plan)


def _show_chain(chain: Chain, args: argparse.Namespace) -> int:
    """The layers, with the numbers and names that `plan --pin` takes."""
    from pipeplan.errors import InputError
    from pipeplan.report.layers import layer_table

    if args.png or args.svg or args.csv or args.memory_picture or page.checked(args):
        raise InputError(
            f"{args.plan}: is a chain, need a plan to draw. Leave out --png, --svg,"
            " --memory-picture, --csv, --html, --data."
        )
    if args.json:
        common.emit(chain.model_dump(mode="json", by_alias=True))
    else:
        common.screen().print(layer_table(chain))
        if chain.agreement or chain.doubt:
            print(chain.doubt or (chain.agreement and chain.agreement.told))
    return 0


_ALONE = (
    "note: one GPU waits for no other: --semantics flush needs one version of the weights, and no"
    " gradient is stale"
)


def present(plan: Plan, console: Console) -> None:
    """The grid of one period, the figures, the memory table, what 2BW means for training."""
    from pipeplan.report import grid, tables

    console.print(grid.grid(plan, console.width), soft_wrap=True)
    console.print(tables.headline(plan))
    console.print(tables.memory_table(plan))
    if plan.semantics == "2bw":
        console.print(tables.STALENESS)
    if plan.chain.doubt:
        console.print(f"note: {plan.chain.doubt}")
    gpus = len(plan.cluster.gpus)
    if idle := gpus - len({stage.gpu for stage in plan.stages}):
        console.print(f"note: {idle} of {gpus} GPUs hold no layer; each has a rank all the same")
    if gpus == 1 and plan.semantics == "2bw" and plan.cluster.host is None:
        console.print(_ALONE)


def figures(plan: Plan) -> dict[str, object]:
    """The figures of a plan as plain data, for `--json`."""
    from pipeplan.report import tables

    bound = tables.plan_bound(plan)
    contiguous = plan.solver.contiguous_period_ns
    return {
        "semantics": plan.semantics,
        "microbatches": plan.microbatches,
        "k": plan.k,
        "period_ns": plan.period_ns,
        "period_per_microbatch_ns": float(plan.period_per_microbatch),
        "bound_ns": None if bound is None else float(bound),
        "gap": plan.solver.gap,
        "status": plan.solver.status,
        "contiguous_ns": None if contiguous is None else float(tables.fraction(contiguous)),
        "step_ns": plan.step_ns,
        "samples_per_second": tables.samples_per_second(plan),
        "times": plan.chain.mode,
        "agreement": plan.chain.agreement and plan.chain.agreement.model_dump(mode="json"),
        "stages": [stage.model_dump(mode="json") for stage in plan.stages],
        "memory": [row.model_dump(mode="json") for row in plan.memory],
    }
