"""`pipeplan plan`: the best plan found for a chain on a cluster, with its proof."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING

from pipeplan.cli import common, flags, helptext, microbatch_sizes, output, sweep
from pipeplan.cli.machines import add_machines, clusters
from pipeplan.cli.show import figures, present

if TYPE_CHECKING:
    from pipeplan.planner import Config

_EXAMPLE = "pipeplan plan chain.json --gpus 4 --memory 16GiB --bandwidth 12GB/s -o plan.json"

_USAGE = "pipeplan plan CHAIN.. --gpus N --memory SIZE --bandwidth RATE -o PLAN [flags]"

_PIN = re.compile(r"\s*(?P<layer>.+?)\s*=\s*(?P<gpu>\d{1,6})\s*(?:,|$)")


def add(verbs: common.Verbs) -> None:
    """The verb and its flags."""
    text = "find the plan of shortest period that memory allows, and a bound on any other plan"
    verb = common.add_verb(verbs, "plan", run, text, _EXAMPLE, _USAGE)
    chains = verb.add_argument(
        "chains", metavar="CHAIN", nargs="+", help="chain.json, or one for each size; - is stdin"
    )
    helptext.detail(
        chains,
        "Several chains are one model profiled with micro-batches of several sizes: the plan with"
        " the most samples per second is written."
        " See [Choose the micro-batch size](../how-to/what-if.md#choose-the-micro-batch-size).",
    )
    common.add_output(verb, "PLAN", "file to write, a folder for several machines; - is stdout")
    refine = verb.add_argument(
        "--refine",
        type=common.file,
        metavar="STAGES",
        help="correct the chain by what profile --stages measured",
    )
    helptext.detail(refine, "See [Profile a model](../how-to/profile.md).")
    add_machines(verb, several=True)
    what = verb.add_argument_group("what to plan for")
    _add_what(what)
    _add_remat(what)
    _add_how(verb.add_argument_group("how to search; Ctrl-C keeps the best plan so far"))


def _add_what(group: argparse._ArgumentGroup) -> None:
    semantics = group.add_argument(
        "--semantics",
        choices=("2bw", "flush"),
        default="2bw",
        help="flush: as one process; 2bw: no drain, one step stale (2bw)",
    )
    helptext.detail(
        semantics,
        "`flush` drains the pipeline before each update and trains as one process does. `2bw`"
        " keeps two weight versions, never drains, and its gradients are one step stale.",
    )
    group.add_argument(
        "--microbatches",
        type=common.count(),
        metavar="M",
        help="per step (2 a GPU, under flush 4; at least 8)",
    )
    group.add_argument(
        "--batch",
        type=common.count(),
        metavar="N",
        help="samples per optimizer step, in place of M",
    )
    model = group.add_argument(
        "--memory-model",
        choices=("exact", "paper"),
        default="exact",
        help="exact: all bytes of the runtime; paper: published formulas (exact)",
    )
    helptext.detail(model, "Sections 4 and 5 of [the model](model.md).")
    k = group.add_argument(
        "--k", type=_k, default="auto", metavar="K", help="micro-batches per period, or auto"
    )
    helptext.detail(k, "`auto` tries several and takes cycles of any length as they come.")
    method = group.add_argument(
        "--method",
        choices=("auto", "contiguous", "paper-ilp"),
        default="auto",
        metavar="METHOD",
        help="auto; contiguous: one stage per GPU; paper-ilp (auto)",
    )
    helptext.detail(
        method,
        "`paper-ilp` solves [the paper's ILP](paper-ilp.md) literally. It is for small chains"
        " under `--memory-model paper --duplex half`.",
    )
    pin = group.add_argument(
        "--pin",
        type=_pins,
        default={},
        metavar="LAYER=GPU,..",
        help="layers that must sit on a GPU: 0=0,5..7=1",
    )
    helptext.detail(
        pin,
        "LAYER is an index, a name, or a..b for all layers from a to b; GPU is an index. All"
        " layers pinned are [stages of your own](../how-to/resume.md). Pins do not go with"
        " `--recompute auto` or `--method paper-ilp`.",
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
    recompute = group.add_argument(
        "--recompute",
        choices=("off", "auto"),
        default="off",
        help="auto: backwards may recompute layers, which saves memory (off)",
    )
    helptext.detail(
        recompute,
        "The planner chooses the layers of each stage:"
        " [how they are chosen](../explanation/recomputation.md).",
    )
    offload = group.add_argument(
        "--offload",
        choices=("off", "auto", "states"),
        default="off",
        help="what may be on the host: activations, or optimizers' states (off)",
    )
    helptext.detail(
        offload,
        "It needs `--host-bandwidth` and `--host-memory`. `auto`: activations; optimizers' states"
        " where there is no plan without and `--host-update` is given. `states`: these alone, for"
        " the shortest step.",
    )


def _add_how(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--time-limit",
        type=common.duration,
        default=60 * 10**9,
        metavar="TIME",
        help="of the search (60s)",
    )
    group.add_argument(
        "--gap", type=common.share, default=0.01, metavar="SHARE", help="stop at this gap (1%%)"
    )
    resume = group.add_argument(
        "--resume",
        type=common.file,
        metavar="PLAN",
        help="start from this plan of the same chain; - is stdin",
    )
    helptext.detail(resume, "See [Go on from a plan](../how-to/resume.md).")
    coarsen = group.add_argument(
        "--coarsen",
        type=_coarsen,
        default="auto",
        metavar="N",
        help="search on N groups of layers, or off (auto: above 256 layers)",
    )
    helptext.detail(
        coarsen, "`--recompute auto` and `--offload auto` always search the layers themselves."
    )
    group.add_argument(
        "--seed", type=common.count(0, 2**31 - 1), default=0, metavar="N", help="of the search (0)"
    )
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


@flags.errors_as_flags(flags.of_config)
def run(args: argparse.Namespace) -> int:
    """Plan, save, show, replay; a folder of plans where several machines are named."""
    from pipeplan.chain import Chain
    from pipeplan.cli import progress
    from pipeplan.lowering import lower
    from pipeplan.microbatch_sizes import plan_sizes
    from pipeplan.report import tables
    from pipeplan.simulator import check
    from pipeplan.stage_profile import StageProfile, refine

    points = list(clusters(args))
    microbatch_sizes.check(args, len(points))
    folder = output.output_folder(args.output, args.force) if len(points) > 1 else None
    if folder is None:
        output.check_output(args.output, args.force, [*args.chains, args.cluster, args.refine])
    chains = [common.read(Chain, name) for name in args.chains]
    if args.refine:
        chains = [refine(chains[0], common.read(StageProfile, args.refine))]
    config = _config(args)
    if folder is not None:
        return sweep.run(chains[0], points, config, folder, as_json=args.json)
    common.say(f"machines: {tables.machines_line(points[0])}")
    with progress.search() as listener:
        sized = plan_sizes(chains, points[0], config, args.batch, listener)
    plan = microbatch_sizes.best(sized)
    output.write(args.output, plan.to_json(), args.force)
    check(plan, lower(plan))
    if args.output == "-":
        return 0
    sizes = {"sizes": microbatch_sizes.figures(sized)} if len(chains) > 1 else {}
    if args.json:
        common.emit({"plan": args.output, **figures(plan), **sizes})
    else:
        if sizes:
            microbatch_sizes.present(sized)
        present(plan, common.screen())
        print("verified: every rule kept; replayed: period, step and peaks as planned")
    common.then("pipeplan simulate {}", args.output)
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
