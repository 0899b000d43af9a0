"""Offloading and rematerialization, in the form of the sources' figures.

    PYTHONPATH=. python benchmarks/remat.py

draws docs/img/remat-*.png, writes benchmarks/results/remat.json and rewrites the measured part of
docs/remat.md: Figures 5 and 13 to 18 of Beaumont, Eyraud-Dubois, Shilova (2020) on computed
chains, POFO beside its parts, Figures 8 to 10 of Beaumont, Herrmann, Pallez, Shilova (2019), and
the planners' CPU seconds.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks import remat_join, remat_speed
from benchmarks.chains import build
from pipeplan.errors import InfeasibleError
from pipeplan.remat import Channel, Costs, budgets, curve, from_chain, rematerialize_chain
from pipeplan.remat.bounds import fluid_bound, paper_bound
from pipeplan.remat.line import line_of
from pipeplan.remat.periodic import keep_all
from pipeplan.report.budget import Curves, draw_curves

HOST = Channel(12_200_000_000)
"""The way to the host that the source measured."""
IMAGES = {224: 32, 500: 8, 1000: 2}
"""Image side and batch."""
NETWORKS = ("resnet18", "resnet50", "resnet101", "resnet152", "densenet121")
COMPARATORS = ("greedy", "vdnn", "autoswap", "tflms")
METHODS = ("dynprog", *COMPARATORS, "swap")
COMBINED = (("resnet18", 224, 32), ("resnet50", 224, 32))
BEGIN, END = "<!-- measured -->", "<!-- end of measured -->"


@dataclass(frozen=True)
class Point:
    """One budget: share of the way from least to peak, bounds and times in ns."""

    share: float
    budget: int
    bound: int
    fluid: float
    times: dict[str, int | None]

    def ratio(self, name: str) -> float | None:
        """Time of a method against the paper's bound."""
        time_ns = self.times[name]
        return None if time_ns is None else time_ns / self.bound

    @property
    def best_to_fluid(self) -> float:
        """Our search against what no whole-unit offloading can beat."""
        return (self.times["swap"] or 0) / self.fluid


def measure(costs: Costs, count: int) -> list[Point]:
    """`count` budgets from the least that offloading needs to the peak."""
    line = line_of(costs, keep_all(costs))
    found = []
    for at in range(count):
        budget = line.least + (line.peak - line.least) * at // (count - 1)
        times = {name: _time(costs, budget, name) for name in METHODS}
        bound, fluid = paper_bound(line, budget, HOST), fluid_bound(line, budget, HOST)
        assert fluid is not None
        found.append(Point(at / (count - 1), budget, bound, fluid, times))
    return found


def _time(costs: Costs, budget: int, method: str) -> int | None:
    try:
        return rematerialize_chain(costs, budget, method, channel=HOST).outcome.makespan_ns
    except InfeasibleError:
        return None


def ratios(name: str, points: list[Point]) -> Curves:
    """Figure 5: time against the lower bound."""
    lines = {each: [(p.share, p.ratio(each)) for p in points] for each in METHODS}
    lines["fluid bound"] = [(p.share, p.fluid / p.bound) for p in points]
    return Curves(name, "memory, from least to peak", "time / lower bound", lines)


def throughput(name: str, batch: int, points: list[Point]) -> Curves:
    """Figures 13 to 18: images per second."""
    lines = {
        each: [(p.share, batch * 1e9 / t if (t := p.times[each]) else None) for p in points]
        for each in METHODS
    }
    return Curves(name, "memory, from least to peak", "images per second", lines)


def row(name: str, points: list[Point]) -> str:
    """A line of the table: the worst point of each column."""

    def worst(method: str) -> str:
        found = [r for p in points if (r := p.ratio(method)) is not None]
        missing = len(points) - len(found)
        return f"{max(found):.3f}" + (f" ({missing} none)" if missing else "")

    fluid = max(p.fluid / p.bound for p in points)
    best = max(p.best_to_fluid for p in points)
    cells = [worst(method) for method in METHODS] + [f"{fluid:.3f}", f"{best:.3f}"]
    return f"| {name} | " + " | ".join(cells) + " |"


def offloading(networks: list[str], count: int, images: Path) -> Iterator[tuple[str, object]]:
    """Figures 5 and 13 to 18: pictures, table and numbers."""
    head = "| worst ratio to the bound (B1) | " + " | ".join(METHODS)
    yield "text", head + " | bound (B3) | swap / (B3) |\n|" + "---|" * (len(METHODS) + 3)
    for side, batch in IMAGES.items():
        measured = {}
        for name in networks:
            begin = time.monotonic()
            points = measure(from_chain(build(name, batch, side)), count)
            measured[name] = points
            yield "text", row(f"{name}, {batch} x {side}", points)
            yield f"{name} {side}", [{**vars(p), "ratio": p.ratio("dynprog")} for p in points]
            print(name, side, f"{time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
        groups = [ratios(f"{name}, {side}", points) for name, points in measured.items()]
        groups += [throughput(f"{name}, {side}", batch, p) for name, p in measured.items()]
        draw_curves(groups, images / f"remat-offload-{side}.png", len(networks))


def combined(images: Path) -> Iterator[tuple[str, object]]:
    """POFO beside Rotor and offloading: time against budget."""
    groups = []
    for name, side, batch in COMBINED:
        costs = from_chain(build(name, batch, side))
        limits = budgets(costs, HOST, 8)
        found = curve(costs, limits, 500, HOST, ("rotor", "dynprog", "swap", "pofo"))
        lines = {
            method: [
                (limit / 2**30, each.outcome.makespan_ns / costs.compute if each else None)
                for limit, each in zip(limits, results, strict=True)
            ]
            for method, results in found.items()
        }
        groups.append(Curves(f"{name}, {batch} x {side}", "budget, GiB", "time / compute", lines))
        yield f"combined {name}", lines
        print("combined", name, file=sys.stderr, flush=True)
    draw_curves(groups, images / "remat-pofo.png", len(groups))


def joins(images: Path) -> Iterator[tuple[str, object]]:
    """Figures 8 to 10 of the join paper."""
    solved = remat_join.solve()
    draw_curves(remat_join.memory_curves(solved), images / "remat-join-memory.png", 3)
    last = [*remat_join.length_curves(solved), *remat_join.chain_curves(solved)]
    draw_curves(last, images / "remat-join-length.png", 3)
    numbers = remat_join.figures(solved)
    yield "join", numbers
    for name, value in numbers.items():
        yield "text", f"- {name}: {_shown(value)}"


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {number:.3f}" for key, number in value.items())
    return str(value)


def speeds() -> Iterator[tuple[str, object]]:
    """CPU seconds."""
    found = remat_speed.seconds()
    yield "speed", found
    yield "text", "| planner | CPU s | at most |\n|---|---|---|"
    for name, spent, allowed in found:
        yield "text", f"| {name} | {spent:.2f} | {allowed:.0f} |"


def main() -> int:
    """Measure, draw, rewrite the document."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", nargs="+", default=NETWORKS)
    parser.add_argument("--points", type=int, default=9, help="budgets per chain")
    parser.add_argument("--document", type=Path, default=Path("docs/remat.md"))
    args = parser.parse_args()
    images = args.document.parent / "img"
    parts = {
        "### Speed": speeds(),
        "### Joins": joins(images),
        "### Rematerialization and offloading together": combined(images),
        "### Offloading": offloading(list(args.networks), args.points, images),
    }
    pictures = {
        "### Joins": ("remat-join-memory", "remat-join-length"),
        "### Rematerialization and offloading together": ("remat-pofo",),
        "### Offloading": tuple(f"remat-offload-{side}" for side in IMAGES),
    }
    text: list[str] = []
    numbers: dict[str, object] = {}
    for title, results in parts.items():
        lines = []
        for key, value in results:
            if key == "text":
                lines.append(str(value))
            else:
                numbers[key] = value
        shown = [f"![{name}](img/{name}.png)" for name in pictures.get(title, ())]
        text += [title, *(["\n".join(lines)] if lines else []), *shown]
    results_file = Path(__file__).parent / "results" / "remat.json"
    results_file.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    document = args.document.read_text(encoding="utf-8")
    head, _, rest = document.partition(BEGIN)
    tail = rest.partition(END)[2]
    body = "\n\n".join(text)
    args.document.write_text(f"{head}{BEGIN}\n\n{body}\n\n{END}{tail}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
