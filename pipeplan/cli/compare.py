"""`pipeplan compare`: our plan beside PipeDream and everyone else, by the same judge."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from pipeplan.cli import common, flags, helptext, launched, output, page
from pipeplan.cli.machines import add_machines, clusters

if TYPE_CHECKING:
    from pipeplan.compare import Comparison, LaunchedPoint, Request

_FILE = "comparison.json"
"""What `--out` always has."""
_EXAMPLE = """\
pipeplan compare chain.json --gpus 4,8 --memory 8GiB,16GiB --bandwidth 12GB/s --out comparison
pipeplan compare chain.json --gpus 4 --memory 8GiB --bandwidth 12GB/s --html comparison.html
pipeplan compare chain.json --cluster cluster.json --semantics flush --microbatches 32 --json"""

_USAGE = "pipeplan compare CHAIN --gpus N,.. --memory SIZE,.. --bandwidth RATE [--out DIR] [flags]"


def add(verbs: common.Verbs) -> None:
    """The verb and its flags."""
    text = "plan beside PipeDream, GPipe, interleaved and other schedules, judged alike"
    verb = common.add_verb(verbs, "compare", run, text, _EXAMPLE, _USAGE)
    verb.add_argument("chain", metavar="CHAIN", help="chain.json; - is stdin")
    add_machines(verb, several=True)
    verb.add_argument(
        "--semantics", choices=("2bw", "flush"), default="2bw", help="of our plans (2bw)"
    )
    verb.add_argument(
        "--microbatches", type=common.count(1, 1024), metavar="M", help="per update (4 per GPU)"
    )
    verb.add_argument(
        "--memory-model", choices=("exact", "paper"), default="exact", help="for all (exact)"
    )
    recompute = verb.add_argument(
        "--recompute",
        choices=("off", "auto"),
        default="off",
        help="auto: our plans may recompute layers (off)",
    )
    helptext.detail(recompute, "Further rows say what recomputing is worth.")
    verb.add_argument(
        "--offload",
        choices=("off", "auto"),
        default="off",
        help="auto: one more row, of plans that may also offload (off)",
    )
    verb.add_argument(
        "--time-limit",
        type=common.duration,
        default=25 * 10**9,
        metavar="TIME",
        help="of the planner, per point (25s)",
    )
    verb.add_argument(
        "--search-limit",
        type=common.duration,
        default=60 * 10**9,
        metavar="TIME",
        help="of PipeDream's search, per number of GPUs (1min)",
    )
    verb.add_argument(
        "--jobs", type=common.count(1, 256), metavar="N", help="searches at once (one per core)"
    )
    verb.add_argument(
        "--workers",
        type=common.count(1, 256),
        metavar="N",
        help="threads of each search of ours (cores / jobs)",
    )
    verb.add_argument(
        "--seed", type=common.count(0, 2**31 - 1), default=0, metavar="N", help="(0)"
    )
    launched.add_flags(verb)
    verb.add_argument(
        "--out", type=common.file, metavar="DIR", help="folder for pictures, JSON and plans"
    )
    page.add_flags(verb)
    verb.add_argument("--force", action="store_true", help="replace files that exist")


@flags.errors_as_flags(flags.of_config)
def run(args: argparse.Namespace) -> int:
    """Compare, show, save; then launch, show, save."""
    from pipeplan.compare import compare
    from pipeplan.compare.page import comparison_page

    request = _request(args)
    asked = launched.request(args, request.chain, request.clusters)
    folder = None if args.out is None else output.output_folder(args.out, args.force)
    saved = [] if folder is None else [str(folder / _FILE)]
    output.check_outputs([*saved, *page.checked(args)], args.force, [args.chain, args.cluster])
    with _progress() as tell:
        comparison = compare(request, tell)
    _show(comparison, args.json)
    if folder is not None:
        _save(comparison, folder)
    runs: list[LaunchedPoint] = []
    if asked is not None:
        with _progress() as tell:
            runs = launched.launch(comparison, args, asked, tell)
        if not args.json:
            launched.show(runs)
        if folder is not None:
            _write(comparison, runs, folder)
            launched.draw(comparison, runs, folder)
    if folder is not None:
        common.say(f"saved: {folder}/{_FILE}, plans and pictures")
    page.write(args, lambda: comparison_page(comparison, runs))
    if args.json:
        common.emit(_data(comparison, runs))
    return 0


def _show(comparison: Comparison, as_json: bool) -> None:
    """The tables, unless JSON follows, and what to know of them."""
    from pipeplan.compare.table import LEGEND, absences, loss, point_table

    for point in () if as_json else comparison.points:
        common.screen().print(point_table(comparison, point), "", sep="\n")
        for absent in absences(point):
            print(f"  {absent}")
    if not as_json:
        print(LEGEND)
    if comparison.left_out:
        common.say(f"interrupted, left out: {'; '.join(comparison.left_out)}")
    for cloud in comparison.clouds:
        if cloud.left_out:
            common.say(
                f"PipeDream's exhaustive search on {cloud.gpus} GPUs left out {cloud.left_out}"
                " partitions: give it more time (--search-limit)"
            )
    for point in comparison.points:
        if (line := loss(point)) is not None:
            common.say(line)


def _request(args: argparse.Namespace) -> Request:
    from pipeplan.chain import Chain
    from pipeplan.compare import Request
    from pipeplan.planner import Config
    from pipeplan.torch_schedules import TORCH_SCHEDULES

    chain = common.read(Chain, args.chain)
    points = tuple(clusters(args))
    cores = os.cpu_count() or 1
    jobs = args.jobs or min(cores, len(points))
    config = Config(
        semantics=args.semantics,
        microbatches=args.microbatches,
        memory_model=args.memory_model,
        time_limit_s=args.time_limit / 1e9,
        seed=args.seed,
        recompute=args.recompute,
        offload=args.offload,
        workers=args.workers or max(1, cores // jobs),
    )
    more = TORCH_SCHEDULES if args.semantics == "flush" else {}
    return Request(chain, points, config, args.search_limit / 1e9, jobs, more)


def _save(comparison: Comparison, folder: Path) -> None:
    from pipeplan.compare.files import pictures, plans
    from pipeplan.report.cloud import draw_cloud

    _write(comparison, (), folder)
    for name, plan in plans(comparison):
        output.write(str(folder / name), plan.to_json(), force=True)
    for name, picture in pictures(comparison):
        for ending in ("png", "svg"):
            draw_cloud(picture, folder / f"{name}.{ending}")


def _write(comparison: Comparison, runs: Sequence[LaunchedPoint], folder: Path) -> None:
    text = json.dumps(_data(comparison, runs), indent=1) + "\n"
    output.write(str(folder / _FILE), text, force=True)


def _data(comparison: Comparison, runs: Sequence[LaunchedPoint]) -> dict[str, object]:
    from pipeplan.compare import launched_table, table

    told = {"launched": launched_table.data(runs)} if runs else {}
    return {**table.data(comparison), **told}


@contextmanager
def _progress() -> Iterator[Callable[[float, str], None]]:
    """A bar on a terminal, a line per new phase in a log."""
    console = common.screen(to_stderr=True)
    if not console.is_terminal:
        yield _PhaseLog()
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("comparing", total=1.0)
        yield lambda share, what: bar.update(task, completed=share, description=what)


class _PhaseLog:
    """Says each new phase once."""

    def __init__(self) -> None:
        self._what = ""

    def __call__(self, share: float, what: str) -> None:
        if what != self._what:
            self._what = what
            common.say(f"{share:4.0%}  {what}")
