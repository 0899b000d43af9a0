"""Figures 3.12 to 3.14 of X. Zhao's thesis: what HiRemate's levels cost, and what they are worth.

    PYTHONPATH=. OMP_NUM_THREADS=1 python -m benchmarks.hierarchy_figures [ROW ...]

writes benchmarks/results/hierarchy_figures.json, row by row, so that it goes on where it was
stopped; rows that are named are measured again. Graphs are captured without memory, their times
are those of an A100's roofline. Searches count work, not seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from benchmarks.markdown import table
from benchmarks.operator_networks import moving_bytes, static_bytes
from benchmarks.store import measure_rows
from pipeplan.operator_graph import OperatorGraph
from pipeplan.remat.graph import Budget, GraphProblem, SearchLimits, solve
from pipeplan.remat.graph.hierarchy.h_partition import Sizes
from pipeplan.remat.graph.hierarchy.hierarchy import Hierarchy
from pipeplan.remat.graph.ledger import Ledger
from pipeplan.remat.graph.orders import time_of

RESULT = Path(__file__).parent / "results" / "hierarchy_figures.json"
SHARES = (0.7, 0.5)
MORE_SHARES = (0.8, 0.6, 0.5, 0.4, 0.3)
"""Of figures over budgets."""
LIMITS = SearchLimits(60, deterministic=0.5)
SECONDS = 3000.0
"""A deadline that none reaches: work ends every search."""
CODER = "pipeplan.tasks:t5(size='{}', batch=8, sequence=256)"
DEPTHS = {"6 + 6": "small", "12 + 12": "base", "24 + 24": "large"}
SEQUENTIAL = {
    "GPT-2 small": "pipeplan.tasks:gpt2(size='small', batch=8)",
    "ResNet-50": "pipeplan.tasks:resnet(size=50, batch=32, side=224)",
    "ViT": "pipeplan.tasks:vit(batch=64)",
}
METHODS = ("rotor", "rockmate", "hiremate")
LIMITED = {"encoder-decoder, 6 + 6 layers": CODER.format("small")} | {
    "GPT-2 small": SEQUENTIAL["GPT-2 small"]
}
NODES = (5, 10, 20, 30)
"""Most nodes of a group, at every level."""
Row = dict[str, Any]


def measured() -> dict[str, Callable[[], Row]]:
    """What measures each row of the figures."""
    rows: dict[str, Callable[[], Row]] = {}
    for depth, size in DEPTHS.items():
        rows[depth] = partial(levels, CODER.format(size), Sizes(), SHARES)
    for name, task in SEQUENTIAL.items():
        for method in METHODS:
            rows[f"{name}, {method}"] = partial(quality, task, method)
    for name, task in LIMITED.items():
        for nodes in NODES:
            sizes = Sizes(top=nodes, lower=nodes, operations=nodes)
            rows[f"{name}, {nodes} nodes"] = partial(levels, task, sizes, MORE_SHARES)
    return rows


@cache
def _graph(task: str) -> OperatorGraph:
    from pipeplan.devices import find_device
    from pipeplan.rehearsal import estimate_operators

    return estimate_operators(task, find_device("a100"))


def _peaks(graph: OperatorGraph, shares: Sequence[float]) -> list[int]:
    static, moving = static_bytes(graph), moving_bytes(graph)
    return [static + int(share * moving) for share in shares]


def levels(task: str, sizes: Sizes, shares: Sequence[float]) -> Row:
    """Preparing: the partition and ways of all clusters; then the highest level by budget."""
    graph = _graph(task)
    start = time.process_time()
    ledger = Ledger(graph)
    hierarchy = Hierarchy(ledger, sizes)
    hierarchy.solve_ways(LIMITS, time.monotonic() + SECONDS)
    prepared = time.process_time()
    found: list[float | None] = []
    for peak in _peaks(graph, shares):
        *_, order = (None, *hierarchy.orders(peak, None, LIMITS, time.monotonic() + SECONDS))
        found.append(None if order is None else time_of(ledger, order) / graph.compute_ns - 1)
    clusters = [each for cluster in hierarchy.top for each in cluster.walk()]
    return {
        "operations": len(graph.operations),
        "clusters": len(clusters),
        "kinds": len(hierarchy.distinct),
        "depth": max(_depth(cluster) for cluster in hierarchy.top),
        "prepare_cpu_s": prepared - start,
        "solve_cpu_s": time.process_time() - prepared,
        "overheads": found,
    }


def quality(task: str, method: str) -> Row:
    """What a method's plans take, judged."""
    graph = _graph(task)
    start = time.process_time()
    budgets = [Budget(peak) for peak in _peaks(graph, MORE_SHARES)]
    answers = solve(GraphProblem(graph), budgets, SECONDS, method, LIMITS).answers
    options = [each.option for each in answers]
    return {
        "operations": len(graph.operations),
        "solve_cpu_s": time.process_time() - start,
        "overheads": [
            None if each is None else each.outcome.compute_ns / graph.compute_ns - 1
            for each in options
        ],
    }


def _depth(cluster: Any) -> int:
    return 1 + max((_depth(each) for each in cluster.inside), default=0)


def page(rows: dict[str, Row]) -> Iterator[str]:
    """A table per figure and network."""
    yield "# What the levels of HiRemate cost, and what they are worth"
    yield (
        "The command `python -m benchmarks.hierarchy_figures` measures all of this page: Figures"
        " 3.12 to 3.14 of X. Zhao's thesis in form, with [our solver of"
        " levels](../reference/operator-solvers.md). Graphs are captured without memory, times are"
        " those of an A100's roofline. Budgets are shares of what comes and goes with every"
        " operation once; a cell is the time of all runs over that of every operation once. A cell"
        " is empty where no program was found. Searches count work in one thread."
    )
    yield "## Figure 3.12: solving time over depth"
    yield (
        f"Encoder-decoders, `{CODER.format('small')}`, then `base` and `large`, with as many"
        " layers in each half. A kind of clusters is solved once. `prepare` is the"
        " partition and the ways of all kinds of clusters, `solve` the highest level at"
        f" {len(SHARES)} budgets. The thesis: 2 hours with 24 layers, on 32 cores with Gurobi."
    )
    yield table(
        ("layers", *LEVEL_COLUMNS, *_heads(SHARES), *TIMES),
        ((depth, *_level_cells(rows[depth])) for depth in DEPTHS),
    )
    yield "## Figure 3.13: sequential networks"
    yield (
        "Rockmate is made for these. `hiremate` has the levels only; `auto` of `pipeplan remat`"
        " keeps the best of all methods."
    )
    for name, task in SEQUENTIAL.items():
        yield f"### {name}"
        mine = {method: rows[f"{name}, {method}"] for method in METHODS}
        yield f"`{task}`: {mine['rotor']['operations']} operations."
        yield table(
            ("method", *_heads(MORE_SHARES), "CPU s"),
            ((method, *_cells(row), f"{_cpu(row):.0f}") for method, row in mine.items()),
        )
    yield "## Figure 3.14: over the depth of the hierarchy"
    yield (
        "The same graphs with at most so many nodes in a group, at every level: fewer nodes are"
        " more levels. The thesis: deeper hierarchies do not lose much."
    )
    for name, task in LIMITED.items():
        yield f"### {name}, by nodes"
        yield f"`{task}`"
        yield table(
            ("nodes", *LEVEL_COLUMNS, *_heads(MORE_SHARES), *TIMES),
            ((str(nodes), *_level_cells(rows[f"{name}, {nodes} nodes"])) for nodes in NODES),
        )


LEVEL_COLUMNS = ("operations", "clusters", "kinds", "levels")
TIMES = ("prepare, CPU s", "solve, CPU s")


def _heads(shares: Sequence[float]) -> list[str]:
    return [f"{share:.0%}" for share in shares]


def _cells(row: Row) -> list[str]:
    return ["" if each is None else f"{each:.1%}" for each in row["overheads"]]


def _cpu(row: Row) -> float:
    return float(row["solve_cpu_s"])


def _level_cells(row: Row) -> tuple[str, ...]:
    return (
        str(row["operations"]),
        str(row["clusters"]),
        str(row["kinds"]),
        str(row["depth"] + 1),
        *_cells(row),
        f"{row['prepare_cpu_s']:.0f}",
        f"{_cpu(row):.0f}",
    )


if __name__ == "__main__":
    measure_rows(__doc__, RESULT, measured())
