"""`pipeplan profile`: the measured chain of a task."""

from __future__ import annotations

import argparse

from pipeplan.cli import common

_EXAMPLE = """\
pipeplan profile examples/gpt2_stdlib.py:task -o chain.json
pipeplan profile my.training:task --repeats 50 --companions 1 -o chain.json"""


def add(verbs: common.Verbs) -> None:
    """The verb and its flags."""
    text = "measure time and bytes of each layer of a PyTorch task"
    verb = common.add_verb(verbs, "profile", run, text, _EXAMPLE)
    verb.add_argument("task", metavar="TASK", help="package.module:function or file.py:function")
    verb.add_argument("--seed", type=common.count(0, 2**31 - 1), default=0, metavar="N")
    verb.add_argument(
        "--repeats",
        type=common.count(),
        default=20,
        metavar="N",
        help="micro-batches timed; times are medians of the quietest five in a row (20)",
    )
    verb.add_argument("--warmup", type=common.count(0), default=3, metavar="N", help="before (3)")
    verb.add_argument(
        "--threads", type=common.count(), default=1, metavar="N", help="as each rank will use (1)"
    )
    verb.add_argument(
        "--companions",
        type=common.count(0, 1024),
        default=0,
        metavar="N",
        help="processes that compute meanwhile, one per other rank on this machine (0)",
    )
    common.add_output(verb, "CHAIN")


def run(args: argparse.Namespace) -> int:
    """Profile `args.task`."""
    from pipeplan.capture import profile

    common.check_output(args.output, args.force)
    chain = profile(
        args.task,
        seed=args.seed,
        repeats=args.repeats,
        warmup=args.warmup,
        threads=args.threads,
        companions=args.companions,
        progress=common.say,
    )
    common.save_chain(args, chain)
    return 0
