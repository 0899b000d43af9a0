"""`pipeplan remat`: what to recompute and to offload so that one device's budget holds."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from pipeplan.cli import common, flags, output, progress, remat_curve, remat_graph, remat_states
from pipeplan.units import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeplan.chain import Chain
    from pipeplan.operator_graph import OperatorGraph
    from pipeplan.remat import Costs, HostLink, Rematerialization

_EXAMPLE = """\
pipeplan remat chain.json --budget 8GiB
pipeplan remat chain.json --budget 8GiB --method rotor --slots 1000 -o schedule.txt
pipeplan remat chain.json --budget 8GiB --host-bandwidth 12GB/s --picture memory.png
pipeplan remat chain.json --budget 8GiB --host-bandwidth 12GB/s --curve 9 --json
pipeplan remat graph.json --budget 8GiB --curve 9 --curve-picture curve.png
pipeplan remat my:task --offload states --budget 8GB --host-memory 64GB --host-bandwidth 9GB/s"""

METHODS = (
    "auto", "rotor", "revolve", "periodic", "keep-all", "pofo", "swap", "dynprog", "greedy",
    "vdnn", "autoswap", "tflms", "exact",
)  # fmt: skip
"""What `--method` takes for a chain; written out so that help needs no numpy."""
SLOTS = 500


def add(verbs: common.Verbs) -> None:
    """The verb and its flags."""
    verb = common.add_verb(
        verbs,
        "remat",
        run,
        "plan what one device recomputes and offloads to keep a budget",
        _EXAMPLE,
    )
    verb.add_argument(
        "chain",
        metavar="FILE",
        help="chain.json, or graph.json of profile --operators; - is stdin; with --offload a task",
    )
    verb.add_argument(
        "--budget",
        type=common.size,
        required=True,
        metavar="SIZE",
        help="bytes of the device, weights, gradients and optimizer states included",
    )
    verb.add_argument(
        "--method",
        choices=dict.fromkeys((*METHODS, *remat_graph.METHODS)),
        default="auto",
        metavar="METHOD",
        help="auto takes the fastest; the reference lists all (auto)",
    )
    verb.add_argument(
        "--slots",
        type=common.count(2, 10_000),
        metavar="N",
        help="memory units of the dynamic programs: more is finer, slower (500; pofo: 50)",
    )
    verb.add_argument(
        "--time-limit",
        type=common.limit,
        metavar="TIME",
        help=f"of a search in a graph of operators ({remat_graph.SECONDS}s)",
    )
    verb.add_argument(
        "--host-bandwidth",
        type=common.bandwidth,
        metavar="RATE",
        help="of the way to the host, such as 12GB/s or inf; without it nothing is offloaded",
    )
    verb.add_argument(
        "--host-duplex",
        choices=("half", "full"),
        help="half: one transfer at a time; full: one each way (half; full with --offload states)",
    )
    verb.add_argument(
        "--picture",
        type=common.file,
        metavar="FILE",
        help="draw memory over time (.png, .svg)",
    )
    verb.add_argument(
        "--curve",
        type=common.count(2, 100),
        metavar="N",
        help="also run every method at N budgets from the smallest to all that is kept",
    )
    verb.add_argument(
        "--curve-picture",
        type=common.file,
        metavar="FILE",
        help="draw that curve (.png, .svg), of 9 budgets by default",
    )
    verb.add_argument(
        "-o", "--output", type=common.file, metavar="FILE", help="write the schedule; - is stdout"
    )
    verb.add_argument("--force", action="store_true", help="replace the file if it exists")
    remat_states.add(verb)


@flags.errors_as_flags(flags.of_remat)
def run(args: argparse.Namespace) -> int:
    """Plan the chain or the graph in `args.chain` within `args.budget`."""
    from pipeplan.chain import Chain

    _check_outputs(args)
    if args.offload:
        return remat_states.run(args)
    remat_states.check_absent(args)
    read = _read(args.chain)
    return _run_chain(args, read) if isinstance(read, Chain) else remat_graph.run(args, read)


def _read(path: str) -> Chain | OperatorGraph:
    """What is in the file, told apart by its format.

    Raises:
        InputError: if it is neither.
    """
    from pipeplan.chain import Chain
    from pipeplan.operator_graph import OperatorGraph

    return common.read_either(path, OperatorGraph, Chain)


def _run_chain(args: argparse.Namespace, chain: Chain) -> int:
    from pipeplan.remat import from_chain, rematerialize_chain

    _check(args)
    costs = from_chain(chain)
    channel = _channel(args)
    slots = args.slots or SLOTS
    common.say(f"planning {counted(costs.layers, 'layer')}")
    heard = progress.timed()
    found = rematerialize_chain(costs, args.budget, args.method, slots, channel, heard)
    if args.output:
        output.write(args.output, found.schedule.to_text(), args.force)
    if args.picture:
        from pipeplan.report.budget import draw_memory

        draw_memory(found, args.chain, args.picture)
    if not args.json and args.output != "-":
        _present(costs, found)
        sys.stdout.flush()  # a curve takes minutes
    points = _curve(args, costs, channel)
    if args.output == "-":
        return 0
    if args.json:
        common.emit(_figures(costs, found) | ({"curve": points} if points else {}))
    else:
        _list(points)
    common.then(f"in Python: {_call(found, sum(layer.optimizer_bytes for layer in chain.layers))}")
    return 0


def _check(args: argparse.Namespace) -> None:
    """Refuse what means nothing for a chain.

    Raises:
        InputError: names the flag.
    """
    from pipeplan.errors import InputError

    if args.time_limit is not None:
        raise InputError("--time-limit: got a chain, need a graph of operators. Leave it out.")
    if args.method not in METHODS:
        raise InputError(
            f"--method: got {args.method} with a chain, need one of {', '.join(METHODS)}."
        )


def _check_outputs(args: argparse.Namespace) -> None:
    """Refuse what could not be written, or would not be.

    Raises:
        InputError: names it.
    """
    from pipeplan.errors import InputError

    for picture in (args.picture, args.curve_picture):
        output.check_ending(picture)
    files = (args.output, args.picture, args.curve_picture)
    output.check_outputs(files, args.force, [args.chain])
    if args.output == "-" and args.curve and not args.curve_picture:
        raise InputError("--curve: got -o -, need stdout for the curve. Give -o a file.")


def _call(found: Rematerialization, optimizer_bytes: int) -> str:
    """What trains a module within the same budget; optimizers are not among what it measures."""
    choices = [f"budget={found.budget}"]
    if optimizer_bytes:
        choices.append(f"reserve={optimizer_bytes}")
    if found.outcome.host_peak_bytes:
        choices.append("offload=True")
    return f"pipeplan.rematerialize(module, sample, {', '.join(choices)})"


def _channel(args: argparse.Namespace) -> HostLink | None:
    from pipeplan.errors import InputError
    from pipeplan.remat import HostLink

    if args.host_bandwidth is None:
        if args.host_duplex is not None:
            raise InputError("--host-duplex: got no --host-bandwidth, need it too.")
        return None
    return HostLink(args.host_bandwidth.bytes_per_s, args.host_duplex == "full")


def _curve(
    args: argparse.Namespace, costs: Costs, channel: HostLink | None
) -> list[remat_curve.Point]:
    """Drawn where asked for."""
    if not args.curve and not args.curve_picture:
        return []
    from pipeplan.remat import CURVE, OFFLOADING, budgets, curve

    def find(method: str, limits: Sequence[int]) -> list[int | None]:
        common.say(f"curve: {method}")
        found = curve(costs, limits, args.slots or SLOTS, channel, (method,))[method]
        return [None if each is None else each.outcome.makespan_ns for each in found]

    methods = [each for each in CURVE if channel is not None or each not in OFFLOADING]
    count = args.curve or remat_curve.BUDGETS
    limits, times = remat_curve.by_method(methods, lambda: budgets(costs, channel, count), find)
    points = remat_curve.points(limits, times)
    remat_curve.draw(args.chain, points, args.curve_picture)
    return points


def _list(points: list[remat_curve.Point]) -> None:
    from pipeplan.units import format_bytes, format_ns

    for point in points:
        times = [
            f"{name} {'-' if time is None else format_ns(time)}"
            for name, time in point.items()
            if name != "budget_bytes"
        ]
        print(f"{format_bytes(point['budget_bytes'] or 0)}: {', '.join(times)}")


def _figures(costs: Costs, found: Rematerialization) -> dict[str, object]:
    return {
        "method": found.method,
        "budget_bytes": found.budget,
        "peak_bytes": found.outcome.peak_bytes,
        "static_bytes": costs.static,
        "makespan_ns": found.outcome.makespan_ns,
        "compute_ns": costs.compute,
        "idle_ns": found.outcome.idle_ns,
        "host_peak_bytes": found.outcome.host_peak_bytes,
        "steps": [
            {
                "op": str(step.op),
                "start_ns": step.start_ns,
                "end_ns": step.end_ns,
                "bytes": step.bytes,
                "moved_bytes": step.moved,
                "host_bytes": step.host_bytes,
            }
            for step in found.outcome.steps
        ],
    }


def _present(costs: Costs, found: Rematerialization) -> None:
    from pipeplan.units import format_bytes, format_ns

    outcome = found.outcome
    extra = outcome.makespan_ns / costs.compute - 1 if costs.compute else 0.0
    print(
        f"{found.method}: {format_ns(outcome.makespan_ns)} a micro-batch,"
        f" {extra:.1%} over running every layer once;"
        f" peak {format_bytes(outcome.peak_bytes)} of {format_bytes(found.budget)}"
        f" at {outcome.peak_step.op}, {format_bytes(costs.static)} of it always there"
    )
