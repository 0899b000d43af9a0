"""What each strategy and prover of the solver is worth: plans without it, and with it alone.

    python -m benchmarks.ablation [--work 10s] [--arms NAME ...] [--only-one] [--workers 2]

Every instance has room above its bound. Each is planned with everything, without each strategy
and prover in turn (leave one out), and with `--only-one` by each finder alone, on top of the
contiguous optimum and the bounds. Limits count work instead of time, so that the figures do not
depend on what else the machine does. Finished rows are kept in benchmarks/results/ablation.json:
run again, the benchmark goes on where it was stopped. The table says, for each arm, by how much
plans are longer without it (geometric mean), on how many rows by more than 1 %, how many plans
are no longer proven to be shortest, and by how much more they compute.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from rich.table import Table

from benchmarks.ablation_runs import CUT, EVERY, FINDERS, NONE, ONE, OTHERS, STEP, Mode, Run, runs
from benchmarks.store import Store
from pipeplan.cli import common
from pipeplan.errors import InfeasibleError, TimeLimitError
from pipeplan.ilp import Limits, Solution, solve
from pipeplan.plan import Improvement
from pipeplan.planner import Config
from pipeplan.planner.config import problem
from pipeplan.testing.instances import Case

RESULT = Path(__file__).parent / "results" / "ablation.json"
LEFT = RESULT.with_name("ablation_retired.json")
"""Rows of strategies that have left the solver, with those of everything as it was then."""
LOST = 0.01
"""A row is lost where the plan is longer by more than this."""
RETIRED = (
    "best chain", "guide", "neighbourhoods", "plain chain", "recompute kfkb", "restarts",
    "stage counts", "unrestricted",
)  # fmt: skip
"""Strategies that left the solver for what their rows of the table say."""


def solved(case: Case, mode: Mode, limits: Limits) -> tuple[dict[str, Any], Solution | None]:
    """The solution's figures, and the solution; an instance without one has no period."""
    config = Config(
        semantics="flush" if mode in STEP else "2bw",
        recompute="auto" if "recompute" in mode else "off",
        method="contiguous" if mode in CUT else "auto",
        k=1 if mode in ONE else "auto",
    )
    begin, work = time.monotonic(), time.process_time()
    try:
        best = solve(problem(case.chain, case.cluster, config), limits)
    except (InfeasibleError, TimeLimitError) as error:
        best, found = None, dict[str, Any](status=type(error).__name__)
    else:
        found = {
            "period_ns": float(best.per_microbatch),
            "bound_ns": float(best.bounds[best.gap_bound]) or None,
            "compute_ns": sum(op.duration_ns for op in best.ops if op.kind.is_compute) / best.k,
        }
    found["seconds"] = round(time.monotonic() - begin, 2)
    found["cpu_seconds"] = round(time.process_time() - work, 2)
    return found, best


def planned(run: Run, work_s: float) -> dict[str, Any]:
    """The plan's figures, and who found it."""
    limits = Limits(
        time_limit_s=work_s, deterministic=True, groups=None, without=frozenset(run.without)
    )
    found, best = solved(run.case, run.mode, limits)
    if best is not None and not run.without:
        found["history"] = _improvements(best.history)
    return found | {"layers": len(run.case.chain.layers), "work_s": work_s}


def _improvements(history: Sequence[Improvement]) -> list[list[Any]]:
    """[work in s, strategy, period in ns] of each better plan."""
    found: list[list[Any]] = []
    for step in history:
        period = step.period_ns and step.period_ns[0] / step.period_ns[1]
        if period and (not found or period < found[-1][2]):
            found.append([step.work_s, step.strategy, period])
    return found


@dataclass(frozen=True, slots=True)
class Worth:
    """An arm's row of the table; losses are ratios to everything, minus one."""

    name: str
    rows: int
    mean: float
    worst: float
    lost: int
    bounds: float
    proofs: int
    """Rows that are proven shortest with everything alone."""
    compute: float | None
    """By how much longer the ops of a micro-batch are; None where no row says it."""
    found: int
    """Rows whose best plan with everything is its."""


def worth(rows: dict[str, dict[str, Any]], name: str, arm: str) -> Worth | None:
    """What the plans called `name` lose against those of everything."""
    ratios, bounds, compute, found, proofs = [], [], [], 0, 0
    for row in rows.values():
        all_, one = row.get("everything", {}), row.get(name, {})
        if not all_ or not one:
            continue
        proofs += is_proven(all_) and not is_proven(one)
        if "period_ns" not in all_:
            continue
        ratios.append(one.get("period_ns", math.inf) / all_["period_ns"])
        if one.get("bound_ns") and all_["bound_ns"]:
            bounds.append(all_["bound_ns"] / one["bound_ns"])
        if "compute_ns" in all_ and "compute_ns" in one:
            compute.append(one["compute_ns"] / all_["compute_ns"])
        last = [step[1] for step in all_["history"] if step[2] == all_["period_ns"]]
        found += bool(last) and last[0] == arm
    if not ratios:
        return None
    return Worth(
        name,
        len(ratios),
        geometric_mean(ratios) - 1,
        max(ratios) - 1,
        sum(ratio > 1 + LOST for ratio in ratios),
        geometric_mean(bounds) - 1 if bounds else 0.0,
        proofs,
        geometric_mean(compute) - 1 if compute else None,
        found,
    )


def is_proven(figures: dict[str, Any]) -> bool:
    """Whether no plan is shorter, or whether there is none at all."""
    if figures.get("status") == "InfeasibleError":
        return True
    return figures.get("period_ns", math.inf) == figures.get("bound_ns")


COLUMNS = (
    "", "rows", "longer", "worst", "longer by > 1 %", "bound lower", "proofs lost",
    "computes more", "best plans",
)  # fmt: skip


def cells(rows: dict[str, dict[str, Any]], name: str) -> tuple[str, ...] | None:
    """A line of the table; None where nothing was measured."""
    each = worth(rows, name, name.removeprefix("without ").removeprefix("only "))
    if each is None:
        return None
    return (
        each.name,
        str(each.rows),
        f"{each.mean:+.2%}",
        f"{each.worst:+.2%}",
        str(each.lost),
        f"{each.bounds:+.2%}",
        str(each.proofs),
        "-" if each.compute is None else f"{each.compute:+.2%}",
        str(each.found),
    )


def measured(rows: dict[str, dict[str, Any]]) -> list[tuple[str, ...]]:
    """The table's lines: each arm left out, then each finder alone."""
    names = [f"without {arm}" for arm in (*FINDERS, *OTHERS)]
    return _lines(rows, [*names, NONE, *(f"only {arm}" for arm in FINDERS)])


def measured_before(rows: dict[str, dict[str, Any]]) -> list[tuple[str, ...]]:
    """The same for strategies that have left the solver."""
    return _lines(rows, [f"without {arm}" for arm in RETIRED])


def _lines(rows: dict[str, dict[str, Any]], names: Sequence[str]) -> list[tuple[str, ...]]:
    lines = [cells(rows, name) for name in names]
    return [line for line in lines if line is not None]


def table(rows: dict[str, dict[str, Any]]) -> Table:
    """One line per arm that was measured."""
    made = Table(*COLUMNS, box=None, pad_edge=False)
    for column in made.columns[1:]:
        column.justify = "right"
    for line in measured(rows):
        made.add_row(*line)
    return made


def main() -> int:
    """Measure what is missing and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=common.duration, default=10 * 10**9, metavar="TIME")
    parser.add_argument("--arms", nargs="*", default=EVERY, choices=EVERY, metavar="NAME")
    parser.add_argument("--only-one", action="store_true", help="each finder alone, too")
    parser.add_argument("--workers", type=common.count(), default=1, help="processes (1)")
    parser.add_argument("--out", type=Path, default=RESULT, metavar="FILE", help="%(default)s")
    parser.add_argument("--show", action="store_true", help="only print what the file has")
    args = parser.parse_args()
    store, work_s = Store(args.out), args.work / 1e9
    wanted = list(runs(args.arms, only_one=args.only_one))
    missing = [
        run
        for run in wanted
        if store.rows.setdefault(run.key, {}).get(run.name, {}).get("work_s") != work_s
    ]
    if not args.show:
        with ProcessPoolExecutor(args.workers) as pool:
            asked = {pool.submit(planned, run, work_s): run for run in missing}
            for number, done in enumerate(as_completed(asked), 1):
                run = asked[done]
                store.put(run.key, run.name, done.result())
                print(
                    f"{number}/{len(missing)} {run.name}: {run.key}", file=sys.stderr, flush=True
                )
    common.screen().print(table(store.rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
