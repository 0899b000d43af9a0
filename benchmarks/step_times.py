"""What planning whole steps takes: the first plan, the plan after 15 s, and many micro-batches.

    python -m benchmarks.step_times [NAME ...]

64 layers on 8 GPUs, with the memory that the first GPU of 1F1B needs where all have equal layers:
alike, or random ones whose times and bytes differ tenfold. Limits count work, so that a busy
machine plans the same. Times are seconds of this process's processor, which little else changes.
What the file has is not measured again, unless it is named.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import steps
from benchmarks.markdown import bullets, table
from benchmarks.peers import uneven
from benchmarks.store import measure_rows
from pipeplan.chain import Chain
from pipeplan.cluster import Cluster, uniform
from pipeplan.ilp import Limits, Problem, Solution, solve
from pipeplan.planner.config import AUTO_K

RESULT = Path(__file__).parent / "results" / "step_times.json"
GPUS, LAYERS, SOON_S, LONG_S = 8, 64, 15.0, 60.0
FEW, MANY = 32, 256
"""Micro-batches."""


def alike() -> tuple[Chain, Cluster]:
    """Eight equal layers a GPU."""
    layers = tuple(steps.equal_layer(number) for number in range(LAYERS))
    return Chain(name="equal", layers=layers), uniform(
        GPUS, LAYERS * steps.SAVED, latency_ns=steps.HOP_NS
    )


def random() -> tuple[Chain, Cluster]:
    """The uneven chain of `benchmarks.peers`; weights, gradients and two states are in memory."""
    chain = uneven()
    states = sum(4 * layer.weight_bytes for layer in chain.layers) // GPUS
    saved = sum(layer.saved_bytes for layer in chain.layers)
    memory = states + saved + max(4 * layer.output_bytes for layer in chain.layers)
    return chain, uniform(GPUS, memory, bandwidth_bytes_per_s=25 * 10**9)


CHAINS = {"equal": alike, "uneven": random}


def timed(problem: Problem, limit_s: float) -> tuple[Solution, float, float]:
    """A plan within so much work; processor seconds until the first plan, and until the end."""
    began, first = time.process_time(), list[float]()

    def heard(
        seconds: float, period: Fraction | None, bound: Fraction, gap: float | None, phase: str
    ) -> None:
        if period is not None and not first:
            first.append(time.process_time() - began)

    found = solve(problem, Limits(time_limit_s=limit_s, deterministic=True), progress=heard)
    return found, first[0], time.process_time() - began


def step_problem(name: str, microbatches: int) -> Problem:
    """A whole step of one of the chains."""
    chain, cluster = CHAINS[name]()
    return Problem(
        chain=chain, cluster=cluster, semantics="flush", microbatches=microbatches, ks=AUTO_K
    )


def measured(name: str) -> dict[str, Any]:
    """A row: steps in loads, and seconds."""
    chain, cluster = CHAINS[name]()
    work = sum(layer.forward_ns + layer.backward_ns for layer in chain.layers)
    load = Fraction(work, len(cluster.gpus))
    row: dict[str, Any] = {}
    for microbatches, limit_s in ((FEW, SOON_S), (FEW, LONG_S), (MANY, SOON_S)):
        found, first_s, all_s = timed(step_problem(name, microbatches), limit_s)
        row[f"{microbatches} {limit_s:g}"] = {
            "step": float(found.per_microbatch / load),
            "bound": float(found.bounds["any"] / load),
            "first_s": round(first_s, 2),
            "all_s": round(all_s, 1),
        }
    return row


def page(found: dict[str, Any]) -> Iterator[str]:
    """What planning takes, and what more time is worth."""
    yield "# Time to plan whole steps"
    yield (
        f"The command `python -m benchmarks.step_times` plans steps of {LAYERS} layers on {GPUS}"
        f" GPUs with {SOON_S:g} s and {LONG_S:g} s of work. Steps are in loads: what one GPU works"
        " for all micro-batches, if all were equally loaded. `first`: processor seconds until the"
        " first plan. `in all`: until the search has ended."
    )
    yield "## Table"
    titles = ("layers", "m", "limit", "step", "bound", "first", "in all")
    lines = []
    for name, row in found.items():
        for key, part in row.items():
            microbatches, limit = key.split()
            lines.append(
                (
                    name,
                    microbatches,
                    f"{limit} s",
                    f"{part['step']:.4f}",
                    f"{part['bound']:.4f}",
                    f"{part['first_s']:.2f} s",
                    f"{part['all_s']:.1f} s",
                )
            )
    yield table(titles, lines)
    yield "## In short"
    told = []
    for name, row in found.items():
        soon, long, many = row.values()
        told.append(
            f"{name}: a step planned in {SOON_S:g} s takes {soon['step'] / long['step']:.3f} times"
            f" as long as one planned in {LONG_S:g} s; {MANY} micro-batches take"
            f" {many['all_s'] / soon['all_s']:.2f} times as long to plan as {FEW}."
        )
    yield bullets(told)


def main() -> int:
    """Measure, and print what there is."""
    found = measure_rows(__doc__, RESULT, {name: partial(measured, name) for name in CHAINS})
    print("\n\n".join(page(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
