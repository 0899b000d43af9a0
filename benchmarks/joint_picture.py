"""Period against memory per GPU: nothing computed again, all, after the cuts, jointly, with host.

    PYTHONPATH=. python -m benchmarks.joint_picture [--only resnet50] [--gpus 4] [--show]

draws docs/img/joint.png: ResNet-50 and GPT-2 on 4 and 8 GPUs with the ways of benchmarks/joint.py.
Points that benchmarks/results/joint.json lacks are measured and kept in joint_picture.json there
(run again, it goes on where it was stopped). Memories are shares of what the best contiguous 1F1B
plan needs without a limit.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import joint
from benchmarks.store import Store
from pipeplan.cli import common
from pipeplan.testing.instances import Case
from pipeplan.units import format_bytes, format_ns

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CHAINS, GPUS = ("resnet50", "gpt24"), (4, 8)
SHARES = (*joint.SHARES, 0.8, 1.0)
RESULT = Path(__file__).parent / "results" / "joint_picture.json"
PICTURE = Path("docs/img/joint.png")
STYLES = {
    "none": ("nothing again", "tab:gray", "s"),
    "full": ("full recomputation", "tab:blue", "^"),
    "two_phase": ("cuts, then recomputation", "tab:orange", "x"),
    "joint": ("joint", "tab:red", "o"),
    "offload": ("joint + offload", "tab:green", "d"),
}
BOUNDS = {
    "bound_ns": ("bound, every plan", "--"),
    "bound_contiguous_ns": ("bound, contiguous, no host", ":"),
}
"""Of `joint`; the second one holds for one stage per GPU, with recomputation."""
Row = dict[str, Any]


def points(rows: Sequence[Row], kind: str) -> list[tuple[int, float]]:
    """(bytes per GPU, ns per micro-batch), least memory first; more memory is never slower."""
    found: list[tuple[int, float]] = []
    for row in sorted(rows, key=lambda row: int(row["memory_bytes"])):
        period = row[kind].get("period_ns")
        if period is not None:
            best = min(period, found[-1][1]) if found else period
            found.append((row["memory_bytes"], best))
    return found


def bounds(rows: Sequence[Row], name: str) -> list[tuple[int, float]]:
    """The bound at each memory; one for more memory holds for less."""
    found: list[tuple[int, float]] = []
    for row in sorted(rows, key=lambda row: -int(row["memory_bytes"])):
        value = row["joint"].get(name)
        if value is not None:
            found.append((row["memory_bytes"], max([value, *(one for _, one in found)])))
    return found[::-1]


def draw(rows: Sequence[Row], path: Path) -> None:
    """One panel per chain and number of GPUs."""
    import matplotlib
    from matplotlib.figure import Figure

    panels = list(dict.fromkeys((row["name"], row["gpus"]) for row in rows))
    with matplotlib.rc_context({"font.size": 9}):
        tall = (len(panels) + 1) // 2
        drawn = Figure(figsize=(11, 4 * tall), layout="constrained")
        axes = drawn.subplots(tall, 2, squeeze=False).flat
        for panel, place in zip(panels, axes, strict=False):
            _panel(place, panel, [row for row in rows if (row["name"], row["gpus"]) == panel])
        handles, labels = axes[0].get_legend_handles_labels()
        drawn.legend(handles, labels, loc="outside lower center", ncols=4)
        drawn.savefig(str(path), dpi=110)


def _panel(axes: Axes, panel: tuple[str, int], rows: Sequence[Row]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    for kind, (label, colour, marker) in STYLES.items():
        axes.plot(*_columns(points(rows, kind)), color=colour, marker=marker, ms=4, label=label)
    for name, (label, dashes) in BOUNDS.items():
        axes.step(*_columns(bounds(rows, name)), f"k{dashes}", where="pre", lw=1, label=label)
    axes.set_title(f"{panel[0]}, {panel[1]} GPUs", loc="left")
    axes.set_xlabel("memory per GPU")
    axes.set_ylabel("period per micro-batch")
    axes.set_yscale("log")
    sizes = sorted({row["memory_bytes"] for row in rows})
    axes.set_xticks(sizes, [format_bytes(size) for size in sizes], rotation=20)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.2, 1.5, 2, 3, 4, 5, 7, 8)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda time, _: format_ns(time)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(alpha=0.3)


def _columns(pairs: Sequence[tuple[int, float]]) -> tuple[list[int], list[float]]:
    return [size for size, _ in pairs], [time for _, time in pairs]


def instances(args: argparse.Namespace) -> Iterator[Case]:
    """What is pictured."""
    for name in args.only:
        for gpus in args.gpus:
            for share in args.fractions:
                yield Case(name, gpus, share, "exact")


def main() -> int:
    """Measure what is missing, then draw everything chosen."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=CHAINS, metavar="NAME", help="chains")
    parser.add_argument("--gpus", type=common.several(common.count()), default=GPUS)
    parser.add_argument("--fractions", type=common.several(float), default=SHARES)
    parser.add_argument("--time-limit", type=common.duration, default=6 * 10**9, metavar="TIME")
    parser.add_argument("--out", type=Path, default=RESULT, metavar="FILE", help="%(default)s")
    parser.add_argument("--picture", type=Path, default=PICTURE, metavar="FILE")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--show", action="store_true", help="only draw what the files have")
    what.add_argument("--anew", action="store_true", help="measure all but what joint.json has")
    args = parser.parse_args()
    store, known = Store(args.out), Store(joint.RESULT).rows
    chosen = list(instances(args))
    for case in chosen:
        missing = case.key not in known and (args.anew or case.key not in store.rows)
        if missing and not args.show:
            store.put(case.key, "row", joint.measured(case, args.time_limit / 1e9, {}))
            print(case.key, file=sys.stderr, flush=True)
    known = {**store.rows, **known}
    rows = [known[case.key]["row"] for case in chosen if case.key in known]
    if not rows:
        print("nothing measured", file=sys.stderr)
        return 1
    draw(rows, args.picture)
    print(f"{args.picture}: {len(rows)} points of {len(chosen)}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
