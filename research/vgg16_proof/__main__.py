"""That VGG16 at scarce memory has no plan as short as was hoped for, whatever its k and stages.

    python -m research.vgg16_proof vgg16-b128.chain.json

asks `prefix_tree` for every allocation on 4 GPUs with half-duplex links of
12 GB/s, under the paper's memory model, prints what rules each one out (sums are counted only),
and writes benchmarks/results/vgg16_proof.json. The profile is PipeDream's, linearized by
`pipeplan import`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections import Counter
from fractions import Fraction
from itertools import groupby
from pathlib import Path
from typing import Any

from pipeplan.chain import Chain
from pipeplan.cluster import uniform
from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.incumbent import Incumbent, SearchOptions
from research.vgg16_proof.prefix_tree import Assignment, Beginnings, Ruled

RESULT = Path(__file__).parents[2] / "benchmarks" / "results" / "vgg16_proof.json"
CASES = ((9_608_566_528, 391_750_000), (12_973_971_200, 276_650_000))
"""(bytes of a GPU, ns per micro-batch)."""
GPUS = 4
BANDWIDTH = 12 * 10**9


def main() -> int:
    """Prove each case; 1 if an allocation is left."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("profile", help="chain file of VGG16, batch 128")
    parser.add_argument("--seconds", type=float, default=3600.0, help="time limit of a case")
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    chain = Chain.read(arguments.profile)
    cases = [_case(chain, *case, arguments.seconds, arguments.workers) for case in CASES]
    machine = {"python": platform.python_version(), "cores": os.cpu_count()}
    RESULT.write_text(json.dumps({"machine": machine, "cases": cases}, indent=1) + "\n")
    return int(any(case["open"] for case in cases))


def _case(chain: Chain, memory: int, period: int, seconds: float, workers: int) -> dict[str, Any]:
    """The tree of one memory and period, printed as it is walked."""
    cluster = uniform(GPUS, memory, bandwidth_bytes_per_s=BANDWIDTH, duplex="half")
    state = Incumbent(CostModel(chain, cluster, "2bw", "paper"), _options(seconds, workers))
    print(f"{memory} bytes a GPU, {period / 1e6} ms per micro-batch")
    begun, since = time.monotonic(), time.monotonic()
    rows: list[dict[str, Any]] = []
    count: Counter[str] = Counter()
    for ended in Beginnings(state, Fraction(period), seconds).ruled():
        count[ended.reason] += 1
        if ended.reason != "sums":
            rows.append(_row(ended, time.monotonic() - since))
            print("  {begins:44} {reason:7} {rounds:2} rounds {seconds:8.2f} s".format(**rows[-1]))
            since = time.monotonic()
    total = time.monotonic() - begun
    print(f"  {dict(count)} {total:.1f} s", flush=True)
    return {
        "memory_bytes": memory,
        "period_ns": period,
        "sums": count["sums"],
        "rounds": count["rounds"],
        "open": count["open"],
        "seconds": round(total, 2),
        "beginnings": rows,
    }


def _row(ended: Ruled, seconds: float) -> dict[str, Any]:
    return {
        "begins": _runs(ended.home),
        "reason": ended.reason,
        "rounds": ended.rounds,
        "seconds": round(seconds, 2),
    }


def _runs(home: Assignment) -> str:
    """0-2@0 3-5@1: runs of layers and their GPUs."""
    text, first = [], 0
    for gpu, layers in groupby(home):
        last = first + len(list(layers)) - 1
        text.append(f"{first}-{last}@{gpu}")
        first = last + 1
    return " ".join(text)


def _options(seconds: float, workers: int) -> SearchOptions:
    return SearchOptions(
        microbatches=8,
        limit_versions=False,
        ks=tuple(range(1, 65)),
        contiguous_only=False,
        time_limit_s=seconds,
        gap=0,
        seed=0,
        workers=workers,
        deterministic=False,
    )


if __name__ == "__main__":
    sys.exit(main())
