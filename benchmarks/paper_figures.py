"""Figures 11 to 16 of Beaumont, Eyraud-Dubois, Shilova (2020) as they have them, and beside them.

    PYTHONPATH=. python -m benchmarks.paper_figures

plans ResNet-18 (batch 8, image 1000), ResNet-34 (batch 32, image 224), ResNet-50, ResNet-101 and
DenseNet-121 (batch 8, image 224) on 4 and 8 GPUs at five memories each, by the paper's count of
bytes: PipeDream's exhaustive search, our planner with k = 1, and the literal ILP that starts from
our plan. The same GPUs under exact memory follow, with and without recomputation. Limits count
work, so that results do not depend on what else the machine does. What the file of results has is
kept: the command goes on where it was stopped; a part that is removed from the file is measured
again, with other limits if you like (an hour of the ILP: `--ilp-limit 60min`).

Layers are the paper's groups (section 7): no edge passes by a group, so a residual block, with
its skip, is one, and so is a dense layer. Memories are shares of a range: 0 is the least with
which a contiguous 1F1B plan exists, 1 what the best such plan needs when memory is no limit.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks import pages
from benchmarks.compare import least_memory
from benchmarks.paper_figure_pages import image, picture
from benchmarks.store import Part, Store
from pipeplan.baselines.timed import Setting
from pipeplan.chain import Chain
from pipeplan.cli import common
from pipeplan.cluster import Cluster
from pipeplan.compare.field import Field
from pipeplan.compare.points import microbatches
from pipeplan.compare.rows import Row, check
from pipeplan.errors import InfeasibleError, TimeLimitError
from pipeplan.ilp.coarsening import grouped
from pipeplan.plan import MemoryModel, Plan, Solver
from pipeplan.planner import Config, solve
from pipeplan.report.cloud import draw_cloud
from pipeplan.testing.instances import chain_of, contiguous_peak, machines

RESULT = Path(__file__).parent / "results" / "paper_figures.json"
NETWORKS = ("resnet18", "resnet34", "resnet50", "resnet101", "densenet121")
GPUS = (4, 8)
SHARES = (0.1, 0.25, 0.5, 0.75, 1.0)
ALONE = ("resnet18",)
"""Networks on which the ILP is solved without a start as well."""


Job = tuple[str, str, float]
"""Name of the part, what is measured, share of the memory."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds of work for each plan of ours, each ILP, and each search of PipeDream."""

    ours: float
    ilp: float
    search: float


@dataclass(frozen=True, slots=True)
class Case:
    """One network on one number of GPUs."""

    name: str
    gpus: int

    @property
    def key(self) -> str:
        """What identifies its row."""
        return f"{self.name} {self.gpus}"


@cache
def groups_of(name: str) -> Chain:
    """The network, a layer for each group of section 7."""
    chain = chain_of(name)
    blocks = groupby(range(len(chain.layers)), lambda i: chain.layers[i].name.split(".conv")[0])
    members = [list(indices) for _, indices in blocks]
    return grouped(chain, [(group[0], group[-1]) for group in members])


def jobs(case: Case) -> Iterator[Job]:
    """All parts of a row, the memory first."""
    yield "memory", "memory", 0
    for model in ("paper", "exact"):
        yield f"pipedream {model}", "pipedream", 0
    for share in SHARES:
        yield f"paper {share:g}", "paper", share
        yield f"any {share:g}", "any", share
        yield f"exact {share:g}", "exact", share
        if case.name in ALONE:
            yield f"alone {share:g}", "alone", share


def measured(case: Case, row: dict[str, Part], job: Job, limits: Limits) -> Part:
    """One part of a row that has its memory."""
    part, what, share = job
    chain = groups_of(case.name)
    if what == "memory":
        return memory(chain, case.gpus)
    sizes = dict(zip(SHARES, row["memory"]["bytes"], strict=True))
    if what == "pipedream":
        model: MemoryModel = "paper" if part.endswith("paper") else "exact"
        return pipedream(chain, case.gpus, model, list(sizes.values()), limits.search)
    cluster = machines(case.gpus, sizes[share])
    if what == "any":
        found = planned(chain, cluster, search(limits.ours, memory_model="paper"))
        return {"ours": figures(found), "ours_s": limits.ours}
    if what == "exact":
        return exact(chain, cluster, limits.ours / 3)
    if what == "alone":
        return {"ilp": figures(planned(chain, cluster, literal(limits.ilp))), "ilp_s": limits.ilp}
    return paper(chain, cluster, limits)


def memory(chain: Chain, gpus: int) -> Part:
    """The memories, by the paper's count."""
    ample = contiguous_peak(chain, gpus, "paper")
    least = least_memory(chain, gpus, ample, "paper")
    load = sum(layer.forward_ns + layer.backward_ns for layer in chain.layers) / gpus
    sizes = [int(least + share * (ample - least)) for share in SHARES]
    return {"layers": len(chain.layers), "load_ns": load, "bytes": sizes}


def pipedream(
    chain: Chain, gpus: int, model: MemoryModel, sizes: list[int], seconds: float
) -> Part:
    """The exhaustive search: its best point at each memory, which the voices judge.

    All points are kept where they are drawn, by the paper's count of bytes.
    """
    count = microbatches(Config(), gpus)
    field = Field(Setting(chain, machines(gpus, max(sizes)), model, count), count)
    begin = time.process_time()
    field.search(seconds)
    best: list[float | None] = []
    for size in sizes:
        row = next(field.rows(machines(gpus, size)))
        if isinstance(row, Row):
            check(row)
        best.append(float(row.period_ns) if isinstance(row, Row) else None)
    points = sorted((point.peak, round(point.period_ns)) for point in field.cloud.points)
    return {
        "points": points if model == "paper" else [],
        "best_ns": best,
        "left_out": field.left_out,
        "seconds": round(time.process_time() - begin, 1),
    }


def paper(chain: Chain, cluster: Cluster, limits: Limits) -> Part:
    """Our plan by the paper's count of bytes, and the literal ILP from there."""
    ours = planned(chain, cluster, search(limits.ours, memory_model="paper", k=1))
    start = None if ours is None else ours.model_copy(update={"solver": Solver()})
    ilp = planned(chain, cluster, literal(limits.ilp, resume=start))
    return {
        "ours": figures(ours),
        "ours_s": limits.ours,
        "ilp": figures(ilp),
        "ilp_s": limits.ilp,
    }


def exact(chain: Chain, cluster: Cluster, seconds: float) -> Part:
    """Our plans under exact memory: none of them recomputes, or any may."""
    keeping = planned(chain, cluster, search(seconds))
    free = planned(chain, cluster, search(seconds, recompute="auto", resume=keeping))
    return {"ours": figures(keeping), "recompute": figures(free), "ours_s": seconds}


def search(seconds: float, **asked: Any) -> Config:
    """Our planner within so much work, on one core."""
    return Config(time_limit_s=seconds, deterministic=True, workers=1, **asked)


def literal(seconds: float, resume: Plan | None = None) -> Config:
    """The paper's ILP within so much work, from a plan or from nothing."""
    return search(seconds, memory_model="paper", method="paper-ilp", k=1, resume=resume)


def planned(chain: Chain, cluster: Cluster, config: Config) -> Plan | None:
    """A plan that the voices judged; None where there is none, or none was found."""
    try:
        return solve(chain, cluster, config)
    except (InfeasibleError, TimeLimitError):
        return None


def figures(plan: Plan | None) -> Part:
    """What the page needs of a plan; periods and bounds in ns per micro-batch."""
    if plan is None:
        return {}
    bounds = plan.solver.bounds
    proven = [bounds.any, getattr(bounds, plan.solver.gap_bound)]
    return {
        "status": plan.solver.status,
        "period_ns": float(plan.period_per_microbatch),
        "bound_ns": float(max(Fraction(*bound) for bound in proven if bound)),
        "k": plan.k,
        "peak_bytes": max(each.peak_bytes for each in plan.memory),
        "stages": [[*stage.layers, stage.gpu] for stage in plan.stages],
        "seconds": round(plan.solver.seconds, 1),
    }


def main() -> int:
    """Measure what is missing, draw, write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for flag, most, of in (
        ("--limit", 30, "each plan of ours, a third of it under exact memory"),
        ("--ilp-limit", 30, "each ILP"),
        ("--search-limit", 30, "each search of PipeDream"),
    ):
        parser.add_argument(
            flag,
            type=common.duration,
            default=most * 10**9,
            metavar="TIME",
            help=f"work of {of} ({most}s)",
        )
    parser.add_argument("--out", type=Path, default=RESULT, metavar="FILE", help="%(default)s")
    args = parser.parse_args()
    limits = Limits(args.limit / 1e9, args.ilp_limit / 1e9, args.search_limit / 1e9)
    store = Store(args.out)
    for name in NETWORKS:
        for gpus in GPUS:
            case = Case(name, gpus)
            row = store.rows.setdefault(case.key, {})
            for job in jobs(case):
                if job[0] not in row:
                    store.put(case.key, job[0], measured(case, row, job, limits))
                    print(f"{case.key} {job[0]}", file=sys.stderr, flush=True)
    for key, row in store.rows.items():
        draw_cloud(picture(key, row), Path("docs") / image(key))
    pages.main()
    return 0


if __name__ == "__main__":
    sys.exit(main())
