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
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.table import Table

from benchmarks.store import Store
from pipeplan.chain import Chain
from pipeplan.cli import common
from pipeplan.cluster import Cluster
from pipeplan.errors import InfeasibleError, TimeLimitError
from pipeplan.ilp import Limits, Solution, solve
from pipeplan.ilp.coarsening import coarsen
from pipeplan.plan import Improvement
from pipeplan.planner import Config
from pipeplan.planner.config import problem
from pipeplan.testing.instances import Case, chain_of, contiguous_peak, machines

RESULT = Path(__file__).parent / "results" / "ablation.json"
LEFT = RESULT.with_name("ablation_retired.json")
"""Rows of strategies that have left the solver, with those of everything as it was then."""
LOST = 0.01
"""A row is lost where the plan is longer by more than this."""
FINDERS = (
    "annealing", "balancing", "interleaved starts", "kfkb", "restarts",
)  # fmt: skip
FEW = ("joint", "enumeration")
"""Of chains of few layers: allocation and schedule as one model, and each allocation."""
RETIRED = (
    "best chain", "guide", "neighbourhoods", "plain chain", "recompute annealing",
    "recompute kfkb", "stage counts", "unrestricted",
)  # fmt: skip
"""Strategies that left the solver for what their rows of the table say."""
PROVERS = ("packing bound", "counting bound")
JOINT = ("recompute balancing", "trim")
FEW_JOINT = ("recompute enumeration",)
"""Every set of recomputed layers, of fewer layers still."""
CUT: dict[Mode, tuple[str, ...]] = {
    "contiguous": ("kfkb", "window bound"),
    "contiguous, recompute": ("recompute bound",),
}
"""By mode of one stage per GPU: who has a say in its plan, or bounds it."""
NONE = "no finder"
"""The contiguous optimum of one micro-batch per period, and bounds alone."""
STEP: dict[Mode, str] = {"step": "step search", "step, recompute": "recompute step search"}
"""By mode of whole steps: its strategy; without it, the contiguous plan cut off after the step."""
OTHERS = (
    *PROVERS, *FEW, *JOINT, *FEW_JOINT, "window bound", "recompute bound", *STEP.values(),
)  # fmt: skip
EVERY = (*FINDERS, *OTHERS)
SHORT_LAYERS = 14
"""Layers of chains that have the strategies of few layers."""
Mode = Literal[
    "none",
    "recompute",
    "k=1",
    "k=1, recompute",
    "contiguous",
    "contiguous, recompute",
    "step",
    "step, recompute",
]
ONE: dict[Mode, tuple[str, ...]] = {"k=1": FEW, "k=1, recompute": FEW_JOINT}
"""By mode of one micro-batch per period, as the papers' models have it: who proves its plans."""

KEEPING = (
    ("resnet18", 4, 1.2), ("resnet18", 8, 1.2), ("resnet18", 4, 0.6), ("resnet18", 8, 0.5),
    ("resnet34", 4, 1.2), ("resnet34", 8, 0.6), ("resnet34", 4, 0.5), ("resnet50", 4, 0.6),
    ("resnet50", 8, 0.6), ("resnet50", 8, 0.5), ("resnet101", 8, 0.6), ("resnet101", 4, 0.5),
    ("resnet152", 8, 0.5), ("densenet121", 4, 0.6), ("densenet121", 8, 0.5), ("gpt24", 8, 0.6),
    ("gpt24", 16, 0.5), ("gpt48", 16, 0.6), ("gpt48", 32, 0.6), ("llama24", 8, 0.6),
    ("llama24", 16, 0.5), ("llama32", 16, 0.6), ("llama80", 16, 0.6), ("gpt96", 16, 0.6),
    ("gpt96split", 32, 1.2), ("gpt96", 32, 0.8),
)  # fmt: skip
AGAIN = (
    ("resnet18", 4, 0.4), ("resnet34", 8, 0.5), ("resnet50", 4, 0.4), ("resnet50", 8, 0.4),
    ("gpt24", 8, 0.5), ("gpt24", 8, 0.4), ("llama24", 8, 0.5), ("llama24", 16, 0.4),
    ("gpt48", 16, 0.5), ("resnet101", 8, 0.4),
)  # fmt: skip
SHORT = (
    ("gpt5", 3, 0.6), ("gpt6", 3, 0.6), ("gpt8", 4, 0.5), ("gpt10", 4, 0.6), ("gpt12", 4, 0.8),
    ("llama6", 3, 0.6), ("llama8", 4, 0.6), ("llama10", 5, 0.6), ("llama12", 4, 0.6),
    ("gpt12", 8, 0.6),
)  # fmt: skip
SHORT_AGAIN = (
    ("gpt3", 2, 0.4), ("gpt4", 2, 0.5), ("gpt5", 3, 0.4), ("gpt6", 3, 0.4), ("llama4", 2, 0.4),
    ("llama5", 3, 0.5),
)  # fmt: skip
GROUPED = ("resnet18", "resnet50", "resnet101", "densenet121", "gpt24", "llama24")
"""Networks of which a few groups of layers are planned."""
FEW_KEEPING = ((5, 2, 0.7), (7, 2, 0.5), (7, 3, 0.8), (9, 3, 0.7))
"""Groups, GPUs, memory."""
FEW_AGAIN = ((4, 2, 0.5), (5, 2, 0.4), (5, 3, 0.5), (6, 2, 0.6))
FEW_CUTS = ((6, 3, 0.6), (8, 3, 0.7), (8, 4, 0.6), (12, 3, 0.8))
TIED = (
    ("gpt24", 4, 0.5), ("gpt24", 4, 0.4), ("gpt24", 8, 0.5), ("gpt24", 8, 0.4),
    ("llama24", 8, 0.5), ("llama24", 8, 0.4), ("gpt48", 16, 0.5), ("resnet50", 4, 0.5),
)  # fmt: skip
CUTS = (
    ("resnet18", 4, 0.6), ("resnet34", 8, 0.6), ("resnet50", 8, 0.5), ("gpt24", 8, 0.6),
    ("llama24", 8, 0.6), ("densenet121", 8, 0.5), ("gpt48", 16, 0.6),
)  # fmt: skip
STEPS = (
    ("resnet18", 4, 0.6), ("resnet34", 4, 0.5), ("resnet50", 8, 0.6), ("resnet101", 4, 0.5),
    ("densenet121", 4, 0.6), ("gpt24", 4, 0.6), ("gpt24", 8, 0.5), ("llama24", 8, 0.6),
    ("gpt48", 16, 0.6),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Grouped(Case):
    """A network whose layers are merged until there are `layers`."""

    layers: int = 1

    @property
    def key(self) -> str:
        """What identifies the row."""
        return f"{self.name} in {self.layers} {self.gpus} {self.fraction:g} {self.memory_model}"

    @property
    def chain(self) -> Chain:
        """The merged layers."""
        return coarsen(chain_of(self.name), self.layers).chain

    @property
    def cluster(self) -> Cluster:
        """Of a share of what the merged layers want."""
        peak = contiguous_peak(self.chain, self.gpus, self.memory_model)
        return machines(self.gpus, int(self.fraction * peak))


@dataclass(frozen=True, slots=True)
class Tied(Case):
    """A network whose first and last layer share a weight, so that one GPU has both."""

    @property
    def key(self) -> str:
        """What identifies the row."""
        return f"{self.name} tied {self.gpus} {self.fraction:g} {self.memory_model}"

    @property
    def chain(self) -> Chain:
        """Without another change."""
        free = chain_of(self.name)
        first, *others, last = free.layers
        names = {"parameters": ("shared",)}
        layers = (first.model_copy(update=names), *others, last.model_copy(update=names))
        return free.model_copy(update={"layers": layers})


def grouped(each: tuple[int, int, float]) -> list[Case]:
    """So many groups of each of the networks."""
    layers, gpus, fraction = each
    return [Grouped(name, gpus, fraction, layers=layers) for name in GROUPED]


@dataclass(frozen=True, slots=True)
class Run:
    """One instance planned without some arms."""

    case: Case
    mode: Mode
    name: str
    without: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """What identifies the instance."""
        return f"{self.case.key} {self.mode}"


def arms(case: Case, mode: Mode) -> tuple[str, ...]:
    """The strategies and provers that an instance may leave out."""
    few = len(case.chain.layers) <= SHORT_LAYERS
    if mode in STEP:
        return (STEP[mode],)
    if mode in CUT:
        return CUT[mode]
    if mode in ONE:
        return ONE[mode]
    both = (*FINDERS, *PROVERS, *(FEW if few else ()))
    return both if mode == "none" else (*both, *JOINT, *(FEW_JOINT if few else ()))


def runs(chosen: Sequence[str], *, only_one: bool) -> Iterator[Run]:
    """Everything first, then each arm left out; then no finder at all, and each alone."""
    keeping: list[tuple[Case, Mode]] = [(Case(*each), "none") for each in (*KEEPING, *SHORT)]
    cases: list[tuple[Case, Mode]] = [*keeping]
    cases += [(Case(*each), "recompute") for each in (*AGAIN, *SHORT_AGAIN)]
    cases += [(Tied(*each), "recompute") for each in TIED]
    cases += [(each, "k=1") for few in FEW_KEEPING for each in grouped(few)]
    cases += [(each, "k=1, recompute") for few in FEW_AGAIN for each in grouped(few)]
    cases += [(Case(*each), mode) for mode in CUT for each in CUTS]
    cases += [(each, "contiguous") for few in FEW_CUTS for each in grouped(few)]
    cases += [(Case(*each), mode) for mode in STEP for each in STEPS]
    for case, mode in cases:
        yield Run(case, mode, "everything")
    for arm in chosen:
        for case, mode in cases:
            if arm in arms(case, mode):
                yield Run(case, mode, f"without {arm}", (arm,))
    for arm in (NONE, *FINDERS) if only_one else ():
        others = tuple(each for each in FINDERS if each != arm)
        for case, mode in keeping:
            yield Run(case, mode, arm if arm == NONE else f"only {arm}", others)


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


def geometric_mean(ratios: Sequence[float]) -> float:
    """Of ratios, all above 0."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


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
