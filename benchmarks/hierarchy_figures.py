"""Figure 3.12 of X. Zhao's thesis: what HiRemate's levels cost.

    PYTHONPATH=. OMP_NUM_THREADS=1 python -m benchmarks.hierarchy_figures [ROW ...]

writes benchmarks/results/hierarchy_figures.json, row by row, so that it goes on where it was
stopped; rows that are named are measured again. Graphs are captured without memory, their times
are those of an A100's roofline. Searches count work, not seconds.
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
from pipeplan.remat.graph import SearchLimits
from pipeplan.remat.graph.hierarchy.hierarchy import Hierarchy
from pipeplan.remat.graph.ledger import Ledger
from pipeplan.remat.graph.orders import time_of

RESULT = Path(__file__).parent / "results" / "hierarchy_figures.json"
SHARES = (0.7, 0.5)
LIMITS = SearchLimits(60, deterministic=0.5)
SECONDS = 3000.0
"""A deadline that none reaches: work ends every search."""
CODER = "pipeplan.tasks:t5(size='{}', batch=8, sequence=256)"
DEPTHS = {"6 + 6": "small", "12 + 12": "base", "24 + 24": "large"}
ROWS = tuple(DEPTHS)
Row = dict[str, Any]


def _graph(task: str) -> OperatorGraph:
    from pipeplan.devices import find_device
    from pipeplan.rehearsal import estimate_operators

    return estimate_operators(task, find_device("a100"))


def _peaks(graph: OperatorGraph) -> list[int]:
    static, moving = static_bytes(graph), moving_bytes(graph)
    return [static + int(share * moving) for share in SHARES]


def measure(depth: str) -> Row:
    """Preparing: the partition and ways of all clusters; then the highest level by budget."""
    graph = _graph(CODER.format(DEPTHS[depth]))
    start = time.process_time()
    ledger = Ledger(graph)
    hierarchy = Hierarchy(ledger)
    hierarchy.solve_ways(LIMITS, time.monotonic() + SECONDS)
    prepared = time.process_time()
    found: list[float | None] = []
    for peak in _peaks(graph):
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


def _depth(cluster: Any) -> int:
    return 1 + max((_depth(each) for each in cluster.inside), default=0)


def page(found: dict[str, Any]) -> Iterator[str]:
    """A row per depth."""
    rows = {name: row["row"] for name, row in found.items()}
    yield "# What the levels of HiRemate cost"
    yield (
        "The command `python -m benchmarks.hierarchy_figures` measures all of this page: Figure"
        " 3.12 of X. Zhao's thesis in form, with [our solver of"
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
    yield _levels_table(rows)


def _heads() -> list[str]:
    return [f"{share:.0%}" for share in SHARES]


def _cells(row: Row) -> list[str]:
    return ["" if each is None else f"{each:.1%}" for each in row["overheads"]]


def _cpu(row: Row) -> float:
    return float(row["solve_cpu_s"])


def _levels_table(rows: dict[str, Row]) -> str:
    return table(
        ("layers", "operations", "clusters", "kinds", "levels", *_heads(), "prepare, CPU s",
         "solve, CPU s"),
        (
            (
                depth,
                str(row["operations"]),
                str(row["clusters"]),
                str(row["kinds"]),
                str(row["depth"] + 1),
                *_cells(row),
                f"{row['prepare_cpu_s']:.0f}",
                f"{_cpu(row):.0f}",
            )
            for depth in DEPTHS
            for row in (rows[depth],)
        ),
    )  # fmt: skip


def main() -> None:
    """Measure the rows that are named anew, else what the file lacks."""
    names, store = chosen_names(__doc__, list(ROWS)), Store(RESULT)
    for name in names or ROWS:
        if name in names or name not in store.rows:
            store.rows[name] = {}
            found = measure(name)
            store.put(name, "row", found)
            print(name, found, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
