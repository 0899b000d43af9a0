"""Joint plans under scarce memory, trained on four processes; ops and links take planned time.

    PYTHONPATH=. python -m benchmarks.joint_runs [--quick] [--compute 3s] [TASK ...]

Each plan is trained twice: with every live byte counted, then in time. There layers really
compute, each op sleeps until its planned time is over, and messages take that of their link, so
neither the number of cores nor other work decides the period. Prints, and writes to
benchmarks/results/joint_runs.json:

equal:  losses and weights are bit for bit those of one process, in both.
peak:   predicted / measured bytes of the ranks, least and most; over: most measured / budget.
period: predicted / measured time between micro-batches, the first step left out; predicted by the
        simulator's eager clock.

A share at which no plan exists (a layer that fits nowhere) is raised to the least one that works.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.runtime import world
from benchmarks.store import one_of
from pipeplan import lowering, tasks
from pipeplan.capture import profile_task, split
from pipeplan.chain import Chain
from pipeplan.cli import common
from pipeplan.cluster import Cluster, uniform
from pipeplan.errors import InfeasibleError
from pipeplan.livebytes import LiveBytes
from pipeplan.plan import OpKind, Plan, Semantics
from pipeplan.planner import Config, solve
from pipeplan.runtime.build import Worker, build
from pipeplan.runtime.data.feed import TaskFeed, Uses
from pipeplan.runtime.dry_run.clock import SleepClock
from pipeplan.runtime.instrument import CountedFeed, CountedTransport, states
from pipeplan.runtime.interfaces import Observer
from pipeplan.runtime.parameters.tied_parameters import untie
from pipeplan.runtime.transport.base import Transport
from pipeplan.simulator import simulate
from pipeplan.simulator.tape import number
from pipeplan.task import Task
from pipeplan.testing import reference
from pipeplan.testing.emulated_links import EmulatedTransport
from pipeplan.testing.plans import NO_OTHER_TIMES

RANKS, MICROBATCHES, STEPS, SEED = 4, 8, 2, 3
TASKS: dict[str, Callable[[], Task]] = {
    "gpt2": partial(tasks.gpt2, batch=8),
    "resnet": partial(tasks.resnet, width=8, batch=8),
    "t5": partial(tasks.t5, batch=8),
}
SHARES = (0.6, 0.5, 0.4, 0.3)
COMPUTE_NS = 3 * 10**9
"""Forward and backward of one micro-batch through all layers: far more than they really take."""
RESULT = Path(__file__).parent / "results" / "joint_runs.json"


def profiled(name: str, compute_ns: int = COMPUTE_NS) -> Chain:
    """The chain of a task: its bytes, and its times stretched to `compute_ns`."""
    torch.manual_seed(0)
    chain = profile_task(TASKS[name](), repeats=5, warmup=1)
    total = sum(layer.forward_ns + layer.backward_ns for layer in chain.layers)
    layers = tuple(
        layer.model_copy(
            update={
                **NO_OTHER_TIMES,
                "forward_ns": layer.forward_ns * compute_ns // total,
                "backward_ns": layer.backward_ns * compute_ns // total,
            }
        )
        for layer in chain.layers
    )
    return chain.model_copy(update={"layers": layers})


def machines(chain: Chain, memory: int) -> Cluster:
    """Four GPUs; the largest boundary takes a fiftieth of a micro-batch's compute time."""
    largest = max(layer.output_bytes for layer in chain.layers)
    compute = sum(layer.forward_ns + layer.backward_ns for layer in chain.layers)
    speed = largest * 50 * 10**9 // compute
    return uniform(RANKS, memory, bandwidth_bytes_per_s=speed, latency_ns=1_000_000)


def planned(chain: Chain, semantics: Semantics, share: float) -> tuple[float, Plan]:
    """A joint plan on `share` of the peak that a plan without a limit has, and that share."""
    ample = Config(semantics=semantics, microbatches=MICROBATCHES, method="contiguous", k=1)
    free = solve(chain, machines(chain, 2**40), ample)
    peak = max(row.peak_bytes for row in free.memory)
    scarce = replace(ample, k="auto", recompute="auto", time_limit_s=5, workers=1)
    while True:
        try:
            return share, solve(chain, machines(chain, int(share * peak)), scarce)
        except InfeasibleError:
            share = round(share + 0.02, 2)


@dataclass
class Heard(Observer):
    """Losses, and when ops ended on this rank."""

    losses: dict[int, float] = field(default_factory=dict)
    ends: dict[int, int] = field(default_factory=dict)
    """Of the first stage's backwards, by micro-batch."""

    def loss(self, microbatch: int, value: float) -> None:
        """See `Observer`."""
        self.losses[microbatch] = value


def trained(plan: Plan, make: Callable[[], Task], transport: Transport) -> list[dict[str, Any]]:
    """What all ranks have to tell of both runs: peak, losses, digests, ends of backwards."""
    both = {**_counted(plan, make, transport), **_in_time(plan, make, transport)}
    return transport.gather(both)


def _counted(plan: Plan, make: Callable[[], Task], transport: Transport) -> dict[str, Any]:
    task, heard, live = _seeded(make), Heard(), LiveBytes()
    model = untie(split(task), task.tied)
    uses = Uses.of(plan, model, transport.rank)
    feed = CountedFeed(TaskFeed(task, model, uses), live)
    counted = CountedTransport(transport, live)
    worker = build(plan, lowering.lower(plan), model, task, feed, counted, heard, seed=SEED)
    live.count(states(worker))
    with live:
        worker.executor.run(0, STEPS)
    return {"peak": live.peak, "counted": _left(worker, heard)}


def _in_time(plan: Plan, make: Callable[[], Task], transport: Transport) -> dict[str, Any]:
    task, heard, clock = _seeded(make), Heard(), SleepClock()
    model, durations = untie(split(task), task.tied), dict[int, int]()
    linked = EmulatedTransport(transport, clock, durations)
    feed = TaskFeed(task, model, Uses.of(plan, model, transport.rank))
    worker = build(plan, lowering.lower(plan), model, task, feed, linked, heard, seed=SEED)
    durations.update(_lasting(plan, worker))
    for index, stage in worker.stages.items():
        _pace(plan, index, stage, clock, heard.ends if index == 0 else {})
    transport.gather(None)
    worker.executor.run(0, STEPS)
    return {"ends": heard.ends, "in_time": _left(worker, heard)}


def _seeded(make: Callable[[], Task]) -> Task:
    torch.manual_seed(0)
    return make()


def _left(worker: Worker, heard: Heard) -> dict[str, Any]:
    weights = {k: v for stage in worker.stages.values() for k, v in stage.state().items()}
    return {"losses": heard.losses, "weights": digests(weights)}


def _lasting(plan: Plan, worker: Worker) -> dict[int, int]:
    """By tag: a transfer's time, which the last tensor of its message takes."""
    ns = {(op.kind, op.stage): op.duration_ns for op in plan.ops}
    found: dict[int, int] = {}
    for index, each in worker.endpoints.items():
        before, after = (OpKind.SEND_F, index - 1), (OpKind.SEND_B, index + 1)
        for named, endpoint in (
            ((OpKind.SEND_F, index), each.output),
            ((OpKind.SEND_B, index), each.input_gradient),
            (before, each.input),
            (after, each.output_gradient),
        ):
            if endpoint is not None and endpoint.tags:
                found[endpoint.tags[-1]] = ns[named]
    return found


def _pace(plan: Plan, index: int, stage: Any, clock: SleepClock, ends: dict[int, int]) -> None:
    """Each forward and backward of `stage` takes its planned time; `ends` hears of backwards."""
    ns = {(op.kind, op.stage): op.duration_ns for op in plan.ops}

    def paced(work: Callable[..., Any], kind: OpKind) -> Callable[..., Any]:
        def run(microbatch: int, *rest: Any) -> Any:
            begin = clock.now()
            result = work(microbatch, *rest)
            clock.until(begin + ns[kind, index])
            if kind is OpKind.B:
                ends[microbatch] = clock.now()
            return result

        return run

    for name, kind in (("forward", OpKind.F), ("backward", OpKind.B)):
        setattr(stage, name, paced(getattr(stage, name), kind))


def digests(weights: Mapping[str, Tensor]) -> dict[str, str]:
    """What tells whether tensors are equal bit for bit, by name."""
    return {
        name: hashlib.sha256(value.detach().contiguous().numpy().tobytes()).hexdigest()
        for name, value in weights.items()
    }


def predicted_ends(plan: Plan) -> dict[int, int]:
    """When the first stage's backwards end on the eager clock, by micro-batch."""
    total = STEPS * MICROBATCHES
    told = simulate(plan, lowering.lower(plan), microbatches=total, clock="eager", updates=True)
    found = dict(enumerate(told.times.end[number(OpKind.B, 0)][:total]))
    return {key: end for key, end in found.items() if end is not None}


def period(ends: Mapping[int, int]) -> float:
    """Mean ns between micro-batches behind the first step."""
    first, last = MICROBATCHES - 1, STEPS * MICROBATCHES - 1
    return (ends[last] - ends[first]) / (last - first)


def case(name: str, chain: Chain, share: float, semantics: Semantics) -> dict[str, Any]:
    """One row."""
    used, plan = planned(chain, semantics, share)
    alone = _seeded(TASKS[name])
    expected = reference.train(semantics, split(alone), alone, STEPS, MICROBATCHES, SEED)
    told = world(RANKS, partial(trained, plan, TASKS[name]))
    pairs = [(row, each["peak"]) for row, each in zip(plan.memory, told, strict=True)]
    peaks = [row.peak_bytes / peak for row, peak in pairs if peak or row.peak_bytes]
    over = [peak / row.budget_bytes for row, peak in pairs]
    runs = [run for stage in plan.stages if stage.remat for run in stage.remat.recompute]
    return {
        "task": name,
        "f": used,
        "semantics": semantics,
        "runs": len(runs),
        "equal": all(_same(expected, told, which) for which in ("counted", "in_time")),
        "peak_least": min(peaks),
        "peak_most": max(peaks),
        "over": max(over),
        "period": period(predicted_ends(plan)) / period(told[0]["ends"]),
    }


def _same(expected: reference.Trained, told: Sequence[Mapping[str, Any]], which: str) -> bool:
    losses = {key: loss for each in told for key, loss in each[which]["losses"].items()}
    weights = {key: value for each in told for key, value in each[which]["weights"].items()}
    known = digests(expected.weights).items()
    equal = [losses[key] for key in sorted(losses)] == expected.losses
    return equal and all(weights[key] == value for key, value in known)


def row(found: Mapping[str, Any]) -> str:
    """One line of the table."""
    return (
        f"| {found['task']} | {found['f']} | {found['semantics']} | {found['runs']} |"
        f" {'yes' if found['equal'] else 'NO'} |"
        f" {found['peak_least']:.4f} to {found['peak_most']:.4f} | {found['over']:.3f} |"
        f" {found['period']:.3f} |"
    )


def main() -> None:
    """All rows and the file; rows of tasks that are not named stay in it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    kinds = ", ".join(TASKS)
    parser.add_argument("tasks", nargs="*", type=one_of(tuple(TASKS)), metavar="TASK", help=kinds)
    parser.add_argument("--quick", action="store_true", help="one share of each task")
    time = "of a micro-batch through all layers; the more, the less does a busy machine show (3s)"
    parser.add_argument("--compute", type=common.duration, default=COMPUTE_NS, help=time)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| task | f | semantics | runs | equal | peak, predicted / measured | over | period |")
    print("|---|---|---|---|---|---|---|---|")
    rows = []
    semantics: tuple[Semantics, ...] = ("flush", "2bw")
    for name in options.tasks or TASKS:
        chain = profiled(name, options.compute)
        for share in (0.5,) if options.quick else SHARES:
            for each in semantics:
                rows.append(case(name, chain, share, each))
                print(row(rows[-1]), flush=True)
    if not options.quick:
        before = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.exists() else []
        rows += [each for each in before if each["task"] not in (options.tasks or TASKS)]
        rows.sort(key=lambda each: list(TASKS).index(each["task"]))
        RESULT.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
