"""Plans of operator graphs: time over bytes, and how long planning takes.

    PYTHONPATH=. OMP_NUM_THREADS=1 python -m benchmarks.operator_graphs [ROW ...]

writes benchmarks/results/operator_graphs.json; rows that it holds are not measured again unless
they are named. Toy GPTs have d 256, 4 heads, T 128, batch 4, explicit attention, dropout 0.1 and
their loss; budgets are shares of what comes and goes in an eager step, the gradients of parameters
being there before. Large graphs are layers of GPT2-large, 8 rows of 1024 tokens in bfloat16;
budgets are shares of what comes and goes with every operation once. Each graph has one cost model
for all methods: a roofline, or times measured on this machine. CPU seconds are those of this
process, one thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from benchmarks.operator_networks import large, moving_bytes, static_bytes, toy
from benchmarks.store import measure_rows
from pipeplan.devices import find_device
from pipeplan.livebytes import LiveBytes
from pipeplan.operator_graph import OperatorGraph
from pipeplan.remat.graph import Budget, GraphProblem, Pareto, SearchLimits, solve
from pipeplan.remat.graph.blocks.full import recompute_all
from pipeplan.remat.graph.blocks.options import OptionSet, solve_grid
from pipeplan.remat.programs import judge
from pipeplan.testing.torch_budget import BUDGETS, partitioned

RESULT = Path(__file__).parent / "results" / "operator_graphs.json"
GRID = 6
SHARES = (0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
ROCKMATE_MIB = {2: 17.64, 4: 29.65, 12: 77.7}
"""By layers: what Rockmate's code was given for a GPT of the same shapes that its authors' tools
traced (overheads of 12.7, 17.3 and 17.4 %): half of what an eager step of that GPT holds, whose
attention keeps more tensors than the one here."""
WHOLE = 130
"""Operations up to which `auto` has more to try than Rockmate."""


@cache
def _eager_bytes(layers: int) -> int:
    """What comes and goes in an eager step of a toy GPT, bytes."""
    model, args = toy(layers)
    for each in model.parameters():
        each.grad = torch.zeros_like(each)
    meter = LiveBytes()
    meter.count([*model.parameters(), *model.buffers(), *args])
    meter.count(each.grad for each in model.parameters() if each.grad is not None)
    static = meter.peak
    with meter:
        model(*args).backward()
    return meter.peak - static


def _toy_graph(layers: int, times: str) -> tuple[OperatorGraph, float]:
    """The graph of a toy GPT, and the CPU seconds of its capture."""
    from pipeplan.operators import capture
    from pipeplan.rehearsal import estimated, measured

    begin = time.process_time()
    model, args = toy(layers)
    captured = capture(model, *args)
    if times == "measured":
        timed = measured(model, captured, 5)
    else:
        timed = estimated(model, captured, find_device(times))
    return timed.graph, time.process_time() - begin


def _asked(
    graph: OperatorGraph, moving: int, shares: Sequence[float], method: str, seconds: float
) -> tuple[Pareto, float]:
    """Answers at shares of `moving` bytes, and CPU seconds."""
    budgets = [Budget(static_bytes(graph) + int(share * moving)) for share in shares]
    begin = time.process_time()
    found = solve(GraphProblem(graph), budgets, seconds, method, SearchLimits(seconds / 4))
    return found, time.process_time() - begin


def _shown(graph: OperatorGraph, moving: int, found: Pareto) -> list[dict[str, Any] | None]:
    """Per budget overhead and peak as shares, and the bound on the overhead."""
    rows: list[dict[str, Any] | None] = []
    for answer in found.answers:
        if answer.option is None:
            rows.append(None)
            continue
        outcome, once = answer.option.outcome, graph.compute_ns
        rows.append(
            {
                "method": answer.option.method,
                "overhead": round(outcome.compute_ns / once - 1, 5),
                "bound": round((answer.bound_ns or once) / once - 1, 5),
                "proven": answer.proven,
                "peak": round((outcome.peak_bytes - static_bytes(graph)) / moving, 4),
            }
        )
    return rows


def _full(graph: OperatorGraph, moving: int) -> dict[str, float]:
    """Every block run again from its input."""
    outcome = judge(graph, recompute_all(graph))
    return {
        "overhead": round(outcome.compute_ns / graph.compute_ns - 1, 5),
        "peak": round((outcome.peak_bytes - static_bytes(graph)) / moving, 4),
    }


def _methods(
    graph: OperatorGraph, moving: int, shares: Sequence[float], seconds: float
) -> dict[str, Any]:
    row: dict[str, Any] = {
        "operations": len(graph.operations),
        "moving_bytes": moving,
        "shares": shares,
        "full recompute": _full(graph, moving),
    }
    whole = len(graph.operations) <= WHOLE
    for method in ("rotor", "rockmate", *(("auto",) if whole else ())):
        found, spent = _asked(graph, moving, shares, method, seconds)
        row[method] = {"cpu_s": round(spent, 1), "at": _shown(graph, moving, found)}
    return row


def _torch(layers: int, graph: OperatorGraph, moving: int) -> list[dict[str, Any]]:
    """PyTorch's budgets: overhead and executed peak, and our overhead at that peak."""
    model, args = toy(layers)
    rows: list[dict[str, Any]] = []
    for budget in BUDGETS:
        outcome = judge(graph, partitioned(model, args, graph, budget))
        if outcome.violations:
            raise ValueError(f"torch's program breaks a rule: {outcome.violations[0]}")
        rows.append(
            {
                "budget": budget,
                "overhead": round(outcome.compute_ns / graph.compute_ns - 1, 5),
                "peak": round((outcome.peak_bytes - static_bytes(graph)) / moving, 4),
                "saved_bytes": outcome.saved_bytes,
            }
        )
    found, _ = _asked(graph, moving, [each["peak"] for each in rows], "rockmate", 60)
    for row, each in zip(rows, _shown(graph, moving, found), strict=True):
        row["ours"] = None if each is None else each["overhead"]
    return rows


def _toy(layers: int, times: str) -> dict[str, Any]:
    """At half of an eager step's bytes, and at the bytes with which Rockmate was measured."""
    graph, spent = _toy_graph(layers, times)
    moving = _eager_bytes(layers)
    row = _methods(graph, moving, (0.5, round(ROCKMATE_MIB[layers] * 2**20 / moving, 4)), 60)
    return {"capture_cpu_s": round(spent, 1), **row, "torch": _torch(layers, graph, moving)}


def _large(layers: int, fused: bool, shares: Sequence[float]) -> dict[str, Any]:
    begin = time.process_time()
    graph = large(layers, find_device("a100"), fused)
    spent = time.process_time() - begin
    return {"capture_cpu_s": round(spent, 1), **_methods(graph, moving_bytes(graph), shares, 60)}


def _options(layers: int, fused: bool) -> dict[str, Any]:
    """A grid of options of one block."""
    options = OptionSet(large(layers, find_device("a100"), fused))
    begin = time.process_time()
    solve_grid(options, GRID, SearchLimits(120))
    return {
        "operations": len(options.graph.operations),
        "answers": len(options.answers),
        "options": len(options.options),
        "proven": options.proven,
        "cpu_s": round(time.process_time() - begin, 1),
    }


def _identical() -> dict[str, Any]:
    """Planning time over the number of identical layers, at half of the bytes."""
    rows = {}
    for layers in (6, 12, 24, 36):
        graph = large(layers, find_device("a100"))
        _, spent = _asked(graph, moving_bytes(graph), (0.5,), "rockmate", 60)
        rows[layers] = round(spent, 1)
    return {"cpu_s": rows}


def _sweep(layers: int) -> dict[str, Any]:
    """20 budgets: more is never slower, and no peak is above what was asked."""
    graph, _ = _toy_graph(layers, "cpu")
    moving = moving_bytes(graph)
    shares = [share / 20 for share in range(1, 21)]
    found, spent = _asked(graph, moving, shares, "rockmate", 60)
    outcomes = [each.option and each.option.outcome for each in found.answers]
    times = [each.compute_ns for each in outcomes if each is not None]
    return {
        "cpu_s": round(spent, 1),
        "answered": len(times),
        "monotone": times == sorted(times, reverse=True),
        "within": all(
            each.option is None or each.option.within(each.budget) for each in found.answers
        ),
        "at": _shown(graph, moving, found),
    }


ROWS: dict[str, Callable[[], dict[str, Any]]] = {
    "options, 1 layer": lambda: _options(1, False),
    "options, 2 layers": lambda: _options(2, False),
    "options, 2 fused layers": lambda: _options(2, True),
    "toy 12, roofline": lambda: _toy(12, "cpu"),
    "toy 4, roofline": lambda: _toy(4, "cpu"),
    "toy 2, roofline": lambda: _toy(2, "cpu"),
    "large 36": lambda: _large(36, False, SHARES),
    "large 36, fused": lambda: _large(36, True, SHARES),
    "identical layers": _identical,
    "sweep, toy 4": lambda: _sweep(4),
    "toy 12, measured": lambda: _toy(12, "measured"),
    "toy 4, measured": lambda: _toy(4, "measured"),
    "toy 2, measured": lambda: _toy(2, "measured"),
}


if __name__ == "__main__":
    torch.set_num_threads(1)
    measure_rows(__doc__, RESULT, ROWS)
