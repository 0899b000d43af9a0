"""Plans of graphs that are no chains: HiRemate beside Rockmate and Rotor, and a chain beside both.

    PYTHONPATH=. OMP_NUM_THREADS=1 python -m benchmarks.hierarchies [ROW ...]

writes benchmarks/results/hierarchies.json; rows that it holds are not measured again unless they
are named. Graphs are captured without memory, their times are those of an A100's roofline. Shares
are of what comes and goes with every operation once. Searches count work, not seconds.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.markdown import table
from benchmarks.operator_networks import moving_bytes, static_bytes
from benchmarks.store import measure_rows
from pipeplan.operator_graph import OperatorGraph
from pipeplan.remat.graph import Answer, Budget, GraphProblem, SearchLimits, solve

RESULT = Path(__file__).parent / "results" / "hierarchies.json"
SHARES = (0.7, 0.5, 0.4)
METHODS = ("hiremate", "rockmate", "rotor")
SECONDS = 3000.0
"""A deadline that none reaches: work ends every search."""
LIMITS = SearchLimits(60, deterministic=2)
ROWS = {
    "encoder-decoder, 24 + 24 layers": "pipeplan.tasks:t5(size='large', batch=8, sequence=512)",
    "GPT, 48 layers": "pipeplan.tasks:gpt2(size='xl', batch=8, sequence=512)",
    "U-Net, 5 levels": "pipeplan.tasks:unet(depth=5, width=64, batch=8, side=256)",
}


def _row(reference: str) -> dict[str, Any]:
    from pipeplan.devices import find_device
    from pipeplan.rehearsal import estimate_operators

    begin = time.process_time()
    graph = estimate_operators(reference, find_device("a100"))
    row: dict[str, Any] = {
        "task": reference,
        "operations": len(graph.operations),
        "capture_cpu_s": round(time.process_time() - begin, 1),
        "shares": SHARES,
    }
    static, moving = static_bytes(graph), moving_bytes(graph)
    budgets = [Budget(static + int(share * moving)) for share in SHARES]
    row["moving_bytes"] = moving
    for method in METHODS:
        begin, clock = time.process_time(), time.monotonic()
        answers = solve(GraphProblem(graph), budgets, SECONDS, method, LIMITS).answers
        row[method] = {
            "cpu_s": round(time.process_time() - begin, 1),
            "s": round(time.monotonic() - clock, 1),
            "at": [_figures(graph, each, static, moving) for each in answers],
        }
    return row


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
        " Searches count work, one thread, on a machine that others use."
    )
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
            ],
        )


if __name__ == "__main__":
    measure_rows(__doc__, RESULT, {name: partial(_row, task) for name, task in ROWS.items()})
