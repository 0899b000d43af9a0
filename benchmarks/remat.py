"""Offloading and rematerialization, in the form of the sources' figures.

    PYTHONPATH=. python benchmarks/remat.py

draws docs/img/remat-*.png, writes benchmarks/results/remat.json and docs/results/remat.md:
Figures 5 to 19 of Beaumont, Eyraud-Dubois, Shilova (2020) on computed chains
(`remat_offload.py`), POFO beside its parts, Figures 8 to 10 of Beaumont, Herrmann, Pallez, Shilova
(2019), and the planners' CPU seconds. What is not measured again stays in the file.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import pages, remat_join, remat_offload, remat_speed
from benchmarks.remat_networks import network
from benchmarks.remat_offload import HOST
from pipeplan.remat import budgets, curve, from_chain
from pipeplan.report.budget import Curves, draw_curves

COMBINED = (("resnet18", 224, 32), ("resnet50", 224, 32))


def combined(images: Path) -> Iterator[tuple[str, object]]:
    """POFO beside Rotor and offloading: time against budget."""
    groups = []
    for name, side, batch in COMBINED:
        costs = from_chain(network(name, batch, side))
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


def speeds() -> Iterator[tuple[str, object]]:
    """CPU seconds."""
    yield "speed", remat_speed.seconds()


def sections(args: argparse.Namespace, images: Path) -> dict[str, Iterator[tuple[str, object]]]:
    """All parts by name; nothing is measured before its results are asked for."""
    return {
        "speed": speeds(),
        "joins": joins(images),
        "combined": combined(images),
        "offloading": remat_offload.offloading(
            args.networks, args.points, args.seconds, args.jobs
        ),
        "batches": remat_offload.batches(args.networks, args.points),
    }


def main() -> int:
    """Measure, draw, write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", help="parts to measure again: speed, joins, ...")
    parser.add_argument("--networks", nargs="+", default=remat_offload.NETWORKS)
    parser.add_argument("--points", type=int, default=7, help="budgets per chain")
    parser.add_argument("--seconds", type=float, default=60, help="of exact search per budget")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    args = parser.parse_args()
    images = Path("docs/img")
    known = sections(args, images)
    results = Path(__file__).parent / "results" / "remat.json"
    numbers: dict[str, dict[str, Any]] = json.loads(results.read_text(encoding="utf-8"))
    for name in args.only or known:
        numbers[name] = numbers.get(name, {}) | dict(known[name])
    results.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    remat_offload.draw(numbers["offloading"], images)
    pages.main()
    return 0


if __name__ == "__main__":
    sys.exit(main())
