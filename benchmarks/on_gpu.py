"""What was planned beside what one GPU did; and modules within a budget beside torch's own way.

    python -m benchmarks.on_gpu [--small] [--out FILE]

Runs: a task is profiled on the GPU and planned for several sizes of memory, each plan is trained.
Modules: `rematerialize` within the memory that `torch.utils.checkpoint` of every block takes, and
with half of what the plain module takes more. Times are the best of several steps by the wall
clock, the GPU idle before and behind: of runs and the plain loop the median of rounds of several
steps. A part of a task (runs, modules) that the file has is not measured again. `--small` does the
same with small models, on a processor too, to try the benchmark out.
"""

from __future__ import annotations

import argparse
import copy
import gc
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.store import Store
from pipeplan import Pipeline, rematerialize, tasks
from pipeplan.capture import profile_task
from pipeplan.capture.layer_costs.device_clock import ModelDevice
from pipeplan.chain import Chain
from pipeplan.cluster import Host, uniform
from pipeplan.errors import PipeplanError
from pipeplan.host_copy import measured_bandwidth
from pipeplan.livebytes import peak_bytes
from pipeplan.plan import Plan
from pipeplan.planner import Config, solve
from pipeplan.runtime.startup.gpu_memory import GpuMemoryUse
from pipeplan.task import Task
from pipeplan.testing.instances import UNLIMITED

RESULT = Path(__file__).parent / "results" / "on_gpu.json"
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MICROBATCHES, STEPS, ROUNDS, LIMIT_S = 4, 3, 3, 3.0
WAYS = {"gpt2": ("layers", "offload"), "resnet": ("layers", "operators")}
"""How modules keep a budget: GPT-2 medium has too many operators for a search of 20 s."""
SHARES = (0.0, 0.5)
"""Budgets of modules: of what the plain one takes more than under `torch.utils.checkpoint`."""
RUNS = ((1.0, False), (0.6, False), (0.6, True))
"""Shares of what a plan that keeps everything holds beside its states; whether tensors may wait on
the host."""


class Run(NamedTuple):
    """One plan that is trained."""

    task: str
    share: float
    offload: bool

    @property
    def key(self) -> str:
        """What identifies the row."""
        return f"{self.task} run {self.share:g}{' host' if self.offload else ''}"


TASKS = {
    "gpt2": "GPT-2 medium, 8 rows of 1024 tokens, bfloat16",
    "resnet": "ResNet-50, 64 images of 224 x 224, float32",
}


def makers(small: bool) -> dict[str, Callable[[], Task]]:
    """Each of `TASKS`."""

    def gpt2() -> Task:
        shape: dict[str, Any] = {"size": "tiny"} if small else {"size": "medium", "batch": 8}
        return _moved(tasks.gpt2(0, **shape), torch.bfloat16)

    def resnet() -> Task:
        shape: dict[str, Any] = {"size": 50, "batch": 64, "side": 224}
        small_shape: dict[str, Any] = {"size": 18, "batch": 4, "side": 32}
        return _moved(tasks.resnet(0, **(small_shape if small else shape)), None)

    return {"gpt2": gpt2, "resnet": resnet}


def _moved(task: Task, kind: torch.dtype | None) -> Task:
    """On the GPU; with weights of `kind`, where it is given, and float32 ones in the optimizer."""
    assert isinstance(task.model, nn.Module)
    model = task.model.to(DEVICE)
    if kind is None:
        return replace(task, model=model)
    return replace(task, model=model.to(kind), master_weights=True)


def loop_row(task: Task) -> dict[str, Any]:
    """The plain loop that a run is to equal: gradients of all micro-batches, one update."""
    assert isinstance(task.model, nn.Module)
    model = copy.deepcopy(task.model)
    stepped = [parameter.detach().float() for parameter in model.parameters()]
    optimizer = task.optimizer([nn.Parameter(each) for each in stepped])
    masters = [each for group in optimizer.param_groups for each in group["params"]]
    pairs = list(zip(model.parameters(), masters, strict=True))

    def step() -> None:
        for number in range(MICROBATCHES):
            source, target = (part.to(DEVICE) for part in task.microbatch(number))
            task.loss(model(source), target).backward()
        for parameter, master in pairs:
            assert parameter.grad is not None
            master.grad = parameter.grad.div_(MICROBATCHES).float()
            parameter.grad = None
        optimizer.step()
        with torch.no_grad():
            for parameter, master in pairs:
                parameter.copy_(master)

    for _ in range(2):
        step()
    _reset()
    times = _rounds(lambda: [step() for _ in range(STEPS)])
    return {"measured_ns": round(median(times)), "all_ns": times, **_allocated()}


def run_row(case: Run, task: Task, chain: Chain, free: Plan, bandwidth: int) -> dict[str, Any]:
    """What the plan says and what its training did."""
    states = free.memory[0].states_bytes
    memory = states + round(case.share * (free.memory[0].peak_bytes - states))
    cluster = uniform(1, memory)
    if case.offload:
        host = Host(memory_bytes=UNLIMITED, bandwidth_bytes_per_s=bandwidth)
        cluster = cluster.model_copy(update={"host": host})
    plan = solve(chain, cluster, _config("auto" if case.offload else "off"))
    found: dict[str, Any] = {"memory": memory, "peak": plan.memory[0].peak_bytes}
    found |= {"step_ns": plan.step_ns, "host": plan.memory[0].host_bytes}
    with Pipeline(task, plan, seed=0) as pipeline:
        pipeline.run(2)
        report = pipeline.memory()
        _reset()
        times = _rounds(lambda: pipeline.run(STEPS))
        found |= _allocated()
    if report is not None and report.measured[0] is not None:
        found["live"] = report.measured[0].peak.size
    return found | {"measured_ns": round(median(times)), "all_ns": times}


def _config(offload: Any) -> Config:
    return Config(
        semantics="flush",
        microbatches=MICROBATCHES,
        recompute="auto",
        offload=offload,
        time_limit_s=LIMIT_S,
        workers=2,
    )


def module_rows(
    task: Task, shares: tuple[float, ...], ways: tuple[str, ...]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Way and budget -> bytes beyond weights and gradients, and the time of a step.

    A budget is what `torch.utils.checkpoint` takes, and a share of what the plain module takes
    more.
    """
    assert isinstance(task.model, nn.Module)
    model = task.model
    pair = tuple(part.to(DEVICE) for part in task.microbatch(0))
    plain = _called(copy.deepcopy(model), task, pair)
    yield "plain", plain
    theirs = _called(_checkpointed(copy.deepcopy(model)), task, pair)
    yield "checkpoint", theirs
    options: dict[str, Any] = {"loss": task.loss, "repeats": 5}
    free = rematerialize(copy.deepcopy(model), pair, "1TiB", method="layers", **options)
    static = free.rematerialization_costs.static
    for share in shares:
        budget = static + theirs["bytes"] + round(share * (plain["bytes"] - theirs["bytes"]))
        for way in ways:
            say = {"method": "layers", "offload": True} if way == "offload" else {"method": way}
            begin = time.perf_counter()
            try:
                lean = rematerialize(copy.deepcopy(model), pair, budget, **say, **options)
            except PipeplanError as error:
                yield f"{way} {share:g}", {"refused": str(error)}
                continue
            plan = lean.rematerialization
            outcome = plan.option.outcome if way == "operators" else plan.outcome
            told = {
                "method": plan.method,
                "planned_bytes": plan.peak_bytes - static,
                "planned_ns": outcome.makespan_ns,
                "seconds": time.perf_counter() - begin,
            }
            yield f"{way} {share:g}", told | _called(lean, task, pair)


def _checkpointed(model: nn.Module) -> nn.Module:
    """Every block within torch's checkpoint, as people use it."""
    blocks = [part for part in model.modules() if type(part).__name__ in ("Block", "Bottleneck")]
    for block in blocks or list(model.children()):
        block.forward = _within(block.forward)  # type: ignore[method-assign]
    return model


def _within(forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *given: checkpoint(forward, *given, use_reentrant=False)


def _called(module: nn.Module, task: Task, pair: tuple[Tensor, ...]) -> dict[str, Any]:
    """A step's bytes beyond weights and gradients, and its time."""

    def step() -> None:
        task.loss(module(pair[0]), pair[1]).backward()

    for _ in range(3):
        step()
    _reset()
    if DEVICE.type == "cuda":
        before = _requested("current")
        step()
        _wait()
        held = _requested("peak") - before
    else:
        held = peak_bytes(module, task.loss, *pair) - 2 * sum(
            p.nbytes for p in module.parameters()
        )
    return {"bytes": held, "measured_ns": min(_timed(step) for _ in range(12))}


def _rounds(steps: Callable[[], object]) -> list[int]:
    """Time of a step, the mean of each round."""
    return [_timed(steps) // STEPS for _ in range(ROUNDS)]


def _timed(work: Callable[[], object]) -> int:
    _wait()
    begin = time.perf_counter_ns()
    work()
    _wait()
    return time.perf_counter_ns() - begin


def _wait() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def _reset() -> None:
    gc.collect()
    _wait()
    GpuMemoryUse.start(DEVICE)


def _requested(which: str) -> int:
    """Bytes that tensors and kernels asked the allocator for."""
    return int(torch.cuda.memory_stats()[f"requested_bytes.all.{which}"])


def _allocated() -> dict[str, int | None]:
    taken = GpuMemoryUse.since_start(DEVICE)
    return {"allocated": taken.allocated, "reserved": taken.reserved}


def measure(store: Store, small: bool) -> None:
    """All that the file lacks."""
    bandwidth = measured_bandwidth(DEVICE)
    here = ModelDevice(DEVICE).facts()
    known = store.rows.get("machine", {}).get("facts", here)
    if any(known.get(name) != here.get(name) for name in ("gpu", "torch")):
        sys.exit(f"--out: got a file of {known}, need one of {here}. Name another file.")
    store.put("machine", "facts", here | {"host_bytes_per_s": bandwidth})

    def keep(key: str, row: dict[str, Any]) -> None:
        store.put(key, "row", row)
        print(key, row, file=sys.stderr, flush=True)

    for name, make in makers(small).items():
        if Run(name, *RUNS[-1]).key not in store.rows:
            for key, row in run_rows(name, make, bandwidth):
                keep(key, row)
        if f"{name} module {WAYS[name][-1]} {SHARES[-1]:g}" not in store.rows:
            torch.manual_seed(0)
            for key, row in module_rows(make(), SHARES, WAYS[name]):
                keep(f"{name} module {key}", row)


def run_rows(
    name: str, make: Callable[[], Task], bandwidth: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The plain loop and the plans of a task, by key."""
    torch.manual_seed(0)
    task = make()
    chain = profile_task(task, repeats=10, warmup=3)
    free = solve(chain, uniform(1, UNLIMITED), _config("off"))
    yield f"{name} loop", loop_row(task)
    for case in (Run(name, *each) for each in RUNS):
        try:
            yield case.key, run_row(case, task, chain, free, bandwidth)
        except PipeplanError as error:
            yield case.key, {"refused": str(error)}


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help="small models")
    parser.add_argument("--out", type=Path, default=RESULT, metavar="FILE", help="%(default)s")
    args = parser.parse_args()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    measure(Store(args.out), args.small)
    return 0


if __name__ == "__main__":
    sys.exit(main())
