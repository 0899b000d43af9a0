"""`pipeplan compare --launch`: the compared plans as processes of this machine."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipeplan import units
from pipeplan.cli import common, helptext

if TYPE_CHECKING:
    from pipeplan.chain import Chain
    from pipeplan.cluster import Cluster
    from pipeplan.compare import Comparison, LaunchedPoint, LaunchRequest
    from pipeplan.jobs import Tell


def add_flags(verb: argparse.ArgumentParser) -> None:
    """The flags that say whether and how plans are launched."""
    launch = verb.add_argument(
        "--launch",
        choices=("sleep", "real"),
        help="then run the plans that fit here, in turns: asleep, or the task",
    )
    helptext.detail(
        launch,
        "One process per GPU on this machine, rows of `--semantics`. `sleep`: ops and transfers"
        " take their planned time, times `--time-scale`, and nothing is computed; `real`: the"
        " chain's task trains on as many cores, and bytes are counted",
    )
    verb.add_argument(
        "--launch-rounds", type=common.count(1, 99), metavar="N", help="runs of each plan (3)"
    )
    scale = verb.add_argument(
        "--time-scale",
        type=common.flag(units.parse_factor),
        metavar="X",
        help="with --launch sleep: planned times X-fold",
    )
    helptext.detail(
        scale,
        "Without it, so much that the ops of each plan sleep 10 ms on average, or more. The report"
        " divides measured times by X",
    )


def request(
    args: argparse.Namespace, chain: Chain, clusters: Sequence[Cluster]
) -> LaunchRequest | None:
    """What is launched behind the comparison, if anything.

    Raises:
        InputError: if flags contradict each other, or the plans cannot run here.
    """
    from pipeplan.compare import LaunchRequest
    from pipeplan.errors import InputError

    if args.launch is None:
        for name in ("launch_rounds", "time_scale"):
            if getattr(args, name) is not None:
                flag = name.replace("_", "-")
                raise InputError(f"got --{flag} without --launch, need it too, or neither")
        return None
    asked = LaunchRequest(args.launch, args.launch_rounds or 3, args.time_scale)
    asked.check(chain, clusters)
    return asked


def launch(
    comparison: Comparison,
    args: argparse.Namespace,
    asked: LaunchRequest,
    tell: Tell,
) -> list[LaunchedPoint]:
    """Every point's plans in turns; Ctrl-C keeps what was measured."""
    from pipeplan.compare import launch_point

    launched: list[LaunchedPoint] = []
    count = len(comparison.points)
    for number, point in enumerate(comparison.points):
        done = launch_point(point, args.semantics, asked, _part(tell, number, count))
        launched.append(done)
        if done.interrupted:
            common.say("interrupted: runs that had ended count, the others are left out")
            break
    tell(1.0, "done")
    return launched


def _part(tell: Tell, number: int, count: int) -> Tell:
    """Tells of one of `count` equal parts of the work."""
    return lambda share, what: tell((number + share) / count, what)


def show(launched: Sequence[LaunchedPoint]) -> None:
    """A table for each point."""
    from pipeplan.compare.launched_table import launched_table, remarks, title

    for each in launched:
        common.screen().print("", title(each), launched_table(each), sep="\n")
        for remark in remarks(each):
            print(f"  {remark}")


def draw(comparison: Comparison, launched: Sequence[LaunchedPoint], folder: Path) -> None:
    """A picture for each point."""
    from pipeplan.compare.files import launched_name
    from pipeplan.compare.launched_table import bars, title
    from pipeplan.report.bars import draw_bars

    for each in launched:
        if not each.done:
            continue
        name, heading = launched_name(comparison, each), f"{comparison.chain.name}\n{title(each)}"
        for ending in ("png", "svg"):
            draw_bars(heading, bars(each), folder / f"{name}.{ending}")
