"""Our best plans, the bounds proven beside them, and everyone else, on computed networks.

    python -m benchmarks.planner [--only resnet18 gpt96] [--gpus 4,8] [--fractions 1.2,0.5]

prints one table, appends each row to benchmarks/results/planner.json when it is finished (run
again, it goes on where it was stopped) and says which targets are reached. Everything takes hours
on two cores; `--only`, `--gpus` and `--fractions` choose. A name that ends in .json is a file.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.planner_cases import FRACTIONS, cases
from benchmarks.planner_rows import Limits, parts
from benchmarks.planner_summary import REFUSED, cells, judged, summary, table
from benchmarks.store import Store
from pipeplan.cli import common
from pipeplan.errors import PipeplanError
from pipeplan.testing.instances import Case

RESULT = Path(__file__).parent / "results" / "planner.json"


def measure(store: Store, case: Case, limits: Limits, again: Sequence[str]) -> None:
    """The parts of a row that the store has not yet as asked, or that are wanted again."""
    row = store.rows.setdefault(case.key, {})
    for name, asked, part in parts(case, limits, row):
        known = row.get(name, {}).get("asked")
        if name in again or known != asked:
            store.put(case.key, name, part() | {"asked": asked})


def arguments() -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    several: Callable[[Callable[[str], object]], Callable[[str], object]] = common.several
    parser.add_argument("--only", nargs="+", default=(), metavar="NAME", help="chains")
    parser.add_argument("--gpus", type=several(common.count()), default=(), metavar="N,..")
    parser.add_argument("--fractions", type=several(float), default=FRACTIONS, metavar="F,..")
    time = common.duration
    parser.add_argument("--time-limit", type=time, metavar="TIME", help="of ours (the target's)")
    parser.add_argument("--gap", type=common.share, default=0.005, help="where ours stops (0.5%%)")
    parser.add_argument("--pipedream-time", type=time, metavar="TIME", help="with PipeDream")
    parser.add_argument(
        "--rival-time",
        type=time,
        metavar="TIME",
        help="for a faster plan of PipeDream",
    )
    parser.add_argument("--ilp-time", type=time, metavar="TIME", help="of the ILP (as ours)")
    parser.add_argument(
        "--ilp-layers", type=common.count(0), default=7, metavar="N", help="the longest (7)"
    )
    parser.add_argument("--out", type=Path, default=RESULT, metavar="FILE", help="%(default)s")
    parser.add_argument(
        "--again", action="store_true", help="measure our plans again where the file has them"
    )
    parser.add_argument("--show", action="store_true", help="only print what the file has")
    return parser.parse_args()


def main() -> int:
    """Measure what is missing, print everything chosen; 1 if a plan was refused by a voice."""
    args = arguments()
    limits = Limits(
        search_s=_seconds(args.time_limit),
        pipedream_s=_seconds(args.pipedream_time),
        rival_s=_seconds(args.rival_time),
        ilp_s=_seconds(args.ilp_time),
        ilp_layers=args.ilp_layers,
        gap=args.gap,
    )
    store = Store(args.out)
    chosen = list(cases(args.only, args.gpus, args.fractions))
    for index, case in enumerate(chosen):
        if args.show:
            break
        try:
            measure(store, case, limits, ("contiguous", "planner") if args.again else ())
        except PipeplanError as error:
            print(f"{case.key}: {error}", file=sys.stderr)
            return 1
        line = "  ".join(cells(store.rows[case.key]))
        print(f"{index + 1}/{len(chosen)}  {line}", file=sys.stderr, flush=True)
    rows = [store.rows[case.key] for case in chosen if "planner" in store.rows.get(case.key, {})]
    console = common.screen()
    console.width = max(console.width, 190)
    console.print(table(rows))
    print("", *summary(rows), sep="\n")
    return int(any(judged(row["planner"]) == REFUSED for row in rows))


def _seconds(nanoseconds: int | None) -> float | None:
    return None if nanoseconds is None else nanoseconds / 1e9


if __name__ == "__main__":
    sys.exit(main())
