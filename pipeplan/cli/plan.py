"""`pipeplan plan`: the best plan found for a chain on a cluster, with its proof."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING

from pipeplan.cli import common, flags, output, sweep
from pipeplan.cli.machines import add_machines, clusters
from pipeplan.cli.show import figures, present

if TYPE_CHECKING:
    from pipeplan.planner import Config

_EXAMPLE = """\
pipeplan plan chain.json --gpus 4 --memory 16GiB --bandwidth 12GB/s -o plan.json
pipeplan plan chain.json --cluster cluster.json --semantics flush --microbatches 16 -o plan.json
pipeplan plan chain.json --gpus 8 --memory 24GiB --bandwidth inf --k auto --time-limit 5min \
--gap 0.5% -o plan.json
pipeplan plan chain.json --gpus 4 --memory 8GiB --bandwidth 12GB/s --recompute auto \
--offload auto --host-bandwidth 12GB/s --host-memory 128GiB -o plan.json
pipeplan plan chain.json --gpus 2,4,8 --memory 8GiB..32GiB --bandwidth 12GB/s -o sweep"""

_PIN = re.compile(r"\s*(?P<layer>.+?)\s*=\s*(?P<gpu>\d{1,6})\s*(?:,|$)")


def add(verbs: common.Verbs) -> None:
    """The verb and its flags."""
    text = (
        "find a plan with the shortest period that memory allows, and a bound on any other; with"
        " several numbers of GPUs or memories one for each, into a folder"
    )
    verb = common.add_verb(verbs, "plan", run, text, _EXAMPLE)
    verb.add_argument("chain", metavar="CHAIN", help="chain.json; - is stdin")
    verb.add_argument(
        "--refine",
        type=common.file,
        metavar="STAGES",
        help="correct the chain by what profile --stages measured",
    )
    add_machines(verb, several=True)
    what = verb.add_argument_group("what to plan for")
    _add_what(what)
    _add_pins(what)
    _add_remat(what)
    _add_how(verb.add_argument_group("how to search; Ctrl-C keeps the best plan so far"))
    common.add_output(verb, "PLAN", "file to write, a folder for several machines; - is stdout")


def _add_what(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--semantics",
        choices=("2bw", "flush"),
        default="2bw",
        help="2bw: no drain, gradients one step stale; flush: trains as one process would (2bw)",
    )
    group.add_argument(
        "--microbatches",
        type=common.count(),
        metavar="M",
        help="per optimizer step (what the plan needs)",
    )
    group.add_argument(
        "--memory-model",
        choices=("exact", "paper"),
        default="exact",
        help="exact: every byte the runtime holds; paper: the source's formulas (exact)",
    )
    group.add_argument(
        "--k", type=_k, default="auto", metavar="K", help="micro-batches per period, or auto"
    )
    group.add_argument(
        "--method",
        choices=("auto", "contiguous", "paper-ilp"),
        default="auto",
        help="contiguous: one run of layers per GPU; paper-ilp: the source's ILP, for small chains"
        " under --memory-model paper --duplex half (auto)",
    )


def _add_pins(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--pin",
        type=_pins,
        default={},
        metavar="LAYER=GPU,..",
        help="layers that must sit on a GPU: LAYER is an index, a name, or a..b for all from a to"
        " b; GPU an index; not with --recompute auto",
    )


def _pins(text: str) -> dict[int | str, int]:
    """GPUs by layer, as they are written."""
    found: dict[int | str, int] = {}
    place = 0
    while place < max(1, len(text)):
        part = _PIN.match(text, place)
        if part is None or part["layer"] in found:
            raise argparse.ArgumentTypeError(
                f"got {text!r}, need LAYER=GPU,LAYER=GPU,.. with each layer once, as in 0=0,5..7=1"
            )
        found[part["layer"]], place = int(part["gpu"]), part.end()
    return found


def _add_remat(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--recompute",
        choices=("off", "auto"),
        default="off",
        help="auto: stages may compute layers again in their backward to need less memory (off)",
    )
    group.add_argument(
        "--offload",
        choices=("off", "auto"),
        default="off",
        help="auto: what stages keep may wait in the host's memory; needs the host flags (off)",
    )


def _add_how(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--time-limit", type=common.duration, default=60 * 10**9, metavar="TIME", help="(60s)"
    )
    group.add_argument(
        "--gap", type=common.share, default=0.01, metavar="SHARE", help="stop at this gap (1%%)"
    )
    group.add_argument(
        "--resume",
        type=common.file,
        metavar="PLAN",
        help="start from this plan of the same chain; - is stdin",
    )
    group.add_argument(
        "--coarsen",
        type=_coarsen,
        default="auto",
        metavar="N",
        help="search on N groups of layers; auto: only above 256 layers; off (auto)",
    )
    group.add_argument("--seed", type=common.count(0, 2**31 - 1), default=0, metavar="N")
    group.add_argument(
        "--workers", type=common.count(1, 256), metavar="N", help="threads (one per core)"
    )
    group.add_argument(
        "--deterministic", action="store_true", help="same seed, same plan: limits count work"
    )


def _coarsen(text: str) -> int | str:
    return text if text in ("auto", "off") else common.count(1, 100_000)(text)


def _k(text: str) -> int | str:
    return "auto" if text == "auto" else common.count(1, 16)(text)


@flags.told(flags.of_config)
def run(args: argparse.Namespace) -> int:
    """Plan, save, show, replay; a folder of plans where several machines are named."""
    from pipeplan.chain import Chain
    from pipeplan.cli import progress
    from pipeplan.lowering import lower
    from pipeplan.planner import solve
    from pipeplan.report import tables
    from pipeplan.simulator import check
    from pipeplan.stages import StageProfile, refine

    points = list(clusters(args))
    folder = output.folder(args.output, args.force) if len(points) > 1 else None
    if folder is None:
        output.check_output(args.output, args.force)
    chain = common.read(Chain, args.chain)
    if args.refine:
        chain = refine(chain, common.read(StageProfile, args.refine))
    config = _config(args)
    if folder is not None:
        return sweep.run(chain, points, config, folder, as_json=args.json)
    common.say(f"machines: {tables.machines_line(points[0])}")
    with progress.search() as listener:
        plan = solve(chain, points[0], config, progress=listener)
    output.write(args.output, plan.to_json(), args.force)
    check(plan, lower(plan))
    if args.output == "-":
        return 0
    if args.json:
        common.emit({"plan": args.output, **figures(plan)})
    else:
        present(plan, common.screen())
        print("verified: every rule kept; replayed: period, step and peaks as planned")
    common.then(f"pipeplan simulate {args.output}")
    return 0


def _config(args: argparse.Namespace) -> Config:
    from pipeplan.plan import Plan
    from pipeplan.planner import Config

    return Config(
        semantics=args.semantics,
        microbatches=args.microbatches,
        memory_model=args.memory_model,
        k=args.k,
        method=args.method,
        time_limit_s=args.time_limit / 1e9,
        gap=args.gap,
        seed=args.seed,
        workers=args.workers,
        deterministic=args.deterministic,
        coarsen=args.coarsen,
        recompute=args.recompute,
        offload=args.offload,
        pins=args.pin,
        resume=common.read(Plan, args.resume) if args.resume else None,
    )
