"""How far whole steps are from the load of the busiest GPU: equal layers, and GPT-2 medium.

    python -m benchmarks.steps [--limit 15s] [--out FILE]

Equal layers: four a GPU, forward, input gradient and weight gradient of one length, a message of
half a percent of that; memory is a share of what 1F1B's first GPU keeps. GPT-2 medium: estimated
for an A100, on 4 GPUs of 16 GiB, links of 25 GB/s, beside the period of a 2BW plan. Every row
plans a step of m micro-batches with backwards split and whole. The figure is step / (m x load),
updates left out; 1F1B's is 1 + (P - 1) / m. The limit counts work, so that a busy machine plans
the same. Rows that the file has are not measured again.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.markdown import table
from benchmarks.store import measure_missing
from pipeplan.chain import Chain, Layer
from pipeplan.cluster import Cluster, uniform
from pipeplan.ilp import Limits, Problem, solve
from pipeplan.planner.config import AUTO_K

RESULT = Path(__file__).parent / "results" / "steps.json"
OP_NS, SAVED, KEPT, HOP_NS = 1_000_000, 1000, 600, 5000
COLUMNS = ("", "GPUs", "m", "split", "whole", "1F1B", "bound", "stages", "2bw")
SPLIT_FIELDS = ("backward_weight_ns", "saved_for_weight_bytes", "saved_input_for_weight_bytes")


class Case(NamedTuple):
    """One chain on one cluster."""

    name: str
    gpus: int
    microbatches: int
    memory: Fraction | None
    """A share of 1F1B's; None: GPT-2 medium."""

    @property
    def key(self) -> str:
        """What identifies the row."""
        return f"{self.name} {self.gpus} GPUs m={self.microbatches}"

    @property
    def parts(self) -> tuple[str, ...]:
        """What is planned: steps with backwards split and whole; of GPT-2 a 2BW plan, too."""
        return ("split", "whole", "2bw") if self.memory is None else ("split", "whole")

    def machines(self) -> tuple[Chain, Cluster]:
        """What is planned."""
        if self.memory is None:
            return _gpt2(), uniform(self.gpus, 16 * 2**30, bandwidth_bytes_per_s=25 * 10**9)
        layers = tuple(equal_layer(number) for number in range(4 * self.gpus))
        memory = int(self.memory * self.gpus * 4 * SAVED)
        return Chain(name="equal", layers=layers), uniform(self.gpus, memory, latency_ns=HOP_NS)


def equal_layer(number: int) -> Layer:
    """F, I and W of one length."""
    return Layer(
        name=f"layer{number}",
        forward_ns=OP_NS,
        backward_ns=2 * OP_NS,
        backward_weight_ns=OP_NS,
        output_bytes=0,
        saved_bytes=SAVED,
        saved_for_weight_bytes=KEPT,
    )


@cache
def _gpt2() -> Chain:
    from pipeplan.capture import estimate  # only here: it needs torch
    from pipeplan.devices import find_device

    return estimate("pipeplan.tasks:gpt2(size='medium')", find_device("a100"))


def cases() -> Iterator[Case]:
    """Equal layers under three memories, then GPT-2 medium."""
    for share in (Fraction(1), Fraction(3, 4), Fraction(1, 2)):
        for gpus in (4, 8):
            for times in (1, 2, 4):
                yield Case(f"equal, {float(share):.0%} of memory", gpus, times * gpus, share)
    for microbatches in (8, 16, 32):
        yield Case("GPT-2 medium", 4, microbatches, None)


def planned(case: Case, limit_s: float, part: str) -> dict[str, Any]:
    """Step, or m periods of a 2BW plan, and bound in loads; how many stages."""
    chain, cluster = case.machines()
    if part == "whole":
        whole = {field: Layer.model_fields[field].default for field in SPLIT_FIELDS}
        layers = tuple(layer.model_copy(update=whole) for layer in chain.layers)
        chain = chain.model_copy(update={"layers": layers})
    problem = Problem(
        chain=chain,
        cluster=cluster,
        semantics="2bw" if part == "2bw" else "flush",
        microbatches=case.microbatches,
        ks=AUTO_K,
    )
    found = solve(problem, Limits(time_limit_s=limit_s, deterministic=True))
    work = sum(layer.forward_ns + layer.backward_ns for layer in chain.layers)
    load = Fraction(work * case.microbatches, case.gpus)
    return {
        "step": float(found.per_microbatch * case.microbatches / load),
        "bound": float(found.bounds["any"] * case.microbatches / load),
        "stages": len(found.stages),
        "limit_s": limit_s,
    }


def cells(case: Case, row: dict[str, Any]) -> tuple[str, ...]:
    """A line of the table."""
    split, whole = row["split"], row["whole"]
    return (
        case.name,
        str(case.gpus),
        str(case.microbatches),
        f"{split['step']:.4f}",
        f"{whole['step']:.4f}",
        f"{1 + (case.gpus - 1) / case.microbatches:.3f}",
        f"{split['bound']:.4f}",
        str(split["stages"]),
        f"{row['2bw']['step']:.4f}" if "2bw" in row else "-",
    )


def in_short(found: dict[str, Any]) -> str:
    """What README.md says of GPT-2 medium."""
    row = found[Case("GPT-2 medium", 4, 16, None).key]
    more = row["split"]["step"] / row["2bw"]["step"] - 1
    return (
        f"A step of GPT-2 medium with 16 micro-batches on 4 GPUs takes {more:.1%} longer than 16"
        f" periods of our 2BW plan,\nboth planned in {row['split']['limit_s']:g} s"
        " ([rows](docs/results/steps.md))."
    )


def page(found: dict[str, Any]) -> Iterator[str]:
    """Whole steps beside the load of the busiest GPU."""
    limit = next(iter(found.values()))["split"]["limit_s"]
    yield "# Whole steps under flush"
    yield (
        f"The command `python -m benchmarks.steps` plans each row with a limit of {limit:g} s. All"
        " figures are the step of m micro-batches over m times the load of a GPU, if all were"
        " equally loaded; updates are left out. `split`: backwards in two ops where that helps;"
        " `whole`: in one. 1F1B is 1 + (P - 1) / m. Memory is a share of what 1F1B's first GPU"
        " keeps; 1F1B itself does not fit into less. `bound`: no step is shorter. `2bw`: m periods"
        " of a plan with two versions of the weights and no flush."
    )
    yield "## Table"
    known = [case for case in cases() if set(case.parts) <= set(found.get(case.key, {}))]
    yield table(COLUMNS, [cells(case, found[case.key]) for case in known])


if __name__ == "__main__":
    sys.exit(measure_missing(__doc__, RESULT, cases(), planned, (COLUMNS, cells)))
