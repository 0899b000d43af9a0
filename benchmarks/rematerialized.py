"""Modules of the task library within ten budgets each: bytes and time, predicted and measured.

    PYTHONPATH=. OMP_NUM_THREADS=1 python benchmarks/rematerialized.py [TASK ...]

prints the table in docs/reference/remat-rules.md, "Running it", and writes
benchmarks/results/rematerialized.json.

A machine that others use is now faster, now slower. So what is compared is measured in turns: in
each round, for each budget, steps, a rehearsal of the plan, steps. Each ratio is the median over
the rounds, and the table shows the least and the largest of the budgets.

alone: time of the plan from operations measured in another schedule, all layers run again / steps.
told:  from operations measured in the plan's own schedule, as `rematerialize` tells it / steps.
drift: steps before / steps behind, the same work twice: what is noise.
"""

from __future__ import annotations

import copy
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.store import chosen_names
from pipeplan import rematerialize, tasks
from pipeplan.capture.layer_costs.device_clock import device_of
from pipeplan.errors import InfeasibleError
from pipeplan.livebytes import peak_bytes
from pipeplan.remat import budgets, judge
from pipeplan.rematerialized.measured import Sample
from pipeplan.rematerialized.timing import rehearsed, with_times
from pipeplan.task import Task
from pipeplan.testing.refusals import least_bytes

TASKS: dict[str, dict[str, Any]] = {
    "gpt2": {"batch": 24},
    "llama": {"batch": 48},
    "vit": {"batch": 128},
    "mixer": {"batch": 128},
    "resnet": {"batch": 12, "width": 32, "side": 64},
    "densenet": {"batch": 48},
    "inception": {"batch": 8},
    "unet": {"batch": 8},
}
"""Operations of 2 to 20 ms."""
COUNT, ROUNDS, STEPS = 10, 5, 2
RESULT = Path(__file__).parent / "results" / "rematerialized.json"
RATIOS = ("alone", "told", "drift")


def main() -> None:
    """The tasks that are named, or all; results of others stay."""
    torch.set_num_threads(1)
    results = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.exists() else {"tasks": {}}
    print("| task | budgets | bit-equal | within budget | peak, predicted / measured |", end="")
    print(" alone | told | drift |")
    print("|---|---|---|---|---|---|---|---|")
    for name in chosen_names(__doc__, list(TASKS)) or TASKS:
        torch.manual_seed(0)
        task: Task = getattr(tasks, name)(0, **TASKS[name])
        rows = _rows(task)
        results["machine"] = device_of(task.model).facts()
        results["tasks"][name] = {"arguments": TASKS[name], "rounds": ROUNDS, "budgets": rows}
        RESULT.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        print(_line(name, rows), flush=True)


def _line(name: str, rows: list[dict[str, Any]]) -> str:
    def span(what: str, digits: int) -> str:
        found = [row[what] for row in rows]
        return f"{min(found):.{digits}f} to {max(found):.{digits}f}"

    equal, kept = (sum(row[what] for row in rows) for what in ("bit_equal", "within_budget"))
    ratios = " | ".join(span(what, 2) for what in RATIOS)
    return f"| {name} | {len(rows)} | {equal} | {kept} | {span('peak', 4)} | {ratios} |"


def _rows(task: Task) -> list[dict[str, Any]]:
    """One per budget."""
    plain = task.model
    assert isinstance(plain, nn.Module)
    expected = _left_by(copy.deepcopy(plain), task)
    leans, rows = [], []
    for limit in _limits(plain, task):
        module = copy.deepcopy(plain)
        options = {"loss": task.loss, "repeats": 3, "method": "layers"}
        lean = rematerialize(module, task.microbatch(0), limit, **options)
        equal = all(map(torch.equal, expected, _left_by(lean, task)))
        peak, outcome = peak_bytes(lean, task.loss, *task.microbatch(0)), lean.rematerialization
        leans.append(lean)
        rows.append(
            {
                "budget": limit,
                "method": outcome.method,
                "bit_equal": equal,
                "within_budget": peak <= limit,
                "peak": outcome.outcome.peak_bytes / peak,
            }
        )
    return [row | times for row, times in zip(rows, _times(leans, task), strict=True)]


def _limits(plain: nn.Module, task: Task) -> list[int]:
    """From the least that the refusal of one byte names to all that is kept."""
    options = {"loss": task.loss, "repeats": 1, "method": "layers"}
    free = rematerialize(plain, task.microbatch(0), "1TiB", **options)
    high = budgets(free.rematerialization_costs, None, 2)[1]
    try:
        rematerialize(plain, task.microbatch(0), 1, **options)
    except InfeasibleError as refusal:
        low = least_bytes(refusal)
    return [low + (high - low) * at // (COUNT - 1) for at in range(COUNT)]


def _left_by(module: nn.Module, task: Task) -> list[Tensor]:
    """What micro-batches leave behind."""
    torch.manual_seed(5)
    losses = []
    for step in range(3):
        source, target = task.microbatch(step)
        loss = task.loss(module(source), target)
        loss.backward()
        losses.append(loss.detach())
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    state = [*losses, *gradients, *module.buffers(), torch.get_rng_state()]
    return [value.clone() for value in state]


def _times(leans: list[Any], task: Task) -> list[dict[str, float]]:
    """The ratios of each module, medians over the rounds, and the milliseconds of a step."""
    source, target = task.microbatch(0)
    sample, place = Sample(source=source, loss=(task.loss, target)), device_of(task.model)
    found: list[list[dict[str, float]]] = [[] for _ in leans]
    for _ in range(ROUNDS):
        first = leans[0]
        alone = with_times(first.rematerialization_costs, first.run_as, sample, place, STEPS)
        for lean, rounds in zip(leans, found, strict=True):
            schedule = lean.rematerialization.schedule
            before = _step_ns(lean, task)
            own = rehearsed(alone, schedule, lean.run_as, sample, place, STEPS).costs
            behind = _step_ns(lean, task)
            step = (before + behind) / 2
            rounds.append(
                {
                    "alone": judge(alone, schedule).makespan_ns / step,
                    "told": judge(own, schedule).makespan_ns / step,
                    "drift": before / behind,
                    "step_ms": step / 1e6,
                }
            )
    names = (*RATIOS, "step_ms")
    return [
        {name: statistics.median(one[name] for one in rounds) for name in names}
        for rounds in found
    ]


def _step_ns(module: nn.Module, task: Task) -> float:
    """Processor time of a training step, the mean of a few."""
    source, target = task.microbatch(0)
    begin = time.thread_time_ns()
    for _ in range(STEPS):
        task.loss(module(source), target).backward()
    return (time.thread_time_ns() - begin) / STEPS


if __name__ == "__main__":
    main()
