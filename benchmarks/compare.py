"""Figures 11 to 16 of Beaumont, Eyraud-Dubois, Shilova (2020) with our plans, bytes and bound.

    PYTHONPATH=. python benchmarks/compare.py

measures ResNet-18 (batch 8, image 1000), ResNet-34 (batch 32, image 224) and ResNet-50 (batch 8,
image 224) on 4 and 8 GPUs at ten memories each, other networks at three, writes
benchmarks/results/compare.json, draws docs/img/compare-*.png and writes docs/results/compare.md.
`--chains` and `--gpus` measure some again; the page shows all in the file.

Memories are shares of a range: 0 is the least with which a contiguous 1F1B plan exists, 1 what the
best such plan needs when memory is no limit.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from pathlib import Path

from benchmarks import pages
from benchmarks.compare_pages import QUARTERS, Case, image, picture
from benchmarks.pages import PICTURED
from pipeplan.chain import Chain
from pipeplan.compare import Request, compare
from pipeplan.compare.table import data
from pipeplan.errors import InfeasibleError
from pipeplan.plan import MemoryModel
from pipeplan.planner import Config, solve
from pipeplan.report.cloud import draw_cloud
from pipeplan.testing.instances import ample_peak, chain_of, machines
from pipeplan.whole_file import replace

RESULT = Path(__file__).parent / "results" / "compare.json"
OTHERS = ("gpt24", "resnet101", "densenet121")
GPUS = (4, 8)
SHARES = (0.0, 0.1, 0.25, 0.4, 0.5, 0.6, 0.75, 0.9, 1.0, 1.3)


def least_memory(chain: Chain, gpus: int, ample: int, memory_model: MemoryModel) -> int:
    """The smallest memory, to a thousandth of `ample`, that any contiguous 1F1B plan fits."""
    config = Config(method="contiguous", k=1, memory_model=memory_model)
    low, high = 0, ample
    while high - low > ample // 1000:
        middle = (low + high) // 2
        try:
            solve(chain, machines(gpus, middle), config)
            high = middle
        except InfeasibleError:
            low = middle
    return high


def measure(name: str, gpus: int, args: argparse.Namespace) -> Case:
    """What is kept of the comparison of one network on one number of GPUs."""
    chain, ample = chain_of(name), ample_peak(name, gpus, "exact")
    least = least_memory(chain, gpus, ample, "exact")
    shares = SHARES if name in PICTURED else QUARTERS
    sizes = {share: int(least + share * (ample - least)) for share in shares}
    clusters = tuple(machines(gpus, size) for size in sizes.values())
    config = Config(time_limit_s=args.seconds, gap=0.005, workers=1)
    begin, work = time.monotonic(), cpu_seconds()
    comparison = compare(Request(chain, clusters, config, args.search, args.jobs), tell)
    if comparison.left_out:
        raise KeyboardInterrupt
    load = sum(layer.forward_ns + layer.backward_ns for layer in chain.layers)
    kept = data(comparison)
    (cloud,) = comparison.clouds
    return {
        "chain": name,
        "chain_digest": kept["chain_digest"],
        "gpus": gpus,
        "load_ns": load / gpus,
        "shares": list(sizes),
        "points": kept["points"],
        "cloud": [[size, round(time)] for size, time in cloud.points],
        "partitions_left_out": cloud.left_out,
        "seconds": round(time.monotonic() - begin, 1),
        "cpu_seconds": round(cpu_seconds() - work, 1),
        "planner_seconds": args.seconds,
    }


def cpu_seconds() -> float:
    """Of this process and of those that have ended."""
    uses = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(use.ru_utime + use.ru_stime for use in uses)


def tell(share: float, what: str) -> None:
    """A line of progress."""
    print(f"  {share:4.0%} {what}", file=sys.stderr, flush=True)


def save(cases: dict[str, Case], path: Path) -> None:
    """One case a line, whole at every instant."""
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(case)}" for key, case in cases.items())
    replace(path, f"{{\n{lines}\n}}\n")


def main() -> int:
    """Measure, draw, write; 1 if somebody beats us anywhere."""
    parser = argparse.ArgumentParser(description="Ours beside PipeDream, on known networks.")
    parser.add_argument("--chains", nargs="+", default=PICTURED + OTHERS, metavar="NAME")
    parser.add_argument("--gpus", nargs="+", type=int, default=GPUS, metavar="N")
    parser.add_argument("--seconds", type=float, default=25.0, help="of ours, per point (25)")
    parser.add_argument("--search", type=float, default=120.0, help="of PipeDream's search (120)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="at once (one per core)")
    parser.add_argument("--results", type=Path, default=RESULT, help="%(default)s")
    parser.add_argument("--show", action="store_true", help="only draw and write the page again")
    args = parser.parse_args()
    cases: dict[str, Case] = {}
    if args.results.exists():
        cases = json.loads(args.results.read_text(encoding="utf-8"))
    for name in () if args.show else args.chains:
        for gpus in args.gpus:
            print(f"{name}, {gpus} GPUs", file=sys.stderr)
            cases[f"{name} {gpus}"] = measure(name, gpus, args)
            save(cases, args.results)
    for case in cases.values():
        if case["chain"] in PICTURED:
            draw_cloud(picture(case), Path("docs") / image(case))
    pages.main()
    points = [(key, point) for key, case in cases.items() for point in case["points"]]
    lost = [(key, point["memory_bytes"][0]) for key, point in points if point["lost_to"]]
    print(f"{len(points)} points, lost: {lost}", file=sys.stderr)
    return int(bool(lost))


if __name__ == "__main__":
    sys.exit(main())
