"""Our plans, PipeDream's and the peers' on this machine, in turns: predicted beside measured.

    PYTHONPATH=. python -m benchmarks.side_by_side --profiles FOLDER [NAME ..]

compares and launches (`pipeplan compare --launch`) two chains from measured profiles of GPUs, one
that is estimated and one small model that trains here, and writes
benchmarks/results/side_by_side.json and docs/img/side-by-side-*.png. Names choose cases; without
any, those that the file lacks are measured. On a quiet machine everything takes 15 minutes. The
limit of our searches counts work, so that a busy machine plans the same.

FOLDER has the profiles that the PipeDream repository publishes, which are not part of this one:
`pipedream-vgg16-b128.graph.txt` and `pipedream-resnet50-b128.graph.txt`.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, Literal

from benchmarks.markdown import bullets, table
from benchmarks.store import Store, one_of
from pipeplan.calibrate.here import measure_here
from pipeplan.chain import Chain
from pipeplan.cli import common
from pipeplan.cluster import Cluster, uniform
from pipeplan.compare import LaunchedPoint, LaunchRequest, Request, compare, launch_point
from pipeplan.compare.launched import LaunchClock
from pipeplan.compare.launched_table import data, launched_table, remarks, title
from pipeplan.heap import give_back_large_blocks
from pipeplan.importers import pipedream
from pipeplan.plan import Semantics
from pipeplan.planner import Config
from pipeplan.report.bars import PlanBars, draw_bars
from pipeplan.testing.instances import BANDWIDTH
from pipeplan.torch_schedules import TORCH_SCHEDULES
from pipeplan.units import format_bytes, format_ns

RESULT = Path(__file__).parent / "results" / "side_by_side.json"
IMAGES = Path(__file__).parents[1] / "docs" / "img"
LIMIT_S, SEARCH_S = 6.0, 20.0
SMALL = "pipeplan.tasks:gpt2(batch=64)"
MIB, GIB = 2**20, 2**30


@dataclass(frozen=True, slots=True)
class Case:
    """One comparison on one machine."""

    name: str
    source: Literal["measured on a V100", "estimated for an A100", "measured here"]
    """Of the chain's times."""
    gpus: int
    memory: int
    semantics: Semantics
    microbatches: int | None = None
    """Per update; None: four per GPU."""
    time_scale: Fraction | None = None
    """Of what sleeps: the longer, the less does show what a rank costs beside its ops."""

    @property
    def clock(self) -> LaunchClock:
        """What is measured here trains here."""
        return "real" if self.source == "measured here" else "sleep"

    def chain(self, profiles: Path) -> Chain:
        """What is trained."""
        if self.source == "measured here":
            return _measured()
        if self.source == "estimated for an A100":
            return _estimated()
        return _imported(profiles, self.name)

    def machines(self) -> Cluster:
        """What it is planned for: links of 12 GB/s, or those between processes here."""
        if self.clock == "real":
            return measure_here(self.gpus, self.memory)
        return uniform(self.gpus, self.memory, bandwidth_bytes_per_s=BANDWIDTH, duplex="half")


CASES = (
    Case("VGG16", "measured on a V100", 4, 13 * GIB, "2bw", time_scale=Fraction(1, 2)),
    Case("ResNet-50", "measured on a V100", 4, 12 * GIB, "2bw", time_scale=Fraction(1, 2)),
    Case("GPT-2 medium, flush", "estimated for an A100", 4, 16 * GIB, "flush", 8, Fraction(2)),
    Case("small GPT-2, flush", "measured here", 2, 150 * MIB, "flush"),
    Case("small GPT-2, 2bw", "measured here", 2, 115 * MIB, "2bw"),
)


def _imported(profiles: Path, name: str) -> Chain:
    file = profiles / f"pipedream-{name.lower().replace('-', '')}-b128.graph.txt"
    text = file.read_text(encoding="utf-8")
    return pipedream(text, name=name, microbatch_size=128, where=str(file))


def _estimated() -> Chain:
    from pipeplan.capture import estimate  # only where it is asked for: it needs torch
    from pipeplan.devices import find_device

    return estimate("pipeplan.tasks:gpt2(size='medium')", find_device("a100"))


@cache
def _measured() -> Chain:
    """The small model as it runs beside another rank."""
    from pipeplan.capture import profile

    give_back_large_blocks(os.environ)  # as `pipeplan profile` and the ranks of a run do
    return profile(SMALL, repeats=40, companions=1)


def measured(case: Case, profiles: Path, rounds: int) -> LaunchedPoint:
    """The case's plans, compared and launched."""
    config = Config(
        semantics=case.semantics,
        microbatches=case.microbatches,
        time_limit_s=LIMIT_S,
        deterministic=True,
        workers=1,
    )
    more = TORCH_SCHEDULES if case.semantics == "flush" else {}
    request = Request(
        case.chain(profiles), (case.machines(),), config, SEARCH_S, jobs=2, more=more
    )
    (point,) = compare(request, _tell).points
    asked = LaunchRequest(case.clock, rounds, case.time_scale)
    return launch_point(point, case.semantics, asked, _tell)


def _tell(share: float, what: str) -> None:
    print(f"{share:4.0%}  {what}", file=sys.stderr, flush=True)


def draw(name: str, row: dict[str, Any]) -> None:
    """The picture of one case."""
    bars = [
        PlanBars("\n= ".join(each["names"]), each["predicted_ns"], tuple(each["rounds_ns"]))
        for each in row["launched"]["plans"]
        if each["rounds_ns"]
    ]
    draw_bars(f"{name}: {row['title']}", bars, IMAGES / image(name))


def image(name: str) -> str:
    """The file of a case's picture."""
    return f"side-by-side-{name.lower().replace(',', '').replace(' ', '-')}.png"


def page(found: dict[str, Any]) -> Iterator[str]:
    """Predicted and measured times of all cases."""
    rows = {name: kept["run"] for name, kept in found.items()}
    yield "# Plans launched side by side"
    yield (
        "The command `PYTHONPATH=. python -m benchmarks.side_by_side --profiles FOLDER` makes"
        " these tables and pictures: it compares plans and launches them, as `pipeplan compare"
        " --launch` does ([how](../how-to/compare.md#launch-the-plans)), one process per GPU, all"
        " plans in turns. Times are per micro-batch. `predicted` is the simulator's on the eager"
        " clock; where a case says what is beside each op, a launch of equal stages has measured"
        " that, and predictions count it. `measured` is the median of the rounds, `rounds differ`"
        " their range over it; what else a machine does makes rounds longer and never shorter, so"
        " that the fastest one says what a plan takes. `beside its ops` is by how much a step was"
        " longer than a replay whose ops take what they took in it. Plans that share a line are"
        " one plan."
    )
    yield "## Summary"
    yield bullets(_summary(rows))
    for name, row in rows.items():
        yield f"## {name}"
        yield f"Times {row['times']}; {row['title']}. {_machine(row['host'])}"
        yield f"![predicted and measured times of {name}](../img/{image(name)})"
        yield table(*_table(row["launched"]["plans"]))


def _summary(rows: dict[str, Any]) -> Iterator[str]:
    for name, row in rows.items():
        launched = row["launched"]
        plans = [each for each in launched["plans"] if each["measured_ns"] is not None]
        fastest = [min(each["rounds_ns"]) / each["predicted_ns"] - 1 for each in plans]
        worst = max((each["difference"] for each in plans), key=abs)
        agree, parted = launched["pairs_in_order"], launched["pairs_out_of_order"]
        yield (
            f"{name}: {len(plans)} of {len(launched['plans'])} plans ran; {agree} of"
            f" {agree + parted} pairs in the predicted order, {launched['pairs_too_close']} nearer"
            f" than rounds differ; largest difference {worst:+.1%}, of the fastest rounds"
            f" {max(fastest, key=abs):+.1%}"
            + (f"; bytes {_bytes(plans)}" if launched["clock"] == "real" else "")
        )


def _bytes(plans: list[dict[str, Any]]) -> str:
    equal = sum(each["predicted_peak_bytes"] == each["measured_peak_bytes"] for each in plans)
    return f"equal to the planned ones on all ranks of {equal} of {len(plans)} plans"


def _table(plans: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    counted = any(each["measured_peak_bytes"] for each in plans)
    head = ["schedule", "predicted", "measured", "difference"]
    head += ["beside its ops", "fastest round", "rounds differ"]
    rows = []
    for each in plans:
        cells = [" = ".join(each["names"]), format_ns(each["predicted_ns"])]
        if each["measured_ns"] is None:
            cells += [each["failure"] or "not run", "-", "-", "-", "-"]
        else:
            rests = each.get("beside_ops")
            spread = (max(each["rounds_ns"]) - min(each["rounds_ns"])) / each["measured_ns"]
            cells += [
                format_ns(each["measured_ns"]),
                f"{each['difference']:+.1%}",
                f"{median(rests):+.1%}" if rests else "-",
                f"{min(each['rounds_ns']) / each['predicted_ns'] - 1:+.1%}",
                f"{spread:.1%}",
            ]
        rows.append(cells + ([_peaks(each)] if counted else []))
    return [*head, *(["peaks, planned | counted"] if counted else [])], rows


def _peaks(each: dict[str, Any]) -> str:
    counted = each["measured_peak_bytes"] or [None] * len(each["predicted_peak_bytes"])
    pairs = zip(each["predicted_peak_bytes"], counted, strict=True)
    return ", ".join(
        f"{format_bytes(one)} / {'-' if other is None else format_bytes(other)}"
        for one, other in pairs
    )


def _machine(host: dict[str, Any]) -> str:
    return (
        f"{host['cores']} cores ({host['machine']}), torch {host['torch']}, load average"
        f" {host['load'][0]:.1f} before."
    )


def _host() -> dict[str, Any]:
    from importlib.metadata import version

    return {
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
        "torch": version("torch"),
    }


def main() -> int:
    """The cases that the file lacks, or those that are named."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = [case.name for case in CASES]
    parser.add_argument(
        "names", nargs="*", type=one_of(known), metavar="NAME", help=", ".join(known)
    )
    parser.add_argument("--profiles", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--rounds", type=common.count(1), default=3, metavar="N", help="(3)")
    args = parser.parse_args()
    store = Store(RESULT)
    for case in CASES:
        if case.name not in args.names and (args.names or case.name in store.rows):
            continue
        host = _host()
        print(case.name, file=sys.stderr)
        done = measured(case, args.profiles, args.rounds)
        common.screen().print("", case.name, title(done), launched_table(done), sep="\n")
        print(*remarks(done), sep="\n")
        if done.interrupted:
            return 130
        row = {
            "times": case.source,
            "title": title(done),
            "host": host,
            "launched": data([done])[0],
        }
        store.rows.setdefault(case.name, {})
        store.put(case.name, "run", row)
        draw(case.name, row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
