"""Modules of the task library within ten budgets each: bytes and time, predicted and measured.

    PYTHONPATH=. OMP_NUM_THREADS=1 python benchmarks/rematerialized.py [TASK ...]

Prints one row of the table in docs/remat.md, "Running it", for each task.
"""

from __future__ import annotations

import copy
import sys
import time
from typing import Any

import torch
from torch import Tensor, nn

from pipeplan import rematerialize, tasks
from pipeplan.errors import InfeasibleError
from pipeplan.livebytes import LiveBytes
from pipeplan.remat import budgets
from pipeplan.task import Task

TASKS: dict[str, dict[str, Any]] = {
    "gpt2": {"size": "tiny"},
    "llama": {"size": "tiny"},
    "vit": {"size": "tiny"},
    "mixer": {"size": "tiny"},
    "resnet": {"width": 16, "side": 64},
    "densenet": {},
    "inception": {},
    "unet": {},
}
COUNT, REPEATS, ROUND = 10, 10, 5


def main() -> None:
    """The tasks that are named, or all."""
    torch.set_num_threads(1)
    print("| task | budgets | bit-equal | within budget | peak, predicted / measured | time |")
    print("|---|---|---|---|---|---|")
    for name in sys.argv[1:] or TASKS:
        print(_row(name), flush=True)


def _row(name: str) -> str:
    torch.manual_seed(0)
    task: Task = getattr(tasks, name)(0, **TASKS[name])
    plain = task.model
    assert isinstance(plain, nn.Module)
    expected, _ = _trained(copy.deepcopy(plain), task)
    equal, kept = 0, 0
    peaks: list[float] = []
    times: list[float] = []
    for limit in _limits(plain, task):
        module = copy.deepcopy(plain)
        lean = rematerialize(module, task.microbatch(0), limit, loss=task.loss, repeats=REPEATS)
        found, seconds = _trained(lean, task)
        equal += all(map(torch.equal, expected, found))
        peak, outcome = _peak(lean, task), lean.rematerialization.outcome
        kept += peak <= limit
        peaks.append(outcome.peak_bytes / peak)
        times.append(outcome.makespan_ns / 1e9 / seconds)
    return (
        f"| {name} | {len(peaks)} | {equal} | {kept} | {min(peaks):.4f} to {max(peaks):.4f}"
        f" | {min(times):.2f} to {max(times):.2f} |"
    )


def _limits(plain: nn.Module, task: Task) -> list[int]:
    """From the least that the refusal of one byte names to all that is kept."""
    options = {"loss": task.loss, "repeats": 1}
    free = rematerialize(plain, task.microbatch(0), "1TiB", **options)
    high = budgets(free.rematerialization_costs, None, 2)[1]
    try:
        rematerialize(plain, task.microbatch(0), 1, **options)
    except InfeasibleError as refusal:
        low = int(str(refusal).split("need at least ")[1].split(" ")[0])
    return [low + (high - low) * at // (COUNT - 1) for at in range(COUNT)]


def _trained(module: nn.Module, task: Task) -> tuple[list[Tensor], float]:
    """What micro-batches leave behind, and the processor time of a usual one."""
    torch.manual_seed(5)
    losses, seconds = [], []
    for step in range(REPEATS):
        source, target = task.microbatch(step)
        begin = time.thread_time()
        loss = task.loss(module(source), target)
        loss.backward()
        seconds.append(time.thread_time() - begin)
        losses.append(loss.detach())
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    state = [*losses, *gradients, *module.buffers(), torch.get_rng_state()]
    # Whatever else the machine does only lengthens times: the quietest round counts.
    rounds = [sorted(seconds[at : at + ROUND]) for at in range(0, REPEATS, ROUND)]
    return [value.clone() for value in state], min(times[ROUND // 2] for times in rounds)


def _peak(module: nn.Module, task: Task) -> int:
    source, target = task.microbatch(0)
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    live = LiveBytes([*module.parameters(), *module.buffers(), *gradients, source, target])
    with live:
        loss = task.loss(module(source), target)
        loss.backward()
        del loss
    return live.peak


if __name__ == "__main__":
    main()
