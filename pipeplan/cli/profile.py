"""`pipeplan profile`: a task's chain, measured or estimated; the stages of a plan, measured."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from pipeplan.cli import common, flags, output

if TYPE_CHECKING:
    from pipeplan.chain import Chain
    from pipeplan.devices import Device
    from pipeplan.stage_profile import StageProfile

_EXAMPLE = """\
pipeplan profile examples/gpt2_stdlib.py:task -o chain.json
pipeplan profile my.training:task --repeats 50 --companions 1 -o chain.json
pipeplan profile "pipeplan.tasks:gpt2(size='medium')" --mode fake --device h100 -o chain.json
pipeplan profile my.training:task --operators -o graph.json
pipeplan profile pipeplan.tasks:gpt2 --options -o chain.json
pipeplan profile "pipeplan.tasks:transformers(name_or_folder='my-llama')" -o chain.json
pipeplan profile --stages plan.json -o stages.json"""

_MEASURING = {"repeats": 20, "warmup": 3, "threads": 1, "companions": 0}
"""What the flags of measuring mean where they are not given."""
_DEVICE = "a100"


def add(verbs: common.Verbs) -> None:
    """The verb and its flags."""
    text = "measure or estimate time and bytes of each layer of a PyTorch task"
    verb = common.add_verb(verbs, "profile", run, text, _EXAMPLE)
    verb.add_argument(
        "task",
        metavar="TASK",
        nargs="?",
        help="package.module:function or file.py:function that returns a pipeplan.Task (python -m"
        " pydoc pipeplan.Task); with --stages the plan's, if left out",
    )
    verb.add_argument(
        "--mode",
        choices=("measured", "fake"),
        default="measured",
        help="fake: exact bytes and estimated times, without memory or computing (measured)",
    )
    verb.add_argument(
        "--stages",
        type=common.file,
        metavar="PLAN",
        help="measure the fused stages of this plan, for plan --refine",
    )
    verb.add_argument(
        "--operators",
        action="store_true",
        help="the operators of forward, loss and backward as one graph, for remat",
    )
    verb.add_argument("--seed", type=common.count(0, 2**31 - 1), default=0, metavar="N")
    verb.add_argument(
        "--max-layers",
        type=common.count(),
        metavar="N",
        help="merge layers until there are no more than these, the cheapest to lose first",
    )
    verb.add_argument(
        "--options",
        action="store_true",
        help="also find programs over operators by which layers keep less and take longer",
    )
    verb.add_argument(
        "--time-limit",
        type=common.limit,
        metavar="TIME",
        help="of the search of --options (120s)",
    )
    _add_measuring(verb.add_argument_group("measuring"))
    _add_estimating(verb.add_argument_group("estimating (--mode fake)"))
    common.add_output(verb, "CHAIN")


def _add_measuring(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--repeats",
        type=common.count(),
        metavar="N",
        help="micro-batches timed; times are their medians (20)",
    )
    group.add_argument("--warmup", type=common.count(0), metavar="N", help="before (3)")
    group.add_argument(
        "--threads", type=common.count(), metavar="N", help="as each rank will use (1)"
    )
    group.add_argument(
        "--companions",
        type=common.count(0, 1024),
        metavar="N",
        help="processes that compute meanwhile, one per other rank on this machine (0)",
    )


def _add_estimating(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--device",
        metavar="NAME",
        help=f"v100, a100, h100, h200, cpu, or one of --device-table ({_DEVICE})",
    )
    group.add_argument(
        "--device-table",
        type=common.file,
        metavar="FILE",
        help="figures of more devices (docs/explanation/capture.md)",
    )


def run(args: argparse.Namespace) -> int:
    """Profile `args.task`, or the stages of `args.stages`."""
    code = args.task.partition(":")[0] if args.task else None
    output.check_output(args.output, args.force, [code, args.stages, args.device_table])
    _check(args)
    if args.stages:
        return _stages(args)
    if args.operators:
        return _operators(args)
    from pipeplan.capture import estimate, profile

    device = None
    if args.mode == "fake":
        device = _device(args)
        common.say(
            f"times are estimates for {device.name}; bytes are those of torch's CPU kernels"
        )
        chain = estimate(
            args.task, device, seed=args.seed, max_layers=args.max_layers, progress=common.say
        )
    else:
        chain = profile(
            args.task,
            seed=args.seed,
            max_layers=args.max_layers,
            **_measuring(args),
            progress=common.say,
        )
    if args.options:
        chain = _with_options(args, chain, device)
    common.save_chain(args, chain)
    return 0


def _with_options(args: argparse.Namespace, chain: Chain, device: Device | None) -> Chain:
    """`chain` with options of its layers."""
    from pipeplan.layer_options import SECONDS, add_options

    seconds = SECONDS if args.time_limit is None else args.time_limit / 1e9
    return add_options(
        chain,
        args.task,
        device=device,
        seed=args.seed,
        threads=_measuring(args)["threads"],
        max_layers=args.max_layers,
        seconds=seconds,
        progress=common.say,
    )


def _check(args: argparse.Namespace) -> None:
    """Refuse flags that would mean nothing.

    Raises:
        InputError: names the flag.
    """
    from pipeplan.errors import InputError

    fake = args.mode == "fake"
    if fake:
        flags.refuse(args, _MEASURING, "is for measuring, got --mode fake. Leave it out.")
    else:
        flags.refuse(args, ("device", "device_table"), "is for estimating, need --mode fake.")
    if args.stages and args.max_layers is not None:
        raise InputError("--max-layers: the plan has its layers, got --stages. Leave it out.")
    _check_options(args)
    if args.stages and (fake or args.companions is not None):
        raise InputError("--stages: stages are measured alone; leave out --mode and --companions.")
    for name in ("stages", "max_layers", "companions", "warmup", "options"):
        if args.operators and getattr(args, name) not in (None, False):
            flag = name.replace("_", "-")
            raise InputError(f"--{flag}: got --operators, which has no such part. Leave it out.")
    if not args.stages and args.task is None:
        raise InputError(
            "profile: got no TASK, need one, or --stages PLAN. A TASK is a function that returns"
            " a pipeplan.Task: `python -m pydoc pipeplan.Task` says what is in it."
        )


def _check_options(args: argparse.Namespace) -> None:
    """Refuse `--options` and its time limit where they mean nothing.

    Raises:
        InputError: names the flag.
    """
    from pipeplan.errors import InputError

    if args.stages and args.options:
        raise InputError("--options: is for the layers of a task, got --stages. Leave one out.")
    if args.time_limit is not None and not args.options:
        raise InputError("--time-limit: is for --options, which is not given. Leave it out.")


def _measuring(args: argparse.Namespace) -> dict[str, int]:
    return {
        name: usual if getattr(args, name) is None else getattr(args, name)
        for name, usual in _MEASURING.items()
    }


def _device(args: argparse.Namespace) -> Device:
    """The device of `--device`; the table's only one, or the usual one, where it is not given.

    Raises:
        InputError: if there is none of that name, or the table cannot be read.
    """
    from pipeplan.devices import DeviceTable, find_device

    own = common.read(DeviceTable, args.device_table).devices if args.device_table else ()
    only = own[0].name if len(own) == 1 else _DEVICE
    return find_device(args.device or only, own)


def _operators(args: argparse.Namespace) -> int:
    from pipeplan import units
    from pipeplan.rehearsal import estimate_operators, profile_operators

    if args.mode == "fake":
        device = _device(args)
        common.say(f"times are estimates for {device.name}")
        graph = estimate_operators(args.task, device, seed=args.seed, progress=common.say)
    else:
        given = {name: getattr(args, name) for name in ("repeats", "threads")}
        chosen = {name: value for name, value in given.items() if value is not None}
        graph = profile_operators(args.task, seed=args.seed, **chosen, progress=common.say)
    output.write(args.output, graph.to_json(), args.force)
    if args.output == "-":
        return 0
    figures = {
        "operators": len(graph.operations),
        "forward_operators": graph.forwards,
        "compute_ns": graph.compute_ns,
        "static_bytes": graph.static_bytes,
    }
    if args.json:
        common.emit({"graph": args.output, "name": graph.name, **figures})
    else:
        print(
            f"{args.output}: {graph.name}, {len(graph.operations)} operators,"
            f" {units.format_ns(graph.compute_ns)} a micro-batch,"
            f" {units.format_bytes(graph.static_bytes)} always there"
        )
    common.then("pipeplan remat {} --budget 8GiB --curve 9", args.output)
    return 0


def _stages(args: argparse.Namespace) -> int:
    from pipeplan.capture import profile_stages
    from pipeplan.plan import Plan

    plan = common.read(Plan, args.stages)
    flags = _measuring(args)
    del flags["companions"]
    found = profile_stages(args.task, plan, seed=args.seed, **flags, progress=common.say)
    output.write(args.output, found.to_json(), args.force)
    if args.output == "-":
        return 0
    if args.json:
        common.emit({"stages": args.output, "task": found.task, "measured": len(found.stages)})
    else:
        _show(found, plan.chain)
    common.then("pipeplan plan CHAIN --refine {} --gpus ... -o refined.json", args.output)
    return 0


def _show(found: StageProfile, chain: Chain) -> None:
    """What the chain says of each stage beside what was measured."""
    from pipeplan.report import remat
    from pipeplan.report.tables import PredictedMeasured, comparison_table

    rows = []
    for stage in found.stages:
        name = remat.named([stage.layers])
        inside = chain.layers[stage.layers[0] : stage.layers[1] + 1]
        forward = sum(layer.forward_ns for layer in inside)
        backward = sum(layer.backward_ns for layer in inside)
        predicted = stage.predicted_forward_peak_bytes, stage.predicted_backward_peak_bytes
        rows += [
            PredictedMeasured(f"{name}: forward", "ns", forward, stage.forward_ns),
            PredictedMeasured(f"{name}: backward", "ns", backward, stage.backward_ns),
            PredictedMeasured(
                f"{name}: forward peak", "bytes", predicted[0], stage.forward_peak_bytes
            ),
            PredictedMeasured(
                f"{name}: backward peak", "bytes", predicted[1], stage.backward_peak_bytes
            ),
        ]
    common.screen().print(comparison_table(rows, "stages, fused"))
