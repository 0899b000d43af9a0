"""What options of layers are worth to a pipeline: periods in scarce memory, with and without.

    python -m benchmarks.layer_options [--limit 60s] [--out FILE]

Transformers, estimated for an A100, on equal GPUs joined by half-duplex links of 12 GB/s. Memory
is a share of the peak that the best contiguous 1F1B plan has without a limit. Every row plans
under 2bw with `--recompute auto`: whole layers alone, and device programs over the operators of
layers beside them (`pipeplan profile --options`). The figure is the period over the load of a
GPU, if all were equally loaded. The limit counts work, so that a busy machine plans the same.
Rows that the file has are not measured again.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from fractions import Fraction
from functools import cache
from pathlib import Path
from statistics import geometric_mean
from typing import Any, NamedTuple

from benchmarks.markdown import table
from benchmarks.store import measure_missing
from pipeplan.chain import Chain
from pipeplan.errors import PipeplanError
from pipeplan.plan import Plan
from pipeplan.planner import Config, solve
from pipeplan.testing.instances import UNLIMITED, machines

RESULT = Path(__file__).parent / "results" / "layer_options.json"
TASKS = {
    "GPT-2 medium": "pipeplan.tasks:gpt2(size='medium')",
    "Llama 1B": "pipeplan.tasks:llama(size='1b', batch=4)",
    "T5 base": "pipeplan.tasks:t5(size='base', batch=8)",
    "ViT large": "pipeplan.tasks:vit(size='large', batch=64, side=224)",
}
"""With micro-batches for which activations are the larger part of the memory."""
SHARES = (0.5, 0.4, 0.3)
AIMS = {0.5: 1.04, 0.4: 1.06, 0.3: 1.10}
PARTS = ("runs", "options")
COLUMNS = (
    "", "GPUs", "memory", "layer runs", "with options", "aim", "no limit", "bound", "programs",
    "runs",
)  # fmt: skip


class Case(NamedTuple):
    """One task on equal GPUs."""

    name: str
    gpus: int
    share: float

    @property
    def key(self) -> str:
        """What identifies the row."""
        return f"{self.name} {self.gpus} GPUs {self.share:.0%}"

    @property
    def parts(self) -> tuple[str, ...]:
        """Planned with whole layers alone, and with device programs beside them."""
        return PARTS


@cache
def _chain(name: str) -> Chain:
    from pipeplan.capture import estimate  # only here: they need torch
    from pipeplan.devices import find_device
    from pipeplan.layer_options import add_options

    device = find_device("a100")
    return add_options(estimate(TASKS[name], device), TASKS[name], device=device)


def bare(chain: Chain) -> Chain:
    """The chain without options."""
    layers = tuple(layer.model_copy(update={"options": ()}) for layer in chain.layers)
    return chain.model_copy(update={"layers": layers, "programs": ()})


@cache
def _ample(name: str, gpus: int) -> Plan:
    """The best contiguous 1F1B plan when memory is no limit."""
    return solve(bare(_chain(name)), machines(gpus, UNLIMITED), Config(method="contiguous", k=1))


def cases() -> Iterator[Case]:
    """All tasks, 4 and 8 GPUs, three shares."""
    for name in TASKS:
        for gpus in (4, 8):
            for share in SHARES:
                yield Case(name, gpus, share)


def planned(case: Case, limit_s: float, part: str) -> dict[str, Any]:
    """Period in loads, and how many layers run again."""
    chain = _chain(case.name) if part == "options" else bare(_chain(case.name))
    ample = _ample(case.name, case.gpus)
    peak = max(row.peak_bytes for row in ample.memory)
    cluster = machines(case.gpus, int(case.share * peak))
    load = sum(layer.forward_ns + layer.backward_ns for layer in chain.layers) / case.gpus
    config = Config(recompute="auto", time_limit_s=limit_s, deterministic=True)
    try:
        plan = solve(chain, cluster, config)
    except PipeplanError as error:
        return {"period": None, "why": str(error), "limit_s": limit_s}
    assert plan.solver.bounds.any is not None
    held = [stage.remat for stage in plan.stages if stage.remat]
    return {
        "period": float(plan.period_per_microbatch) / load,
        "programs": sum(len(each.programs) for each in held),
        "runs": sum(last + 1 - first for each in held for first, last in each.recompute),
        "without_limit": float(ample.period_per_microbatch) / load,
        "bound": float(Fraction(*plan.solver.bounds.any)) / load,
        "limit_s": limit_s,
    }


def cells(case: Case, row: dict[str, Any]) -> tuple[str, ...]:
    """A line of the table."""
    runs, options = row["runs"], row["options"]
    return (
        case.name,
        str(case.gpus),
        f"{case.share:.0%}",
        *(
            "no plan" if part["period"] is None else f"{part['period']:.4f}"
            for part in (runs, options)
        ),
        f"{AIMS[case.share]:.2f}",
        *(f"{options[key]:.4f}" if key in options else "-" for key in ("without_limit", "bound")),
        str(options.get("programs", "-")),
        str(options.get("runs", "-")),
    )


def page(found: dict[str, Any]) -> Iterator[str]:
    """Periods with and without options."""
    known = [case for case in cases() if set(PARTS) <= set(found.get(case.key, {}))]
    rows = [found[case.key] for case in known]
    both = [row for row in rows if all(row[part]["period"] for part in PARTS)]
    ratios = [row["runs"]["period"] / row["options"]["period"] for row in both] or [1.0]
    ratio = geometric_mean(ratios)
    periods = {
        share: [
            row["options"]["period"]
            for case, row in zip(known, rows, strict=True)
            if case.share == share and row["options"]["period"]
        ]
        for share in SHARES
    }
    means = ", ".join(
        f"{geometric_mean(own):.3f} with {share:.0%} of the memory ({AIMS[share]:.2f})"
        for share, own in periods.items()
        if own
    )
    kept = sum(
        bool(row["options"]["period"]) and row["options"]["period"] <= AIMS[case.share]
        for case, row in zip(known, rows, strict=True)
    )
    yield "# Options of layers in scarce memory"
    yield (
        "The command `python -m benchmarks.layer_options` estimates transformers for an A100"
        " (`pipeplan profile --mode fake --options`) and plans each row under 2bw with"
        f" `--recompute auto` and {rows[0]['runs']['limit_s']:g} s of counted work. Figures are"
        " the period over the load of a GPU. Memory is a share of what the best contiguous 1F1B"
        " plan takes without a limit. `layer runs`: whole layers run again; `with options`: single"
        " operators do, too. `aim`: what we want of the second. `no limit`: that contiguous plan,"
        " cut as evenly as the layers allow (T5's encoder and decoder share an embedding, which"
        " leaves few cuts to it). `bound`: what is proven of every plan. The last two columns"
        " count the layers that run a program and those that are recomputed as a whole."
    )
    yield (
        "Micro-batches are 2 x 1024 tokens (GPT-2), 4 x 2048 (Llama), 8 x 512 (T5), and 64 images"
        " of 224 x 224 (ViT). In smaller ones, two versions of the weights and Adam's states take"
        " more than what is kept for backwards, and rows say little of recomputation: with one row"
        " of tokens, Llama has no plan on 4 GPUs at 40 and 30 %; with four images of 32 x 32, ViT"
        " has none at all."
    )
    others = "" if len(both) == len(rows) else "; the file of results says why others have none"
    yield (
        f"{len(both)} of {len(rows)} rows have plans{others}. {kept} of them keep their aims. The"
        f" geometric means and aims with options are {means}. Over"
        f" all rows the period of layer runs is {ratio:.3f} times that with options."
        " Of what is left above 1, most is in the cuts: `no limit` has it without any"
        " recomputation, and T5's stages are several on each GPU."
    )
    yield table(COLUMNS, [cells(case, row) for case, row in zip(known, rows, strict=True)])


if __name__ == "__main__":
    sys.exit(measure_missing(__doc__, RESULT, cases(), planned, (COLUMNS, cells), limit_s=60))
