"""Step plans on sleeping layers, beside torch's zero-bubble schedules on the same sleeps.

    python -m benchmarks.runtime_steps

prints a table and writes benchmarks/results/runtime_steps.json. Each rank has two layers whose
forward, gradient of the input and gradient of the weight sleep equally long; torch has a stage for
each layer. A step has 16 micro-batches. All runtimes run in the same processes, in turns, and the
best of six steps counts.

Each plan is for what an action costs in these processes (`pipeplan calibrate`), and for what such
a layer takes: its sleeps, and the processor's time that `pipeplan profile` finds beside them.

step:  measured makespan of the step plan / the planned one.
ideal: planned makespan / the sleeps of a rank.
Then torch's makespan / ours.
"""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any

import torch
import torch._dynamo

from benchmarks import sleeping
from benchmarks.runtime import MICROBATCHES, ROUNDS, STEPS, world
from benchmarks.sleeping_runs import TORCHS, ours, profiled, step_plan, torchs
from pipeplan.calibrate.overhead import measure_overhead
from pipeplan.plan import Plan
from pipeplan.runtime.transport.gloo import GlooTransport

RESULT = Path(__file__).parent / "results" / "runtime_steps.json"
LIMITS = {20: 1.04, 5: 1.09}
"""Sleep in ms -> ratio of measured and planned steps that we aim at."""
RIVALS = [name for name, of in TORCHS.items() if of.split]


def case(plan: Plan, forward_ms: int, transport: GlooTransport) -> dict[str, float]:
    """The shortest step in ns of each runtime; every rank knows it."""
    forward, ranks = forward_ms * 10**6, transport.size
    best: dict[str, float] = {}
    for _ in range(ROUNDS):
        done = {"ours": ours(plan, STEPS, forward, transport)}
        for name in RIVALS:
            done[name] = torchs(name, ranks, STEPS, forward, MICROBATCHES, transport)
        for name, mine in done.items():
            steps = sleeping.steps_of(transport.gather(mine), MICROBATCHES)
            spans = [float(sleeping.span_ns(step)) for step in steps]
            best[name] = min(best.get(name, spans[0]), *spans)
    return best


def main() -> None:
    """All cases, the table and the file."""
    rows = []
    for forward_ms, limit in LIMITS.items():
        layer = world(1, lambda _, forward_ms=forward_ms: profiled(forward_ms * 10**6))
        for ranks in (4, 8):
            overhead = world(ranks, measure_overhead)
            plan = step_plan(ranks, layer, MICROBATCHES, overhead)

            def work(
                transport: GlooTransport, plan: Plan = plan, forward_ms: int = forward_ms
            ) -> dict[str, float]:
                return case(plan, forward_ms, transport)

            best = world(ranks, work)
            row: dict[str, Any] = {
                "ranks": ranks,
                "forward_ms": forward_ms,
                "limit": limit,
                "step": best["ours"] / plan.period_ns,
                "ideal": plan.period_ns / (6 * MICROBATCHES * forward_ms * 10**6),
                "overhead_us": overhead / 1e3,
                "split": any(stage.split_backward for stage in plan.stages),
                "torch": {name: best[name] / best["ours"] for name in RIVALS},
            }
            rows.append(row)
            print(row, flush=True)
    host = {
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
        "torch": str(torch.__version__),
    }
    RESULT.write_text(json.dumps({"cases": rows, "host": host}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
