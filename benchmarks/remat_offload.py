"""Offloading methods on the source's networks: times, bounds, what holds and what cannot."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.remat_networks import network
from pipeplan.errors import InfeasibleError
from pipeplan.remat import Costs, HostLink, from_chain, judge, rematerialize_chain
from pipeplan.remat.bounds import fluid_bound, paper_bound
from pipeplan.remat.checkpointing.periodic import keep_all
from pipeplan.remat.cpsat.exact import best_known_bound, exact_offload
from pipeplan.remat.methods import MORE, Rematerialization, RematProblem, local_search
from pipeplan.remat.offloading.compute_order import ComputeOrder, compute_order
from pipeplan.remat.offloading.dynprog import dynprog
from pipeplan.report.budget import Curves, draw_curves

HOST = HostLink(12_200_000_000)
"""The way to the host that the source measured."""
IMAGES = {224: 32, 500: 8, 1000: 2}
"""Image side and batch: Figure 5's for the first, about as many pixels for the others."""
BATCHES = (8, 16, 32, 64, 128)
"""Powers of two, as in the source, for the smallest images."""
NETWORKS = (
    "resnet18", "resnet34", "resnet50", "resnet101", "resnet152",
    "densenet121", "densenet161", "densenet169", "densenet201", "inception_v3",
)  # fmt: skip
COMPARATORS = ("greedy", "vdnn", "autoswap", "tflms")
PUBLISHED = "in line order"
"""DYNPROG's fastest set as the source schedules it, without changes that fit it to whole units."""
METHODS = ("dynprog", PUBLISHED, *COMPARATORS, "swap", "exact")
CLOSE = 1.03
"""Ratio to the bound from which on the exact search is asked."""
DYNPROG_GOAL, BEST_GOAL = 1.2, 1.1
"""What the figures are held against: ratios to (B1)."""


@dataclass(frozen=True)
class Point:
    """One budget: share of the way from least to peak, bounds and times in ns."""

    share: float
    budget: int
    bound: int
    fluid: float
    proven: int
    times: dict[str, int | None]

    def ratio(self, name: str) -> float | None:
        """Time of a method against the paper's bound."""
        time_ns = self.times[name]
        return None if time_ns is None else time_ns / self.bound

    @property
    def best(self) -> int:
        """Our best method's time."""
        found = self.times["exact"]
        assert found is not None, "offloading fits from the least budget on"
        return found

    @property
    def beaten(self) -> bool:
        """Whether a comparator is faster than our best."""
        return any(t is not None and t < self.best for t in self.times.values())


def measure(count: int, seconds: float, case: tuple[int, str]) -> list[Point]:
    """`count` budgets of one chain, from the least that offloading needs to the peak."""
    side, name = case
    begin = time.monotonic()
    costs = from_chain(network(name, IMAGES[side], side))
    line = compute_order(costs, keep_all(costs))
    found = []
    for at in range(count):
        budget = line.least + (line.peak - line.least) * at // (count - 1)
        found.append(_point(costs, line, budget, at / (count - 1), seconds))
    print(name, side, f"{time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
    return found


def _point(costs: Costs, line: ComputeOrder, budget: int, share: float, seconds: float) -> Point:
    plans = {name: _plan(costs, budget, name) for name in ("dynprog", *COMPARATORS, "swap")}
    times = {name: plan.outcome.makespan_ns if plan else None for name, plan in plans.items()}
    ordered = dynprog(line, budget, HOST)
    times[PUBLISHED] = ordered[0][1].makespan_ns if ordered else times["greedy"]
    swap = times["swap"]
    assert swap is not None
    best, proven = swap, best_known_bound(line, budget, HOST)
    bound = paper_bound(line, budget, HOST)
    if best > CLOSE * proven:
        start = local_search(RematProblem(costs, budget, 500, HOST), MORE)
        goals = [int(goal * bound) for goal in (BEST_GOAL, DYNPROG_GOAL)]
        proof = exact_offload(line, budget, HOST, seconds, start, goals)
        assert proof.found is not None
        outcome = judge(costs, proof.found.schedule, budget, HOST)
        assert not outcome.violations
        best, proven = outcome.makespan_ns, proof.bound_ns
    fluid = fluid_bound(line, budget, HOST)
    assert fluid is not None
    return Point(share, budget, bound, fluid, proven, {**times, "exact": best})


def _plan(costs: Costs, budget: int, method: str) -> Rematerialization | None:
    try:
        return rematerialize_chain(costs, budget, method, channel=HOST)
    except InfeasibleError:
        return None


def ratios(name: str, points: list[Point]) -> Curves:
    """Figures 5 to 12: time against the lower bound."""
    lines = {each: [(p.share, p.ratio(each)) for p in points] for each in METHODS}
    lines["proven bound"] = [(p.share, p.proven / p.bound) for p in points]
    return Curves(name, "memory, from least to peak", "time / lower bound", lines)


def throughput(name: str, batch: int, points: list[Point]) -> Curves:
    """Figures 13 to 19: images per second."""
    lines = {
        each: [(p.share, batch * 1e9 / t if (t := p.times[each]) else None) for p in points]
        for each in METHODS
    }
    return Curves(name, "memory, from least to peak", "images per second", lines)


def row(name: str, points: list[Point]) -> str:
    """A line of the first table: the worst point of each column."""

    def worst(method: str) -> str:
        found = [r for p in points if (r := p.ratio(method)) is not None]
        missing = len(points) - len(found)
        return f"{max(found):.3f}" + (f" ({missing} none)" if missing else "")

    proven = max(p.proven / p.bound for p in points)
    gap = max(p.best / p.proven for p in points)
    beaten = sum(p.beaten for p in points)
    cells = [worst(method) for method in METHODS]
    return f"| {name} | " + " | ".join([*cells, f"{proven:.3f}", f"{gap:.3f}", str(beaten)]) + " |"


def misses(name: str, points: list[Point]) -> Iterator[str]:
    """Lines of the second table: budgets at which a goal is missed, and what is proven there."""
    for p in points:
        dynprog, best, proven = p.ratio("dynprog") or 0.0, p.best / p.bound, p.proven / p.bound
        if dynprog > DYNPROG_GOAL or best > BEST_GOAL:
            yield (
                f"| {name} | {p.share:.0%} | {_against(dynprog, DYNPROG_GOAL, proven)} |"
                f" {_against(best, BEST_GOAL, proven)} | {proven:.3f} |"
            )


def _against(ratio: float, goal: float, proven: float) -> str:
    if ratio <= goal:
        return f"{ratio:.3f}"
    return f"{ratio:.3f}, " + ("impossible" if proven > goal else "missed")


def summary(found: Sequence[Point]) -> Iterator[str]:
    """How far the goals hold: against (B1), and against what is proven, a lower bound, too."""
    for name, goal in (("dynprog", DYNPROG_GOAL), (PUBLISHED, DYNPROG_GOAL), ("exact", BEST_GOAL)):
        times = [(p.times[name] or 0, p.bound, p.proven) for p in found]
        missed = [(t, proven) for t, bound, proven in times if t > goal * bound]
        never = sum(
            proven > goal * p.bound for p, (_, _, proven) in zip(found, times, strict=True)
        )
        yield (
            f"- {name}, goal {goal}, {len(found)} budgets: held against (B1):"
            f" {len(found) - len(missed)}, worst {max(t / bound for t, bound, _ in times):.3f};"
            f" held against the proven bound: {sum(t <= goal * p for t, _, p in times)},"
            f" worst {max(t / p for t, _, p in times):.3f}. No schedule holds it against (B1)"
            f" at {never}."
        )


def offloading(
    networks: Sequence[str], count: int, seconds: float, jobs: int
) -> Iterator[tuple[str, object]]:
    """The points of Figures 5 to 19, by network and image side."""
    # The deepest chains take longest and go first.
    cases = sorted(
        product(IMAGES, networks), key=lambda case: -len(network(case[1], 1, 224).layers)
    )
    with ProcessPoolExecutor(jobs) as pool:
        results = pool.map(partial(measure, count, seconds), cases)
        for (side, name), points in zip(cases, results, strict=True):
            yield f"{name} {side}", [asdict(point) for point in points]


def by_side(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[int, dict[str, list[Point]]]:
    """The points of the file of results, by image side and network, in the order of `NETWORKS`."""
    return {
        side: {name: [Point(**each) for each in found[f"{name} {side}"]] for name in NETWORKS}
        for side in IMAGES
    }


def draw(found: Mapping[str, Sequence[Mapping[str, Any]]], images: Path) -> None:
    """Figures 5 to 19, a picture for each image side."""
    for side, points in by_side(found).items():
        groups = []
        for name, mine in points.items():
            title = f"{name}, {IMAGES[side]} x {side}"
            groups += [ratios(title, mine), throughput(title, IMAGES[side], mine)]
        draw_curves(groups, images / f"remat-offload-{side}.png", 4)


def batches(networks: Sequence[str], count: int) -> Iterator[tuple[str, object]]:
    """DYNPROG at batches that are powers of two, images of 224 pixels a side.

    By network and batch: images per second with all stored, and the worst ratio to (B1) over
    `count` budgets.
    """
    for name, batch in product(networks, BATCHES):
        costs = from_chain(network(name, batch, 224))
        line = compute_order(costs, keep_all(costs))
        worst = 1.0
        for at in range(count):
            budget = line.least + (line.peak - line.least) * at // (count - 1)
            plan = _plan(costs, budget, "dynprog")
            assert plan is not None, "offloading fits from the least budget on"
            ratio = plan.outcome.makespan_ns / paper_bound(line, budget, HOST)
            worst = max(worst, ratio)
        yield f"{name} {batch}", {"images_per_s": batch * 1e9 / costs.compute, "worst": worst}
        print("batches", name, batch, file=sys.stderr, flush=True)
