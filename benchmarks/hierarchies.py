"""Plans of graphs that are no chains: HiRemate beside Rockmate and Rotor, and a chain beside both.

    PYTHONPATH=. OMP_NUM_THREADS=1 python -m benchmarks.hierarchies [ROW ...]

writes benchmarks/results/hierarchies.json, method by method, so that it goes on where it was
stopped; rows that are named are measured again. Graphs are captured without memory, their times
are those of an A100's roofline. Shares are of what comes and goes with every operation once.
Searches count work, not seconds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.markdown import table
from benchmarks.operator_networks import moving_bytes, static_bytes
from benchmarks.store import Store, chosen_names
from pipeplan.operator_graph import OperatorGraph
from pipeplan.remat.graph import Answer, Budget, GraphProblem, SearchLimits, solve

RESULT = Path(__file__).parent / "results" / "hierarchies.json"
SHARES = (0.7, 0.5, 0.4)
METHODS = ("rotor", "rockmate", "join", "hiremate")
CHAIN = "GPT, 48 layers"
"""What the others are compared with."""
SECONDS = 3000.0
"""A deadline that none reaches: work ends every search."""
LIMITS = SearchLimits(60, deterministic=2)
JOINS = ("siamese", "image and text")
"""Rows whose branches meet."""
ROWS = {
    "encoder-decoder, 24 + 24 layers": "pipeplan.tasks:t5(size='large', batch=8, sequence=512)",
    "GPT, 48 layers": "pipeplan.tasks:gpt2(size='xl', batch=8, sequence=512)",
    "siamese, 2 x 16 layers": ("pipeplan.tasks:siamese(layers=16, width=64, batch=32, side=128)"),
    "image and text, 12 layers each, 12 that fuse them": (
        "pipeplan.tasks:crossmodal(layers=12, width=768, heads=12, batch=16, side=224,letters=128)"
    ),
    "U-Net, 5 levels": "pipeplan.tasks:unet(depth=5, width=64, batch=8, side=256)",
}


def measure(store: Store, name: str) -> None:
    """The methods that a row lacks; the graph is captured once for all of them."""
    from pipeplan.devices import find_device
    from pipeplan.rehearsal import estimate_operators

    row = store.rows.setdefault(name, {})
    joined = name.startswith(JOINS)
    missing = [each for each in METHODS if each not in row and (joined or each != "join")]
    if not missing:
        return
    begin = time.process_time()
    graph = estimate_operators(ROWS[name], find_device("a100"))
    static, moving = static_bytes(graph), moving_bytes(graph)
    row |= {
        "task": ROWS[name],
        "operations": len(graph.operations),
        "capture_cpu_s": round(time.process_time() - begin, 1),
        "shares": SHARES,
        "moving_bytes": moving,
    }
    budgets = [Budget(static + int(share * moving)) for share in SHARES]
    for method in missing:
        begin, clock = time.process_time(), time.monotonic()
        answers = solve(GraphProblem(graph), budgets, SECONDS, method, LIMITS).answers
        part = {
            "cpu_s": round(time.process_time() - begin, 1),
            "s": round(time.monotonic() - clock, 1),
            "at": [_figures(graph, each, static, moving) for each in answers],
        }
        store.put(name, method, part)
        print(name, method, part, file=sys.stderr, flush=True)


def _figures(
    graph: OperatorGraph, answer: Answer, static: int, moving: int
) -> dict[str, float] | None:
    """Overhead, gap and share of the bytes; None where nothing was found."""
    if answer.option is None:
        return None
    outcome = answer.option.outcome
    return {
        "overhead": round(outcome.compute_ns / graph.compute_ns - 1, 5),
        "gap": round(answer.gap or 0.0, 5),
        "peak": round((outcome.peak_bytes - static) / moving, 4),
    }


def page(found: dict[str, Any]) -> Iterator[str]:
    """Overhead over bytes, a table per graph."""
    yield "# Plans of graphs that are no chains"
    yield (
        "The command `python -m benchmarks.hierarchies` measures all of this page;"
        " [the solvers](../reference/operator-solvers.md) say what the methods are. Graphs are"
        " captured without memory, times are those of an A100's roofline. Budgets are shares of"
        " what comes and goes with every operation once; a cell is the time of all runs over that"
        " of every operation once, by the judge. No method proves more than that every operation"
        " runs once, so a cell is the gap, too. A cell is empty where a method found no program."
        " Searches count work in one thread, so that overheads are the same anywhere; other jobs"
        " ran on the two cores, which lengthens the times. These are of all three budgets"
        " together."
    )
    yield _in_short(found)
    for name, row in found.items():
        yield f"## {name}"
        yield f"`{row['task']}`: {row['operations']} operations."
        yield table(
            ("method", *(f"{share:.0%}" for share in row["shares"]), "CPU s", "s"),
            [
                (
                    method,
                    *("" if at is None else f"{at['overhead']:.1%}" for at in row[method]["at"]),
                    str(row[method]["cpu_s"]),
                    str(row[method]["s"]),
                )
                for method in METHODS
                if method in row
            ],
        )


def main() -> None:
    """Measure the rows that are named anew, else what the file lacks."""
    names, store = chosen_names(__doc__, list(ROWS)), Store(RESULT)
    for name in names:
        store.rows.pop(name, None)
    for name in names or ROWS:
        measure(store, name)


def _in_short(found: dict[str, Any]) -> str:
    """Every graph's best method at the middle budget, beside Rockmate's plan of a chain."""
    place = SHARES.index(0.5)
    chain = found[CHAIN]["rockmate"]["at"][place]["overhead"]
    told = [
        f"{min(each):.1%} ({name})"
        for name, row in found.items()
        if name != CHAIN
        and (each := [row[m]["at"][place]["overhead"] for m in METHODS if _has(row, m, place)])
    ]
    return (
        f"At half of the bytes Rockmate's plan of {CHAIN} takes {chain:.1%} longer. The best plans"
        f" of the other graphs: {', '.join(told)}."
    )


def _has(row: dict[str, Any], method: str, place: int) -> bool:
    return method in row and row[method]["at"][place] is not None


if __name__ == "__main__":
    main()
