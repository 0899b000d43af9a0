"""`pipeplan import`: a chain from a profile that another tool wrote."""

from __future__ import annotations

import argparse
from pathlib import Path

from pipeplan.cli import common, output

_EXAMPLE = """\
pipeplan import graph.txt --format pipedream --microbatch-size 64 -o chain.json
pipeplan import layers.csv --format csv --input-bytes 4MiB -o chain.json"""


def add(verbs: common.Verbs) -> None:
    """The verb and its flags."""
    verb = common.add_verb(
        verbs, "import", run, "make a chain from a PipeDream profile or a CSV of layers", _EXAMPLE
    )
    verb.add_argument("profile", metavar="FILE", help="the profile; - is stdin")
    verb.add_argument("--format", choices=("pipedream", "csv"), required=True, help="its kind")
    verb.add_argument("--name", help="name of the chain (the file's name)")
    verb.add_argument("--microbatch-size", type=common.count(), default=1, metavar="N")
    verb.add_argument(
        "--input-bytes", type=common.size, metavar="SIZE", help="size of the model's input (csv)"
    )
    common.add_output(verb, "CHAIN")


def run(args: argparse.Namespace) -> int:
    """Convert `args.profile`."""
    from pipeplan import importers
    from pipeplan.errors import InputError

    output.check_output(args.output, args.force, [args.profile])
    text = common.read_text(args.profile)
    where = common.named(args.profile)
    name = args.name or Path(where).stem
    size = args.microbatch_size
    if args.format == "csv":
        chain = importers.csv_layers(
            text, name, args.input_bytes or 0, microbatch_size=size, where=where
        )
    elif args.input_bytes is not None:
        raise InputError("--input-bytes: a PipeDream profile says it itself. Leave it out.")
    else:
        chain = importers.pipedream(text, name=name, microbatch_size=size, where=where)
    common.save_chain(args, chain)
    return 0
