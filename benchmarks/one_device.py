"""Plans of one GPU beside those of the per-device planner, in scarce memory.

    python -m benchmarks.one_device [--limit 20s] [--only NAME ...] [--out FILE]

`pipeplan remat` decides, for one device alone, what it recomputes and what it offloads in the
midst of its forward and backward. A plan of one GPU could do the same: what it takes longer is
what the planner does not know. Each task is estimated for a device, so that times and bytes are
the same anywhere. Its way to the host, half duplex, takes the task's compute time for `MOVED` of
the bytes that a forward keeps. Ten budgets go evenly from the least of the per-device planner to
what keeps everything. `remat` knows nothing of a second version of the weights, of gradients of
tied weights that wait meanwhile (M1), of copies of buffers where layers are computed again (V4),
nor of the optimizer's workspace: a plan's memory is larger by the former three, and the latter is
left out. The
limit counts work, so that a busy machine plans the same; rows that the file has are not measured
again.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from statistics import geometric_mean
from typing import Any, NamedTuple

from rich.table import Table

from benchmarks.markdown import table
from benchmarks.planner import Store
from pipeplan.chain import Chain
from pipeplan.cli import common
from pipeplan.cluster import Host, uniform
from pipeplan.devices import Device
from pipeplan.errors import InfeasibleError, PipeplanError
from pipeplan.planner import Config, solve
from pipeplan.remat import Costs, HostLink, from_chain, judge, rematerialize_chain
from pipeplan.remat.checkpointing.periodic import keep_all
from pipeplan.testing.instances import UNLIMITED

RESULT = Path(__file__).parent / "results" / "one_device.json"
CORES = Device(
    name="two CPU cores",
    flops_per_s={"float32": 10**11},
    bandwidth_bytes_per_s=10**10,
    launch_ns=5000,
)
"""About what the demo runs on."""
TASKS = {
    "GPT-2 of the demo": ("examples/gpt2_stdlib.py:task", "cores"),
    "ResNet-50": ("pipeplan.tasks:resnet(size=50,batch=32,side=224)", "v100"),
    "Llama 1B": ("pipeplan.tasks:llama(size='1b')", "a100"),
    "T5 base": ("pipeplan.tasks:t5(size='base',batch=8)", "a100"),
}
METHODS = {"recompute": "rotor", "offload": "swap", "both": "auto"}
"""What the per-device planner does for each kind of plan."""
MOVED = 0.5
"""Of what a forward keeps: bytes that cross the way to the host in the compute time."""
POINTS = 10
HALVINGS = 8
"""Of what lies between a budget with a plan and one without."""
COLUMNS = (
    "", "kind", "least, per-device", "least, plan", "ratio", "plans", "longer, mean",
    "longer, most",
)  # fmt: skip


class Case(NamedTuple):
    """One task with one kind of plan."""

    name: str
    kind: str

    @property
    def key(self) -> str:
        """What identifies the row."""
        return f"{self.name} {self.kind}"


@cache
def _chain(name: str) -> Chain:
    from pipeplan.capture import estimate  # only here: they need torch
    from pipeplan.devices import find_device

    task, device = TASKS[name]
    chain = estimate(task, CORES if device == "cores" else find_device(device))
    layers = (x.model_copy(update={"optimizer_workspace_bytes": 0}) for x in chain.layers)
    return chain.model_copy(update={"layers": tuple(layers)})


@cache
def _bandwidth(name: str) -> int:
    costs = from_chain(_chain(name))
    kept = judge(costs, keep_all(costs)).peak_bytes - costs.static
    return int(MOVED * kept * 10**9 / costs.compute)


def cases() -> Iterator[Case]:
    """All tasks, all kinds."""
    for name in TASKS:
        for kind in METHODS:
            yield Case(name, kind)


def per_device(case: Case) -> dict[str, Any]:
    """Least bytes, budgets, and the time of each of them, in compute times."""
    costs = from_chain(_chain(case.name))
    channel = None if case.kind == "recompute" else HostLink(_bandwidth(case.name))
    method, high = METHODS[case.kind], judge(costs, keep_all(costs)).peak_bytes
    low = _least(costs, method, channel)
    budgets = [low + (high - low) * at // (POINTS - 1) for at in range(POINTS)]
    found = [rematerialize_chain(costs, each, method, channel=channel) for each in budgets]
    times = [each.outcome.makespan_ns / costs.compute for each in found]
    return {"static": costs.static, "least": low, "budgets": budgets, "times": times}


def _least(costs: Costs, method: str, channel: HostLink | None) -> int:
    """The least bytes for which the method has a schedule."""
    try:
        found = rematerialize_chain(costs, costs.static + 1, method, channel=channel)
    except InfeasibleError as error:
        return error.least_bytes or costs.static
    return found.peak_bytes


def planned(case: Case, known: dict[str, Any], limit_s: float) -> dict[str, Any]:
    """The plan's time at each budget, and the least bytes at which one is found."""
    times = [period(case, each, limit_s) for each in known["budgets"]]
    return {"times": times, "least": least(case, known, times, limit_s), "limit_s": limit_s}


def period(case: Case, memory: int, limit_s: float) -> float | None:
    """The period of the plan that is found, in compute times; None if there is none."""
    chain = _chain(case.name)
    host = Host(memory_bytes=UNLIMITED, bandwidth_bytes_per_s=_bandwidth(case.name), duplex="half")
    memory += sum(layer.weight_bytes + layer.waiting_gradient_bytes for layer in chain.layers)
    if case.kind != "offload":
        memory += sum(layer.buffer_bytes for layer in chain.layers)
    cluster = uniform(1, memory).model_copy(update={"host": host})
    config = Config(
        recompute="off" if case.kind == "offload" else "auto",
        offload="off" if case.kind == "recompute" else "auto",
        time_limit_s=limit_s,
        deterministic=True,
        workers=1,
    )
    try:
        plan = solve(chain, cluster, config)
    except PipeplanError:
        return None
    return float(plan.period_per_microbatch) / from_chain(chain).compute


def least(
    case: Case, known: dict[str, Any], times: list[float | None], limit_s: float
) -> int | None:
    """Least bytes at which a plan is found, to a part of the space between two budgets.

    None if there is no plan at any of the budgets.
    """
    budgets = known["budgets"]
    at = next((number for number, time in enumerate(times) if time is not None), None)
    if at is None:
        return None
    low, high = budgets[max(0, at - 1)], budgets[at]
    for _ in range(HALVINGS if at else 0):
        middle = (low + high) // 2
        if period(case, middle, limit_s) is None:
            low = middle
        else:
            high = middle
    return int(high)


def cells(case: Case, row: dict[str, Any]) -> tuple[str, ...]:
    """A line of the table."""
    static, mine = row["remat"]["static"], row["plan"]["least"]
    theirs, both = row["remat"]["least"] - static, _both(row)
    return (
        case.name,
        case.kind,
        f"{theirs / 2**20:.1f}",
        f"{(mine - static) / 2**20:.1f}" if mine else "-",
        f"{(mine - static) / theirs:.3f}" if mine else "-",
        f"{len(both)} of {POINTS}",
        f"{geometric_mean(both) - 1:.1%}" if both else "-",
        f"{max(both) - 1:.1%}" if both else "-",
    )


def _both(row: dict[str, Any]) -> list[float]:
    """Time of the plan over that of the per-device planner, where there is a plan."""
    pairs = zip(row["plan"]["times"], row["remat"]["times"], strict=True)
    return [mine / theirs for mine, theirs in pairs if mine is not None]


def page(found: dict[str, Any]) -> Iterator[str]:
    """Least bytes, and time at each budget."""
    known = [case for case in cases() if "plan" in found.get(case.key, {})]
    yield "# Plans of one GPU beside the per-device planner"
    yield (
        "The command `python -m benchmarks.one_device` estimates each task for one device and asks"
        " both planners for ten budgets, evenly from the least of `pipeplan remat` to what keeps"
        " everything. `pipeplan remat` takes rotor (recompute), swap (offload) or the best of all"
        " (both); `pipeplan plan` has one GPU, room for a second version of the weights, for"
        " gradients of tied weights that wait and, where layers may be computed again, for a copy"
        " of the model's buffers, and"
        f" {found[known[0].key]['plan']['limit_s']:g} s of counted work. `least`: MiB beside"
        " weights, gradients and optimizer states. `plans`: budgets at which there is a plan."
        " `longer`: period of the plan over the time of the per-device planner."
    )
    yield table(COLUMNS, [cells(case, found[case.key]) for case in known])
    yield "## Time at each budget"
    yield (
        "Times in units of the computation alone: of the per-device planner, then of the plan. The"
        " budgets go from the least (1) to what keeps everything (10)."
    )
    head = ("", "kind", *(str(1 + at) for at in range(POINTS)))
    yield table(head, [(*case, *_times(found[case.key])) for case in known])


def _times(row: dict[str, Any]) -> Iterator[str]:
    for theirs, mine in zip(row["remat"]["times"], row["plan"]["times"], strict=True):
        yield f"{theirs:.3f} / {'-' if mine is None else f'{mine:.3f}'}"


def main() -> int:
    """Measure what is missing and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--limit", type=common.duration, default=20 * 10**9, metavar="TIME")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="tasks or kinds")
    parser.add_argument("--out", type=Path, default=RESULT, metavar="FILE", help="%(default)s")
    args = parser.parse_args()
    store, limit_s = Store(args.out), args.limit / 1e9
    shown = Table(*COLUMNS, box=None, pad_edge=False)
    for case in cases():
        if args.only and not {case.name, case.kind} & set(args.only):
            continue
        row = store.rows.setdefault(case.key, {})
        if "remat" not in row:
            store.put(case.key, "remat", per_device(case))
        if row.get("plan", {}).get("limit_s") != limit_s:
            store.put(case.key, "plan", planned(case, row["remat"], limit_s))
            print(case.key, file=sys.stderr, flush=True)
        shown.add_row(*cells(case, row))
    common.screen().print(shown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
