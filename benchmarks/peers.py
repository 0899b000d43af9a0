"""Our step plans beside the schedules that others ship, within the same memory, under flush.

    python -m benchmarks.peers [--limit 15s] [--only NAME ..] [--out FILE]

Every row is a chain, a number of GPUs P, m micro-batches and a memory: a share of what 1F1B with a
flush needs at most on stages of equal times. The best of everyone else (`pipeplan.compare`: every
schedule on every split) that fits is put beside the plan that we find within the limit. The chains
of models are estimated for an A100; the uneven one is random. GPUs are joined by links of 25 GB/s.
Times are steps without their update. What the file has is not measured again.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from pathlib import Path
from statistics import geometric_mean
from typing import Any, NamedTuple

from benchmarks.markdown import bullets, table
from benchmarks.store import Store
from pipeplan.baselines.timed import Setting
from pipeplan.chain import Chain, Layer
from pipeplan.cli import common
from pipeplan.cluster import Cluster, uniform
from pipeplan.compare.families import STEP_FAMILIES, listed
from pipeplan.compare.rows import Row, check, row_of
from pipeplan.errors import InfeasibleError, InputError, TimeLimitError
from pipeplan.planner import Config, solve
from pipeplan.torch_schedules import TORCH_SCHEDULES

RESULT = Path(__file__).parent / "results" / "peers.json"
ROOM = 2**50
MODELS = {
    "ResNet-50": "resnet(size=50, batch=32, side=224)",
    "DenseNet-121": "densenet(size=121, batch=32, side=224)",
    "GPT-2 medium": "gpt2(size='medium', batch=4)",
    "Llama 1B": "llama(size='1b')",
    "T5 base": "t5(size='base', batch=8)",
}
UNEVEN = "uneven"
NAMES = (*MODELS, UNEVEN)
GPUS = (4, 8, 16)
TIMES = (1, 2, 4)
"""Micro-batches per GPU; they take turns."""
SHARES = (1.2, 1.0, 0.75, 0.5)
COLUMNS = ("chain", "GPUs", "m", "memory", "ours", "best peer", "", "peer / ours")


class Case(NamedTuple):
    """One row."""

    name: str
    gpus: int
    microbatches: int
    share: float

    @property
    def key(self) -> str:
        """What identifies the row."""
        return f"{self.name} {self.gpus} GPUs m={self.microbatches} {self.share:g}"


def cases(only: Sequence[str] = NAMES) -> Iterator[Case]:
    """All rows; the four memories of a chain on as many GPUs follow each other."""
    for turn, name in enumerate(NAMES):
        for place, gpus in enumerate(GPUS):
            for share in SHARES if name in only else ():
                yield Case(name, gpus, gpus * TIMES[(turn + place) % len(TIMES)], share)


@cache
def chain_of(name: str) -> Chain:
    """The chain; layers that share a parameter may be on several GPUs."""
    if name == UNEVEN:
        return uneven()
    from pipeplan.capture import estimate  # only here: it needs torch
    from pipeplan.devices import find_device

    chain = estimate(f"pipeplan.tasks:{MODELS[name]}", find_device("a100"))
    return chain.model_copy(update={"tied": "synchronize"})


def uneven() -> Chain:
    """64 random layers: times and bytes differ tenfold, of a backward 30 to 60 % are for W."""
    source, layers = random.Random(0), []
    for number in range(64):
        forward = source.randint(200_000, 2_000_000)
        saved = source.randint(2, 20) * 2**20
        output = source.randint(1, 8) * 2**20
        layers.append(
            Layer(
                name=f"layer{number}",
                forward_ns=forward,
                backward_ns=2 * forward,
                backward_weight_ns=2 * forward * source.randint(30, 60) // 100,
                output_bytes=output,
                saved_bytes=saved,
                saved_for_weight_bytes=saved * source.randint(30, 70) // 100,
                weight_bytes=2**20,
                gradient_bytes=2**20,
            )
        )
    return Chain(name=UNEVEN, layers=tuple(layers))


def cluster(gpus: int, memory: int) -> Cluster:
    """Equal GPUs on links of 25 GB/s."""
    return uniform(gpus, memory, bandwidth_bytes_per_s=25 * 10**9)


@lru_cache(maxsize=1)
def field(name: str, gpus: int, microbatches: int) -> tuple[Row, ...]:
    """Every way of every schedule with a flush on GPUs of more memory than any needs."""
    setting = Setting(chain_of(name), cluster(gpus, ROOM), microbatches=microbatches)
    more = {each: listed(*schedules) for each, schedules in TORCH_SCHEDULES.items()}
    rows: list[Row] = []
    for each, ways in (STEP_FAMILIES | more).items():
        try:
            rows += ways(setting, each, microbatches)
        except InputError as error:
            print(f"  {error}", file=sys.stderr)
    return tuple(rows)


def memory_of(case: Case) -> int:
    """Bytes of a GPU: the share of 1F1B's peak."""
    rows = field(case.name, case.gpus, case.microbatches)
    one = next(row for row in rows if row.name == "1F1B with flush")
    return int(case.share * max(one.peak_bytes))


def peers(case: Case) -> dict[str, Any]:
    """By schedule its fastest way that fits: step in ns and which it is; every voice agrees."""
    found: dict[str, Any] = {}
    memory, fastest = memory_of(case), None
    for row in field(case.name, case.gpus, case.microbatches):
        step = int(row.period_ns * case.microbatches)
        if max(row.peak_bytes) <= memory and step < found.get(row.name, {}).get("step_ns", ROOM):
            found[row.name] = {"step_ns": step, "detail": row.detail}
            if fastest is None or row.period_ns < fastest.period_ns:
                fastest = row
    if fastest is not None:
        check(fastest)
    return {"memory_bytes": memory, "steps": found}


def ours(case: Case, memory: int, limit_s: float) -> dict[str, Any]:
    """Our step in ns on GPUs of so many bytes; without one the reason."""
    config = Config(
        semantics="flush",
        microbatches=case.microbatches,
        time_limit_s=limit_s,
        workers=1,
        deterministic=True,
    )
    chain, machines = chain_of(case.name), cluster(case.gpus, memory)
    work = sum(layer.forward_ns + layer.backward_ns for layer in chain.layers)
    result: dict[str, Any] = {"limit_s": limit_s, "load_ns": work * case.microbatches / case.gpus}
    try:
        plan = solve(chain, machines, config)
    except (InfeasibleError, TimeLimitError) as error:
        return result | {"none": type(error).__name__}
    step = int(row_of("pipeplan", plan).period_ns * case.microbatches)
    return result | {"step_ns": step, "stages": len(plan.stages), "k": plan.k}


def best(row: dict[str, Any]) -> tuple[str, int] | None:
    """Name and step of the fastest schedule that fits, if one does."""
    steps = {name: each["step_ns"] for name, each in row["peers"]["steps"].items()}
    name = min(steps, key=lambda each: steps[each], default=None)
    return None if name is None else (name, steps[name])


def cells(case: Case, row: dict[str, Any]) -> tuple[str, ...]:
    """A line of the table: steps over the load."""
    load, mine, theirs = row["ours"]["load_ns"], row["ours"].get("step_ns"), best(row)
    return (
        case.name,
        str(case.gpus),
        str(case.microbatches),
        f"{case.share:.0%}",
        "-" if mine is None else f"{mine / load:.4f}",
        "-" if theirs is None else f"{theirs[1] / load:.4f}",
        "" if theirs is None else theirs[0],
        "-" if mine is None or theirs is None else f"{theirs[1] / mine:.4f}",
    )


def summary(measured: Sequence[tuple[Case, dict[str, Any]]]) -> Iterator[str]:
    """Who is faster how often, and by how much on average."""
    both, only, lost = [], 0, []
    for case, row in measured:
        mine, theirs = row["ours"].get("step_ns"), best(row)
        if mine is not None and theirs is not None:
            both.append((theirs[1] / mine, case, theirs[0]))
        only += mine is not None and theirs is None
        if theirs is not None and (mine is None or theirs[1] < mine):
            lost.append(f"{case.key} ({theirs[0]})")
    mean = geometric_mean(ratio for ratio, *_ in both)
    yield f"{len(measured)} rows: in {len(both)} ours and a peer fit, in {only} ours alone"
    yield f"geometric mean of best peer / ours: {mean:.4f}, at most {max(both)[0]:.4f}"
    for share in SHARES:
        of = [ratio for ratio, case, _ in both if case.share == share]
        if of:
            there = geometric_mean(of)
            yield f"with {share:.0%} of 1F1B's memory: {there:.4f} over {len(of)} rows"
    yield f"rows with a faster peer: {_listed(lost)}"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"


def in_short(found: dict[str, Any]) -> str:
    """What README.md says of all rows."""
    pairs = [(row["ours"].get("step_ns"), best(row)) for _, row in measured_rows(found)]
    ratios = [theirs[1] / mine for mine, theirs in pairs if mine and theirs]
    mean = geometric_mean(ratios)
    lost = sum(1 for mine, theirs in pairs if theirs and (mine is None or theirs[1] < mine))
    return (
        "With `--semantics flush` the planner plans whole steps. Within the same memory, the"
        " fastest of everyone else's schedules\n(1F1B, interleaved, zero-bubble, torch's own)"
        f" takes {mean:.2f} times as long, in the geometric mean of {len(ratios)} instances;\n"
        f"it is faster in {lost or 'none'} of them ([rows](docs/results/peers.md))."
    )


def measured_rows(found: dict[str, Any]) -> list[tuple[Case, dict[str, Any]]]:
    """The rows with both sides, in order."""
    return [(case, found[case.key]) for case in cases() if "ours" in found.get(case.key, {})]


def page(found: dict[str, Any]) -> Iterator[str]:
    """The result page."""
    known = measured_rows(found)
    limits = sorted({row["ours"]["limit_s"] for _, row in known})
    yield "# Step plans beside the schedules of others"
    yield (
        "The command `python -m benchmarks.peers` measures these rows: one step under flush on P"
        " GPUs with links of 25 GB/s, updates left out, over m times the load of a GPU if all were"
        " equally loaded. Ours has"
        f" {' to '.join(f'{each:g}' for each in limits)} s of counted work on one core. The"
        " best peer is the fastest that fits of all schedules with a"
        " flush of [compare](../how-to/compare.md), torch's included, each on stages of equal"
        " times, layers and parameters. Memory is a share of what 1F1B with a flush needs on"
        " stages of equal times. ResNet-50 to T5 are estimated for an A100; `uneven` are 64 random"
        " layers. `-`: nothing fits."
    )
    yield "## Summary"
    longer = [case.key for case, row in known if row["ours"]["limit_s"] > limits[0]]
    yield bullets([*summary(known), f"rows with more than {limits[0]:g} s: {_listed(longer)}"])
    yield "## Table"
    yield table(COLUMNS, [cells(case, row) for case, row in known])


def main() -> int:
    """Measure what is missing, print the summary; 1 if a peer is faster anywhere."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--limit", type=common.duration, default=15 * 10**9, metavar="TIME")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, metavar="NAME")
    parser.add_argument("--out", type=Path, default=RESULT, metavar="FILE", help="%(default)s")
    args = parser.parse_args()
    store = Store(args.out)
    for case in cases(args.only):
        row = store.rows.setdefault(case.key, {})
        if "ours" in row:
            continue
        if "peers" not in row:
            store.put(case.key, "peers", peers(case))
        memory = row["peers"]["memory_bytes"]
        store.put(case.key, "ours", ours(case, memory, args.limit / 1e9))
        print(*cells(case, row), file=sys.stderr, flush=True)
    lines = list(summary([(case, store.rows[case.key]) for case in cases(args.only)]))
    print(*lines, sep="\n")
    return int(not lines[-1].endswith("none"))


if __name__ == "__main__":
    sys.exit(main())
