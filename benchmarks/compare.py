"""Figures 11 to 16 of Beaumont, Eyraud-Dubois, Shilova (2020) with our plans, bytes and bound.

    PYTHONPATH=. python benchmarks/compare.py

draws docs/img/compare-*.png and rewrites the measured part of docs/comparison.md: for ResNet-18
(batch 8, image 1000), ResNet-34 (batch 32, image 224) and ResNet-50 (batch 8, image 224) on 4 and
8 GPUs, at shares of the memory that the best contiguous plan needs when memory is no limit.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from benchmarks.chains import build
from pipeplan.chain import Chain
from pipeplan.cluster import Cluster, uniform
from pipeplan.compare import Comparison, Point, Request, Row, compare
from pipeplan.compare.field import EXHAUSTIVE
from pipeplan.compare.files import pictures
from pipeplan.compare.points import CONTIGUOUS, OURS
from pipeplan.planner import Config, solve
from pipeplan.report.cloud import draw
from pipeplan.units import format_bytes

CHAINS = ("resnet18", "resnet34", "resnet50")
GPUS = (4, 8)
SHARES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.2, 1.5)
BEGIN, END = "<!-- measured -->", "<!-- end of measured -->"


def machines(gpus: int, memory: int) -> Cluster:
    """Equal GPUs, 12 GB/s, one link per pair for both directions, as the source has them."""
    return uniform(gpus, memory, bandwidth_bytes_per_s=12 * 10**9, duplex="half")


def ample_peak(chain: Chain, gpus: int) -> int:
    """Bytes that the best contiguous plan needs when memory is no limit."""
    plan = solve(chain, machines(gpus, 2**50), Config(method="contiguous"))
    return max(row.peak_bytes for row in plan.memory)


def measured(name: str, gpus: int, seconds: float, search: float) -> Comparison:
    """The comparison of one network on one number of GPUs."""
    chain = build(name)
    peak = ample_peak(chain, gpus)
    clusters = tuple(machines(gpus, int(peak * share)) for share in SHARES)
    config = Config(time_limit_s=seconds, gap=0.005)
    return compare(Request(chain, clusters, config, search))


def lines(comparison: Comparison) -> list[str]:
    """A Markdown table: one line per memory."""
    rows = [
        "| memory | pipeplan | contiguous | PipeDream | ours / PipeDream | bound | gap |",
        "|---|---|---|---|---|---|---|",
    ]
    return rows + [_line(point) for point in comparison.points]


def _line(point: Point) -> str:
    ours, contiguous, theirs = (point.row(name) for name in (OURS, CONTIGUOUS, EXHAUSTIVE))
    ratio = gap = "-"
    if ours is not None and theirs is not None:
        ratio = f"{float(ours.period_ns / theirs.period_ns):.3f}"
    if ours is not None and point.bound_ns:
        gap = f"{float(ours.period_ns / point.bound_ns - 1):.1%}"
    bound = "-" if point.bound_ns is None else f"{float(point.bound_ns) / 1e6:.2f}"
    cells = (_ms(ours), _ms(contiguous), _ms(theirs), ratio, bound, gap)
    memory = format_bytes(point.cluster.gpus[0].memory_bytes)
    return f"| {memory} | " + " | ".join(cells) + " |"


def _ms(row: Row | None) -> str:
    return "none" if row is None else f"{float(row.period_ns) / 1e6:.2f}"


def main() -> int:
    """Compare, draw, rewrite the document; 1 if somebody beats us anywhere."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chains", nargs="+", default=CHAINS)
    parser.add_argument("--gpus", nargs="+", type=int, default=GPUS)
    parser.add_argument("--seconds", type=float, default=15.0, help="of the planner per point")
    parser.add_argument("--search", type=float, default=120.0, help="of the exhaustive search")
    parser.add_argument("--document", type=Path, default=Path("docs/comparison.md"))
    args = parser.parse_args()
    parts: list[str] = []
    lost = 0
    for name in args.chains:
        for gpus in args.gpus:
            begin = time.monotonic()
            comparison = measured(name, gpus, args.seconds, args.search)
            spent = time.monotonic() - begin
            ((file, picture),) = pictures(comparison)
            image = f"img/compare-{file}.png"
            draw(picture, args.document.parent / image)
            cloud = comparison.clouds[0]
            parts += [
                f"### {name}, {gpus} GPUs",
                f"![memory and period of {name} on {gpus} GPUs]({image})",
                "\n".join(lines(comparison)),
                f"{len(cloud.points)} points of the exhaustive search"
                f" ({cloud.left_out} partitions left out), {spent:.0f} s in all.",
            ]
            losses = [point for point in comparison.points if point.lost is not None]
            lost += len(losses)
            print(f"{name} {gpus}: {spent:.0f} s, lost {len(losses)}", file=sys.stderr)
            print("\n".join(lines(comparison)), flush=True)
    text = args.document.read_text(encoding="utf-8")
    head, _, rest = text.partition(BEGIN)
    tail = rest.partition(END)[2]
    body = "\n\n".join(parts)
    args.document.write_text(f"{head}{BEGIN}\n\n{body}\n\n{END}{tail}", encoding="utf-8")
    return int(lost > 0)


if __name__ == "__main__":
    sys.exit(main())
