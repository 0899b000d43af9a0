"""`pipeplan remat`: which layers of a chain to run twice so that one device's budget holds."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from pipeplan.cli import common

if TYPE_CHECKING:
    from pipeplan.remat import Costs, Rematerialization

_EXAMPLE = """\
pipeplan remat chain.json --budget 8GiB
pipeplan remat chain.json --budget 8GiB --method rotor --slots 1000 -o schedule.txt"""

METHODS = (
    "auto", "rotor", "revolve", "periodic", "keep-all", "pofo", "swap", "dynprog", "greedy",
    "vdnn", "autoswap", "tflms", "exact",
)  # fmt: skip
"""What `--method` takes; written out so that help needs no numpy."""


def add(verbs: common.Verbs) -> None:
    """The verb and its flags."""
    verb = common.add_verb(
        verbs, "remat", run, "plan what one device recomputes to keep its memory budget", _EXAMPLE
    )
    verb.add_argument("chain", metavar="CHAIN", help="chain.json; - is stdin")
    verb.add_argument(
        "--budget",
        type=common.size,
        required=True,
        metavar="SIZE",
        help="bytes of the device, weights, gradients and optimizer states included",
    )
    verb.add_argument(
        "--method", choices=METHODS, default="auto", help="auto takes the fastest (auto)"
    )
    verb.add_argument(
        "--slots",
        type=common.count(2, 10_000),
        default=500,
        metavar="N",
        help="memory units of the dynamic program: more is finer and slower (500)",
    )
    verb.add_argument("-o", "--output", metavar="FILE", help="write the schedule; - is stdout")
    verb.add_argument("--force", action="store_true", help="replace the file if it exists")


def run(args: argparse.Namespace) -> int:
    """Plan `args.chain` within `args.budget`."""
    from pipeplan.chain import Chain
    from pipeplan.remat import from_chain, rematerialize_chain

    if args.output:
        common.check_output(args.output, args.force)
    costs = from_chain(common.read(Chain, args.chain))
    found = rematerialize_chain(costs, args.budget, args.method, args.slots)
    if args.output:
        common.write(args.output, found.schedule.to_text())
    if args.output == "-":
        return 0
    if args.json:
        common.emit(_figures(costs, found))
    else:
        _present(costs, found)
    return 0


def _figures(costs: Costs, found: Rematerialization) -> dict[str, object]:
    return {
        "method": found.method,
        "budget_bytes": found.budget,
        "peak_bytes": found.outcome.peak_bytes,
        "static_bytes": costs.static,
        "makespan_ns": found.outcome.makespan_ns,
        "compute_ns": costs.compute,
        "steps": [
            {
                "op": str(step.op),
                "start_ns": step.start_ns,
                "end_ns": step.end_ns,
                "bytes": step.bytes,
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
