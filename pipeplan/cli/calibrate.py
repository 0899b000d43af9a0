"""`pipeplan calibrate`: what links and actions cost between processes of this machine."""

from __future__ import annotations

import argparse

from pipeplan import units
from pipeplan.cli import common, output
from pipeplan.units import counted

_EXAMPLE = "pipeplan calibrate --ranks 4 --memory 16GiB -o cluster.json"


def add(verbs: common.Verbs) -> None:
    """The verb and its flags."""
    text = "measure links and per-action overhead of this machine"
    verb = common.add_verb(verbs, "calibrate", run, text, _EXAMPLE)
    verb.add_argument("--ranks", type=common.count(1, units.MAX_GPUS), required=True, metavar="N")
    verb.add_argument(
        "--memory", type=common.size, required=True, metavar="SIZE", help="per rank, not measured"
    )
    common.add_output(verb, "CLUSTER")


def run(args: argparse.Namespace) -> int:
    """Calibrate with `args.ranks` processes of this machine; torchrun does it across machines."""
    from pipeplan.calibrate.here import measure_here
    from pipeplan.report import tables

    output.check_output(args.output, args.force)
    common.say(f"measuring messages and actions between {counted(args.ranks, 'process')}")
    cluster = measure_here(args.ranks, args.memory)
    output.write(args.output, cluster.to_json(), args.force)
    if args.output == "-":
        return 0
    if args.json:
        common.emit({"cluster": args.output, **cluster.model_dump(mode="json", by_alias=True)})
    else:
        print(f"{args.output}: {tables.machines_line(cluster)}")
    common.then("pipeplan plan chain.json --cluster {} -o plan.json", args.output)
    return 0
