"""Cuts, recomputation and offloading decided together, against everything less.

    python -m benchmarks.joint [--only resnet18 gpt96] [--gpus 4,8] [--time-limit 60s]

prints one table and what it says, and keeps each row in benchmarks/results/joint.json (run again,
it goes on where it was stopped). Instances are those of benchmarks/planner.py in the exact memory
model, a part of them unless `--only` says otherwise, with shares 0.6, 0.5, 0.4 and 0.3 of what the
best contiguous 1F1B plan needs without a limit.
`none`, `joint` and `offload` have the same time each; full and two-phase need no search. `offload`
is joint with a host: 12 GB/s both ways at once for each GPU, and more memory than it can use.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from rich.table import Table

from benchmarks.planner_cases import cases
from benchmarks.store import Store
from pipeplan.cli import common
from pipeplan.cluster import Host
from pipeplan.compare import again
from pipeplan.errors import InfeasibleError, TimeLimitError
from pipeplan.plan import Plan
from pipeplan.planner import Config, solve
from pipeplan.testing.instances import Case, chain_of

RESULT = Path(__file__).parent / "results" / "joint.json"
SHARES = (0.6, 0.5, 0.4, 0.3)
SOME = ("resnet18", "resnet50", "gpt24", "llama24")
KINDS = ("none", "full", "two_phase", "joint", "offload")
GROWING = ("none", "joint", "offload")
"""Each may do all that the one before it may."""
HOST = Host(memory_bytes=2**50, bandwidth_bytes_per_s=12 * 10**9)
COLUMNS = (
    "chain", "L", "P", "f", "load", "none", "full", "two-phase", "joint", "offload", "k", "S",
    "gap", "contiguous", "s",
)  # fmt: skip
TOLERANCE = 1e-9
Row = dict[str, Any]


def measured(case: Case, seconds: float, known: Row) -> Row:
    """One instance: every way's period but those that are `known`, and the bounds that hold.

    Each search starts from the plan of the one before it (`GROWING`), as --resume does: so it is
    never longer. Where one of them is missing, all of them are measured.
    """
    config = Config(time_limit_s=seconds, gap=0.005)
    # The others' plans are found by bisection alone: time must not make them weaker.
    ample = replace(config, time_limit_s=60.0)
    chain, cluster = chain_of(case.name), case.cluster
    hosted = cluster.model_copy(update={"host": HOST})
    load = sum(layer.forward_ns + layer.backward_ns for layer in chain.layers)
    joint = replace(config, recompute="auto")
    asked = {
        "none": (cluster, config),
        "joint": (cluster, joint),
        "offload": (hosted, replace(joint, offload="auto")),
    }
    facts: Row = {
        "name": case.name,
        "layers": len(chain.layers),
        "gpus": case.gpus,
        "fraction": case.fraction,
        "memory_bytes": cluster.gpus[0].memory_bytes,
        "load_ns": load / case.gpus,
        "time_limit_s": seconds,
    }
    found: Row = {
        "full": known.get("full") or _timed(lambda: again.full(chain, cluster, ample))[1],
        "two_phase": known.get("two_phase")
        or _timed(lambda: again.two_phase(chain, cluster, ample))[1],
    }
    plan: Plan | None = None
    for name in GROWING:
        machines, limits = asked[name]
        way = partial(solve, chain, machines, replace(limits, resume=plan))
        row = known.get(name) if all(each in known for each in GROWING) else None
        if row is None:
            better, row = _timed(way)
            plan = better or plan
        found[name] = row
    return facts | {name: found[name] for name in KINDS}


def _timed(way: Callable[[], Plan | None]) -> tuple[Plan | None, Row]:
    """The plan that is found, and its figures."""
    begin, work = time.monotonic(), time.process_time()
    plan: Plan | None = None
    try:
        plan = way()
        found: Row = {"status": "none fits"} if plan is None else _figures(plan)
    except (InfeasibleError, TimeLimitError) as error:
        found = {"status": type(error).__name__}
    return plan, found | {
        "seconds": round(time.monotonic() - begin, 2),
        "cpu_seconds": round(time.process_time() - work, 2),
    }


def _figures(plan: Plan) -> Row:
    bounds = plan.solver.bounds
    return {
        "status": plan.solver.status,
        "period_ns": float(plan.period_per_microbatch),
        "k": plan.k,
        "stages": len(plan.stages),
        "host_bytes": sum(row.host_bytes for row in plan.memory),
        "again_ns": sum(
            plan.chain.layers[layer].forward_ns
            for stage in plan.stages
            if stage.remat
            for first, last in stage.remat.recompute
            for layer in range(first, last + 1)
        ),
        "bound_ns": float(Fraction(*bounds.any)) if bounds.any else None,
        "bound_contiguous_ns": float(Fraction(*bounds.contiguous)) if bounds.contiguous else None,
    }


def table(rows: Sequence[Row]) -> Table:
    """Periods in ms per micro-batch; gaps of joint above the load and the contiguous bound."""
    made = Table(box=None, pad_edge=False, title="ms per micro-batch", title_justify="left")
    for name in COLUMNS:
        made.add_column(name, justify="left" if name == "chain" else "right")
    for row in rows:
        made.add_row(*cells(row))
    return made


def cells(row: Row) -> list[str]:
    """The line of one instance."""
    joint = row["joint"]
    return [
        row["name"],
        *(f"{row[key]:g}" for key in ("layers", "gpus", "fraction")),
        _ms(row["load_ns"]),
        *(_ms(row[kind].get("period_ns")) for kind in KINDS),
        str(joint.get("k", "-")),
        str(joint.get("stages", "-")),
        _above(joint, "bound_ns"),
        _above(joint, "bound_contiguous_ns"),
        f"{joint['seconds']:.0f}",
    ]


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value / 1e6:.3f}"


def _above(joint: Row, bound: str) -> str:
    if joint.get(bound) is None:
        return "-"
    return f"{joint['period_ns'] / joint[bound] - 1:.1%}"


def summary(rows: Sequence[Row]) -> Iterator[str]:
    """What is asked for, line by line: never worse, how much shorter, how many more plans."""
    for kind in ("none", "full", "two_phase"):
        yield _worse("joint", kind, rows)
    yield _worse("offload", "joint", rows)
    for share in (*sorted({row["fraction"] for row in rows}, reverse=True), None):
        members = [row for row in rows if row["fraction"] == (share or row["fraction"])]
        if share is None:
            members = [row for row in rows if row["fraction"] <= 0.5]
        yield _line("f <= 0.5" if share is None else f"f = {share:g}", members)
    slowest = max(row["joint"]["seconds"] for row in rows)
    yield f"joint takes at most {slowest:.0f} s"


def _worse(mine: str, kind: str, rows: Sequence[Row]) -> str:
    pairs = [(_period(row, kind), _period(row, mine), row) for row in rows]
    worse = [
        f"{row['name']} {row['gpus']} {row['fraction']:g}"
        for other, own, row in pairs
        if other is not None and (own is None or own > other * (1 + TOLERANCE))
    ]
    known = sum(other is not None for other, _, _ in pairs)
    listed = f": {', '.join(worse)}" if worse else ""
    return f"{mine} worse than {kind} on {len(worse)} of {known}{listed}"


def _line(what: str, rows: Sequence[Row]) -> str:
    joint = [_period(row, "joint") for row in rows]
    parts = []
    for kind in ("none", "full", "two_phase"):
        pairs = [(_period(row, kind), mine) for row, mine in zip(rows, joint, strict=True)]
        ratios = [mine / other for other, mine in pairs if other is not None and mine is not None]
        if ratios:
            parts.append(f"{geometric_mean(ratios):.3f} of {kind} ({len(ratios)})")
    pairs = [(mine, _period(row, "offload")) for row, mine in zip(rows, joint, strict=True)]
    away = [other / mine for mine, other in pairs if mine is not None and other is not None]
    if away:
        parts.append(f"offload {geometric_mean(away):.3f} of joint ({len(away)})")
    loads = [mine / row["load_ns"] for row, mine in zip(rows, joint, strict=True) if mine]
    parts.append(f"{geometric_mean(loads):.3f} of load ({len(loads)})" if loads else "no plan")
    without = [mine for row, mine in zip(rows, joint, strict=True) if _period(row, "none") is None]
    gained = sum(mine is not None for mine in without)
    return f"{what}: joint is {', '.join(parts)}; plans where none had: {gained} of {len(without)}"


def _period(row: Row, kind: str) -> float | None:
    value: float | None = row[kind].get("period_ns")
    return value


def main() -> int:
    """Measure what is missing, print everything chosen; 1 if joint is worse than two-phase."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=SOME, metavar="NAME", help="chains")
    parser.add_argument("--gpus", type=common.several(common.count()), default=(4, 8))
    parser.add_argument("--fractions", type=common.several(float), default=SHARES)
    parser.add_argument("--time-limit", type=common.duration, default=6 * 10**9, metavar="TIME")
    parser.add_argument("--out", type=Path, default=RESULT, metavar="FILE", help="%(default)s")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--show", action="store_true", help="only print what the file has")
    what.add_argument("--anew", action="store_true", help="measure all, whatever the file has")
    args = parser.parse_args()
    store, seconds = Store(args.out), args.time_limit / 1e9
    chosen = [
        case
        for case in cases(args.only, args.gpus, args.fractions)
        if case.memory_model == "exact"
    ]
    for case in chosen:
        row = store.rows.get(case.key, {}).get("row", {})
        known = row if row.get("time_limit_s") == seconds and not args.anew else {}
        if not args.show and any(kind not in known for kind in KINDS):
            store.put(case.key, "row", measured(case, seconds, known))
            print(case.key, file=sys.stderr, flush=True)
    rows = [store.rows[case.key]["row"] for case in chosen if case.key in store.rows]
    rows = [row for row in rows if all(kind in row for kind in KINDS)]
    console = common.screen()
    console.width = max(console.width, 140)
    console.print(table(rows))
    lines = list(summary(rows)) if rows else ["nothing measured"]
    print("", *lines, sep="\n")
    worse = [line for line in lines if line.startswith("joint worse than two_phase on 0 ")]
    return int(bool(rows) and not worse)


if __name__ == "__main__":
    sys.exit(main())
