"""Offloading and rematerialization, in the form of the sources' figures.

    PYTHONPATH=. python benchmarks/remat.py

draws docs/img/remat-*.png, writes benchmarks/results/remat.json and rewrites the measured part of
docs/reference/remat-rules.md: Figures 5 and 13 to 18 of Beaumont, Eyraud-Dubois, Shilova (2020) on
computed chains (`remat_offload.py`), POFO beside its parts, Figures 8 to 10 of Beaumont, Herrmann,
Pallez, Shilova (2019), and the planners' CPU seconds.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks import remat_join, remat_offload, remat_speed
from benchmarks.remat_networks import network
from benchmarks.remat_offload import HOST
from pipeplan.remat import budgets, curve, from_chain
from pipeplan.report.budget import Curves, draw_curves

COMBINED = (("resnet18", 224, 32), ("resnet50", 224, 32))
BEGIN, END = "<!-- measured -->", "<!-- end of measured -->"


class Section(NamedTuple):
    """A part of the document: its results are lines of text, or numbers with their key."""

    title: str
    results: Iterator[tuple[str, object]]
    pictures: tuple[str, ...]


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


def sections(args: argparse.Namespace, images: Path) -> dict[str, Section]:
    """All parts by name; nothing is measured before its results are asked for."""
    return {
        "speed": Section("Speed", speeds(), ()),
        "joins": Section("Joins", joins(images), ("remat-join-memory", "remat-join-length")),
        "combined": Section(
            "Rematerialization and offloading together", combined(images), ("remat-pofo",)
        ),
        "offloading": Section(
            "Offloading",
            remat_offload.offloading(args.networks, args.points, args.seconds, args.jobs, images),
            tuple(f"remat-offload-{side}" for side in remat_offload.IMAGES),
        ),
    }


def rewrite(document: Path, measured: dict[str, str]) -> None:
    """Put the new sections, by title, in place of the old ones; others stay."""
    head, _, rest = document.read_text(encoding="utf-8").partition(BEGIN)
    body, _, tail = rest.partition(END)
    old = dict(each.split("\n", 1) for each in body.strip().split("### ") if each)
    new = old | {title: f"\n{text}\n\n" for title, text in measured.items()}
    text = "".join(f"### {title}\n{each}" for title, each in new.items()).rstrip()
    document.write_text(f"{head}{BEGIN}\n\n{text}\n\n{END}{tail}", encoding="utf-8")


def main() -> int:
    """Measure, draw, rewrite the document."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", help="parts to measure again: speed, joins, ...")
    parser.add_argument("--networks", nargs="+", default=remat_offload.NETWORKS)
    parser.add_argument("--points", type=int, default=7, help="budgets per chain")
    parser.add_argument("--seconds", type=float, default=60, help="of exact search per budget")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--document", type=Path, default=Path("docs/reference/remat-rules.md"))
    args = parser.parse_args()
    known = sections(args, args.document.parent / "img")
    results = Path(__file__).parent / "results" / "remat.json"
    measured = {}
    numbers: dict[str, dict[str, object]] = {}
    for name in args.only or known:
        lines, numbers[name] = [], {}
        for key, value in known[name].results:
            if key == "text":
                lines.append(str(value))
            else:
                numbers[name][key] = value
        shown = "\n\n".join(f"![{each}](img/{each}.png)" for each in known[name].pictures)
        measured[known[name].title] = "\n\n".join(filter(None, ("\n".join(lines), shown)))
    if args.only:
        numbers = json.loads(results.read_text(encoding="utf-8")) | numbers
    results.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    rewrite(args.document, measured)
    return 0


if __name__ == "__main__":
    sys.exit(main())
