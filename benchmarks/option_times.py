"""What planning with operator options takes: the options, the first plan, and the rest.

    python -m benchmarks.option_times [NAME ...]

GPT-2 large (74 layers) and medium on 8 GPUs of 40 % of the memory that the best contiguous 1F1B
plan wants, as in `benchmarks.layer_options`. Limits count work, so that a busy machine plans the
same. Times are seconds of this process's processor, which little else changes. What the file has
is not measured again, unless it is named.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.layer_options import bare
from benchmarks.markdown import table
from benchmarks.step_times import timed
from benchmarks.store import measure_rows
from pipeplan.planner import Config
from pipeplan.planner import solve as plan
from pipeplan.planner.config import problem
from pipeplan.testing.instances import UNLIMITED, machines

RESULT = Path(__file__).parent / "results" / "option_times.json"
GPUS, SHARE, LIMITS_S = 8, 0.4, (5.0, 15.0, 45.0)
SIZES = ("medium", "large")


def measured(size: str) -> dict[str, Any]:
    """A row: periods in loads, and seconds."""
    from pipeplan.capture import estimate  # only here: they need torch
    from pipeplan.devices import find_device
    from pipeplan.layer_options import add_options

    task, device = f"pipeplan.tasks:gpt2(size='{size}')", find_device("a100")
    chain = estimate(task, device)
    began = time.process_time()
    chain = add_options(chain, task, device=device)
    options_s = time.process_time() - began
    ample = plan(bare(chain), machines(GPUS, UNLIMITED), Config(method="contiguous", k=1))
    cluster = machines(GPUS, int(SHARE * max(row.peak_bytes for row in ample.memory)))
    load = Fraction(sum(layer.forward_ns + layer.backward_ns for layer in chain.layers), GPUS)
    asked = problem(chain, cluster, Config(recompute="auto"))
    row: dict[str, Any] = {"layers": len(chain.layers), "options_s": round(options_s, 1)}
    for limit_s in LIMITS_S:
        found, first_s, all_s = timed(asked, limit_s)
        row[f"{limit_s:g}"] = {
            "period": float(found.per_microbatch / load),
            "first_s": round(first_s, 2),
            "all_s": round(all_s, 1),
        }
    return row


def page(found: dict[str, Any]) -> Iterator[str]:
    """Seconds, and what they are worth."""
    yield "# Time to plan with operator options"
    yield (
        "The command `python -m benchmarks.option_times` gives the layers of GPT-2, estimated for"
        f" an A100, programs over their operators and plans them for {GPUS} GPUs in"
        f" {SHARE:.0%} of the memory that the best contiguous 1F1B plan wants, under 2bw with"
        " `--recompute auto`. `options`: processor seconds for the programs, once for a chain"
        " file. `first`: until the first plan. `in all`: until the search has ended, or its work."
        " Periods are in loads: what one GPU works, if all were equally loaded."
    )
    yield table(
        ("GPT-2", "layers", "options", "work", "period", "first", "in all"),
        [
            (
                size,
                str(row["layers"]),
                f"{row['options_s']:.1f} s",
                f"{limit:g} s",
                f"{row[f'{limit:g}']['period']:.4f}",
                f"{row[f'{limit:g}']['first_s']:.2f} s",
                f"{row[f'{limit:g}']['all_s']:.1f} s",
            )
            for size, row in found.items()
            for limit in LIMITS_S
        ],
    )


if __name__ == "__main__":
    measure_rows(__doc__, RESULT, {size: partial(measured, size) for size in SIZES})
    sys.exit(0)
