"""Rockmate's choices: how many options per block, and how planning grows with depth.

    PYTHONPATH=. OMP_NUM_THREADS=1 python -m benchmarks.operator_grids [ROW ...]

writes benchmarks/results/operator_grids.json and docs/img/operator-grids.png; rows that the file
holds are not measured again unless they are named. Figures 2.5 and 2.6 of X. Zhao's thesis (2024)
in form: overhead over peak for several grids of options, and overhead and planning time over the
number of layers at half of the peak. Every program is judged. CPU seconds are those of this
process, one thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.markdown import table
from benchmarks.operator_networks import large, moving_bytes, static_bytes, toy
from benchmarks.store import measure_rows
from pipeplan.devices import find_device
from pipeplan.operator_graph import OperatorGraph
from pipeplan.remat.graph import Budget, GraphProblem, SearchLimits, solve
from pipeplan.remat.graph.blocks.chain import BlockChain
from pipeplan.remat.graph.ledger import Ledger
from pipeplan.remat.graph.order_program import program
from pipeplan.remat.programs import judge
from pipeplan.report.budget import Curves, draw_curves

RESULT = Path(__file__).parent / "results" / "operator_grids.json"
PICTURE = Path(__file__).parents[1] / "docs" / "img" / "operator-grids.png"
COUNTS = (1, 2, 4, 6, 10)
"""Peaks of a block, and saved bytes per peak."""
SHARES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
DEPTHS = (1, 2, 3, 4, 5, 6)
SECONDS = 60.0
"""What one search may take."""
LIMITS = SearchLimits(SECONDS)


def _small() -> OperatorGraph:
    """A toy GPT of 4 layers by the roofline of a processor."""
    from pipeplan.operators import capture
    from pipeplan.rehearsal import estimated

    model, args = toy(4)
    return estimated(model, capture(model, *args), find_device("cpu")).graph


def grids(make: Callable[[], OperatorGraph]) -> dict[str, Any]:
    """Per grid the overhead at each share of the peak, and CPU seconds of all searches."""
    graph = make()
    static, moving = static_bytes(graph), moving_bytes(graph)
    peaks = [static + int(share * moving) for share in SHARES]
    rows = []
    for count in COUNTS:
        begin = time.process_time()
        chain = BlockChain(Ledger(graph), count=count)
        chain.solve_options(LIMITS, time.monotonic() + 10 * SECONDS)
        orders = chain.orders(peaks)
        spent = time.process_time() - begin
        at = []
        for order in orders:
            outcome = order and judge(graph, program(chain.ledger, order))
            if outcome and outcome.violations:
                raise ValueError(f"a program breaks a rule: {outcome.violations[0]}")
            over = outcome and round(outcome.compute_ns / graph.compute_ns - 1, 5)
            peak = outcome and round((outcome.peak_bytes - static) / moving, 4)
            at.append({"overhead": over, "peak": peak})
        options = [len(each.options) for each in chain.sets.values()]
        proven = all(each.proven for each in chain.sets.values())
        row = {"count": count, "options": options, "proven": proven, "at": at}
        rows.append(row | {"cpu_s": round(spent, 1)})
    return {"operations": len(graph.operations), "shares": SHARES, "rows": rows}


def depths() -> dict[str, Any]:
    """Per number of layers and method the overhead at half of the peak, and CPU seconds."""
    rows = []
    for layers in DEPTHS:
        graph = large(layers, find_device("a100"))
        budget = Budget(static_bytes(graph) + moving_bytes(graph) // 2)
        row: dict[str, Any] = {"layers": layers, "operations": len(graph.operations)}
        for method in ("rotor", "rockmate", "intervals"):
            begin = time.process_time()
            (answer,) = solve(GraphProblem(graph), [budget], SECONDS, method, LIMITS).answers
            spent = round(time.process_time() - begin, 1)
            over = answer.option and answer.option.outcome.compute_ns / graph.compute_ns - 1
            row[method] = {
                "cpu_s": spent,
                "overhead": None if over is None else round(over, 5),
                "proven": answer.proven,
            }
        rows.append(row)
    return {"rows": rows}


ROWS: dict[str, Callable[[], dict[str, Any]]] = {
    "toy GPT, 4 layers": partial(grids, _small),
    "GPT2-large, 12 layers": lambda: grids(lambda: large(12, find_device("a100"))),
    "GPT2-large, 12 layers, fused": lambda: grids(lambda: large(12, find_device("a100"), True)),
    "depth": depths,
}


def draw(found: dict[str, Any]) -> None:
    """Overhead over peak, a diagram per network, a line per grid."""
    groups = []
    for name, each in found.items():
        if name == "depth":
            continue
        lines: dict[str, list[tuple[float, float | None]]] = {}
        for row in each["rows"]:
            points = [at for at in row["at"] if at["peak"] is not None]
            points.sort(key=lambda at: at["peak"])
            lines[_grid(row)] = [(100 * at["peak"], 100 * at["overhead"]) for at in points]
        groups.append(Curves(name, "peak, % of keeping all", "overhead, %", lines))
    draw_curves(groups, PICTURE, columns=len(groups))


def _grid(row: dict[str, Any]) -> str:
    return f"({row['count']}, {row['count']})"


def page(found: dict[str, Any]) -> Iterator[str]:
    """The page of the results."""
    yield "# How many options per block, and how planning grows with depth"
    yield (
        "The command `python -m benchmarks.operator_grids` measures all of this page, in the form"
        " of Figures 2.5 and 2.6 of X. Zhao's thesis (2024). Rockmate solves each distinct block"
        " for a grid of peaks and saved bytes: (6, 6) means six peaks with six saved bytes each."
        " Overhead is the time of all runs over that of every operation once, by a roofline of an"
        " A100 (the toy GPT: of a processor); shares are of what comes and goes with every"
        " operation once. Every program is judged. CPU seconds are those of one thread, options"
        " included."
    )
    yield "![overhead over peak for several grids](../img/operator-grids.png)"
    for name, each in found.items():
        if name != "depth":
            yield f"## {name}"
            yield table(
                (
                    "grid",
                    *(f"{100 * share:.0f} %" for share in each["shares"]),
                    "options of each block",
                    "CPU s",
                ),
                (
                    (
                        _grid(row),
                        *(_share(at["overhead"]) for at in row["at"]),
                        ", ".join(map(str, row["options"])),
                        str(row["cpu_s"]),
                    )
                    for row in each["rows"]
                ),
            )
    yield "## Layers of GPT2-large at half of the peak"
    yield (
        "`intervals` solves the whole graph in CP-SAT, which has the same optimum as Checkmate's"
        f" program; each search has {SECONDS:.0f} s. A star marks what is proven to be the best"
        " of all orders of its class, or that there is none; an empty cell: nothing was found."
    )
    methods = ("rotor", "rockmate", "intervals")
    yield table(
        (
            "layers",
            "operations",
            *(f"{each}, overhead" for each in methods),
            *(f"{each}, CPU s" for each in methods),
        ),
        (
            (
                str(row["layers"]),
                str(row["operations"]),
                *(_share(row[each]["overhead"]) + "*" * row[each]["proven"] for each in methods),
                *(str(row[each]["cpu_s"]) for each in methods),
            )
            for row in found["depth"]["rows"]
        ),
    )


def _share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"


if __name__ == "__main__":
    torch.set_num_threads(1)
    draw(measure_rows(__doc__, RESULT, ROWS))
