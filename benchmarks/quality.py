"""Plans of two versions of the solver, held against each other row by row.

    python -m benchmarks.quality --out FILE [--limit 15s] [--seeds 2] [--work] [--workers 2]
    python -m benchmarks.quality --before FILE --out FILE

The first form plans 40 instances without recomputation and 20 with it, each with every seed, and
keeps the shortest period and the largest bound of each; run again, it goes on where it was
stopped. Run it with both versions on the same quiet machine; with `--work` limits count work
instead of time. The second form prints what became longer or shorter, and which proofs were lost.
A change of the solver is taken where the geometric mean grows by 0.2 % at most, no row by more
than 2 %, and no proof is lost.
"""

from __future__ import annotations

import argparse
import math
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import product
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from benchmarks.ablation import solved
from benchmarks.ablation_runs import AGAIN, KEEPING, Mode
from benchmarks.store import Store
from pipeplan.cli import common
from pipeplan.ilp import Limits
from pipeplan.testing.instances import Case

SMALL = (("gpt3", 2, 0.6), ("llama4", 3, 0.5), ("gpt5", 3, 0.6))
"""Counted as the paper counts."""
MORE = (
    ("gpt6", 3, 0.6), ("gpt8", 4, 0.5), ("llama8", 4, 0.6), ("llama10", 5, 0.6),
    ("resnet18", 2, 0.8), ("resnet34", 8, 1.2), ("resnet101", 4, 1.2), ("densenet121", 8, 1.2),
    ("llama32", 8, 0.8), ("llama96", 16, 0.5), ("gpt24", 8, 1.2),
)  # fmt: skip
MORE_AGAIN = (
    ("gpt5", 3, 0.4), ("gpt6", 3, 0.4), ("llama8", 4, 0.4), ("resnet18", 8, 0.4),
    ("resnet34", 4, 0.4), ("densenet121", 4, 0.4), ("llama32", 16, 0.4), ("gpt24", 16, 0.5),
    ("llama80", 16, 0.5), ("gpt96", 16, 0.4),
)  # fmt: skip
MEAN, WORST = 0.002, 0.02
"""By how much periods may grow: in the geometric mean, and on a row."""


def instances() -> list[tuple[Case, Mode]]:
    """40 without recomputation, 20 with it."""
    small: list[tuple[Case, Mode]] = [(Case(*each, "paper"), "none") for each in SMALL]
    keeping: list[tuple[Case, Mode]] = [(Case(*each), "none") for each in (*MORE, *KEEPING)]
    again: list[tuple[Case, Mode]] = [(Case(*each), "recompute") for each in (*MORE_AGAIN, *AGAIN)]
    return [*small, *keeping, *again]


def planned(case: Case, mode: Mode, seed: int, limit_s: float, work: bool) -> dict[str, Any]:
    """The plan's figures; an instance that has no plan has no period."""
    limits = Limits(time_limit_s=limit_s, seed=seed, deterministic=work, groups=None)
    found, best = solved(case, mode, limits)
    if best is not None:
        found["proven"] = best.per_microbatch == best.bounds[best.gap_bound]
    return found | {"limit_s": limit_s}


def best(row: dict[str, Any]) -> tuple[float, bool]:
    """The shortest period of any seed, and whether one of them was proven."""
    period = min((one.get("period_ns", math.inf) for one in row.values()), default=math.inf)
    return period, any(one.get("proven") for one in row.values())


def compared(before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]]) -> int:
    """Print what differs; 0 where the change may be taken, 1 where not."""
    ratios, proofs = [], [0, 0]
    for key in before.keys() & after.keys():
        (one, sure), (two, surely) = best(before[key]), best(after[key])
        proofs[0] += sure
        proofs[1] += surely
        ratio = two / one if math.isfinite(one) else 1.0 if math.isfinite(two) else math.nan
        if not math.isnan(ratio):
            ratios.append((ratio - 1, key))
    for change, key in sorted(ratios):
        if abs(change) > 0.001:
            print(f"{change:+8.2%}  {key}")
    mean = geometric_mean([1 + change for change, _ in ratios]) - 1
    worst, where = max(ratios)
    print(f"{len(ratios)} rows: mean {mean:+.3%}, worst {worst:+.2%} ({where}),", end=" ")
    print(f"proven {proofs[0]} before, {proofs[1]} after")
    return int(mean > MEAN or worst > WORST or proofs[1] < proofs[0])


def main() -> int:
    """Plan what is missing, or compare two files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="this version's")
    parser.add_argument("--before", type=Path, metavar="FILE", help="only compare with this one")
    parser.add_argument("--limit", type=common.duration, default=15 * 10**9, metavar="TIME")
    parser.add_argument("--seeds", type=common.count(), default=2, metavar="N")
    parser.add_argument("--work", action="store_true", help="limits count work, not time")
    parser.add_argument("--workers", type=common.count(), default=1, help="processes (1)")
    args = parser.parse_args()
    store, limit_s = Store(args.out), args.limit / 1e9
    if args.before:
        return compared(Store(args.before).rows, store.rows)
    with ProcessPoolExecutor(args.workers) as pool:
        asked = {
            pool.submit(planned, case, mode, seed, limit_s, args.work): (case, mode, seed)
            for seed, (case, mode) in product(range(args.seeds), instances())
            if str(seed) not in store.rows.get(f"{case.key} {mode}", {})
        }
        for number, done in enumerate(as_completed(asked), 1):
            case, mode, seed = asked[done]
            store.rows.setdefault(f"{case.key} {mode}", {})
            store.put(f"{case.key} {mode}", str(seed), done.result())
            print(f"{number}/{len(asked)} {case.key} {mode} {seed}", file=sys.stderr, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
