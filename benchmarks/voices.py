"""How fast the two voices are: a plan of 200 layers on 32 GPUs with k = 2.

Verifying it should take under 2 s, replaying 200 micro-batches under 5 s. Both run in one thread
and do no I/O, so seconds are CPU seconds, which a busy machine hardly stretches.

    python -m benchmarks.voices

prints a table and writes benchmarks/results/voices.json.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import TypeVar

from pipeplan.chain import Chain, Layer
from pipeplan.cluster import uniform
from pipeplan.lowering import lower, wait_cycle
from pipeplan.plan import Plan, Stage
from pipeplan.simulator import simulate
from pipeplan.testing.plans import scheduled, settle
from pipeplan.verifier import audit, verify

LAYERS, GPUS, K, MICROBATCHES = 200, 32, 2, 200
RESULT = Path(__file__).parent / "results" / "voices.json"
_T = TypeVar("_T")


def instance(layers_per_stage: int) -> Plan:
    """A valid plan: stages dealt out to the GPUs in turn, ops at their first free place."""
    rng = Random(0)
    layers = tuple(
        Layer(
            name=f"layer{i}",
            forward_ns=rng.randint(5, 15),
            backward_ns=rng.randint(10, 30),
            optimizer_ns=1,
            weight_bytes=1000,
            gradient_bytes=1000,
            output_bytes=rng.randint(1, 8),
            saved_bytes=rng.randint(10, 50),
        )
        for i in range(LAYERS)
    )
    stages = tuple(
        Stage(id=i, layers=(first, first + layers_per_stage - 1), gpu=i % GPUS)
        for i, first in enumerate(range(0, LAYERS, layers_per_stage))
    )
    cluster = uniform(GPUS, 2**40, bandwidth_bytes_per_s=10**9)
    plan = scheduled(rng, Chain(name="wide", layers=layers), cluster, stages, K)
    steps = max(audit(plan).in_flight)
    return settle(plan.model_copy(update={"microbatches": steps}))


def timed(what: Callable[[], _T], repeat: int = 3) -> tuple[float, _T]:
    """The best of `repeat` CPU times in seconds (one thread, no I/O), and the last result."""
    best, result = float("inf"), what()
    for _ in range(repeat):
        begin = time.process_time()
        result = what()
        best = min(best, time.process_time() - begin)
    return best, result


def measure(layers_per_stage: int) -> dict[str, float | int]:
    """Seconds of each part on one instance."""
    plan = instance(layers_per_stage)
    verified, violations = timed(lambda: verify(plan))
    assert not violations, violations
    lowered, pattern = timed(lambda: lower(plan))
    planned, run = timed(lambda: simulate(plan, pattern, microbatches=MICROBATCHES))
    eager, _ = timed(
        lambda: simulate(plan, pattern, microbatches=MICROBATCHES, clock="eager", updates=True)
    )
    checked, cycle = timed(lambda: wait_cycle(pattern), repeat=1)
    assert cycle is None, cycle
    return {
        "layers": LAYERS,
        "gpus": GPUS,
        "k": K,
        "stages": len(plan.stages),
        "microbatches": run.microbatches,
        "verify_s": round(verified, 3),
        "lower_s": round(lowered, 3),
        "simulate_plan_s": round(planned, 3),
        "simulate_eager_s": round(eager, 3),
        "deadlock_check_s": round(checked, 3),
    }


def main() -> None:
    """Measures, prints, writes."""
    rows = [measure(layers_per_stage) for layers_per_stage in (1, 2, 5)]
    for name in rows[0]:
        print(f"{name:18}" + "".join(f"{row[name]:>10}" for row in rows))
    RESULT.parent.mkdir(exist_ok=True)
    python = platform.python_version()
    RESULT.write_text(json.dumps({"python": python, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
