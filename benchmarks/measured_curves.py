"""Measured time over measured peak: Rotor, Rockmate and ours, in the form of the thesis.

    PYTHONPATH=. OMP_NUM_THREADS=1 python -m benchmarks.measured_curves [NETWORK ...]

writes benchmarks/results/measured_curves.json and the picture; networks that the file holds are
not measured again unless they are named. X. Zhao's thesis (2024), Figures 2.5 to 2.8: a point is a
module that was planned for a budget, trained for real. Its peak are the most live bytes beyond
weights, gradients and the input, its time the processor time of a forward, the loss and a backward
on one thread, the least of rounds in which every module runs once. Budgets are shares of what a
plain step holds.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.markdown import table
from benchmarks.operator_networks import ToyLogits, next_token_loss, toy
from benchmarks.store import chosen_names
from pipeplan import rematerialize, tasks
from pipeplan.capture.layer_costs.device_clock import device_of
from pipeplan.device_program import DeviceProgram
from pipeplan.errors import InfeasibleError
from pipeplan.livebytes import LiveBytes
from pipeplan.operators import by_operators, capture
from pipeplan.rehearsal import check_agreement, measured
from pipeplan.remat.graph import Budget, GraphProblem, Option, solve
from pipeplan.report.budget import Curves, draw_curves
from pipeplan.task import Task

RESULT = Path(__file__).parent / "results" / "measured_curves.json"
PICTURE = Path(__file__).parents[1] / "docs" / "img" / "measured-curves.png"
SHARES = (0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
TIMING_S = 150.0
"""Of rounds, in each of which every module runs once."""
LEAST_ROUNDS = 3
SECONDS = 20.0
"""Of a search for all budgets."""
NETWORKS: dict[str, tuple[str, Callable[[], Task]]] = {
    "GPT-2": (
        "GPT-2 of 12 layers, width 256, explicit attention, dropout 0.1, 1024 tokens in the"
        " vocabulary; 4 rows of 128 tokens",
        lambda: gpt(12),
    ),
    "ResNet-50": (
        "ResNet-50, 4 images of 64 x 64",
        lambda: tasks.resnet(size=50, batch=4, side=64),
    ),
    "MLP-Mixer": (
        "MLP-Mixer base (12 layers of width 768), 4 images of 64 x 64",
        lambda: tasks.mixer(size="base", batch=4, side=64),
    ),
}


class Step(nn.Module):
    """A model and its loss."""

    def __init__(self, task: Task, model: nn.Module | None = None) -> None:
        super().__init__()
        assert isinstance(task.model, nn.Module)
        self.model, self.loss = model if model is not None else task.model, task.loss

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """The loss."""
        return self.loss(self.model(source), target)


def gpt(layers: int) -> Task:
    """A GPT whose vocabulary is small: with 50257 tokens one gradient is most of a step."""
    _, (ids, wanted) = toy(layers)
    return Task(
        model=ToyLogits(layers),
        loss=next_token_loss,
        optimizer=torch.optim.AdamW,
        data=lambda _: (ids, wanted),
    )


def main(names: Sequence[str]) -> None:
    """The networks that are named, or all that are missing."""
    torch.set_num_threads(1)
    found: dict[str, Any] = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    for name in names or [each for each in NETWORKS if each not in found]:
        found[name] = network(*NETWORKS[name])
        RESULT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    draw(found)


def network(text: str, make: Callable[[], Task]) -> dict[str, Any]:
    """All points of a network."""
    torch.manual_seed(0)
    load, task = round(os.getloadavg()[0], 2), make()
    step, args = Step(task).train(), task.microbatch(0)
    static, moving = _plain_bytes(step, args)
    say(f"{text}: {moving} bytes come and go beside {static}")
    modules: dict[str, list[tuple[float, nn.Module]]] = {"plain": [(1.0, step)]}
    modules |= _by_operators(step, args, static, moving)
    modules["rotor, layers"] = _by_layers(task, static, moving)
    rows = [(method, share, one) for method, each in modules.items() for share, one in each]
    # Two methods may have found one program: it is measured once.
    different = list(dict.fromkeys(one for _, _, one in rows))
    say(f"timing {len(different)} modules")
    times = dict(zip(different, _times(different, args), strict=True))
    peaks = {one: round((_peak(one, args) - static) / moving, 4) for one in different}
    points = [
        {
            "method": method,
            "share": share,
            "peak": peaks[one],
            "step_ms": round(times[one] * 1e3, 2),
        }
        for method, share, one in rows
    ]
    facts = device_of(step).facts()
    return {
        "text": text,
        "moving_bytes": moving,
        "static_bytes": static,
        "load": load,
        "machine": {key: facts[key] for key in ("cpu", "torch", "threads")},
        "points": points,
    }


def say(text: str) -> None:
    """Progress."""
    print(text, file=sys.stderr, flush=True)


def _with_gradients(module: nn.Module, args: Sequence[Tensor]) -> list[Tensor]:
    """All that is there between two steps."""
    for each in module.parameters():
        if each.requires_grad and each.grad is None:
            each.grad = torch.zeros_like(each)
    gradients = [each.grad for each in module.parameters() if each.grad is not None]
    return [*module.parameters(), *module.buffers(), *gradients, *args]


def _plain_bytes(step: nn.Module, args: tuple[Tensor, Tensor]) -> tuple[int, int]:
    """Bytes that stay, and the most that come and go in a plain step."""
    meter = LiveBytes(_with_gradients(step, args))
    static = meter.live
    with meter:
        step(*args).backward()
    return static, meter.peak - static


def _peak(module: nn.Module, args: tuple[Tensor, Tensor]) -> int:
    meter = LiveBytes(_with_gradients(module, args))
    with meter:
        module(*args).backward()
    return meter.peak


def _by_operators(
    step: Step, args: tuple[Tensor, Tensor], static: int, moving: int
) -> dict[str, list[tuple[float, nn.Module]]]:
    captured = capture(step, *args)
    check_agreement(step, captured)
    captured = measured(step, captured, 5)
    graph = captured.graph
    say(f"{len(graph.operations)} operators")
    beside = (
        static
        - graph.static_bytes
        - sum(each.bytes for each in graph.storages if each.kind == "input")
    )
    assert beside == 0, beside
    budgets = [Budget(static + int(share * moving)) for share in SHARES]
    found: dict[str, list[tuple[float, nn.Module]]] = {}
    made: dict[DeviceProgram, nn.Module] = {}
    for name, method in (("rockmate", "rockmate"), ("ours", "auto")):
        answers = solve(GraphProblem(graph), budgets, SECONDS, method).answers
        options: list[tuple[float, Option]] = [
            (share, each.option)
            for share, each in zip(SHARES, answers, strict=True)
            if each.option is not None
        ]
        told = {
            share: round(each.outcome.compute_ns / graph.compute_ns - 1, 3)
            for share, each in options
        }
        say(f"{name}: {told}")
        for _, each in options:
            if each.program not in made:
                made[each.program] = by_operators(step, captured, each.program)
        found[name] = [(share, made[each.program]) for share, each in options]
    return found


def _by_layers(task: Task, static: int, moving: int) -> list[tuple[float, nn.Module]]:
    found: list[tuple[float, nn.Module]] = []
    for share in SHARES:
        try:
            lean = rematerialize(
                task.model,  # type: ignore[type-var]
                task.microbatch(0),
                static + int(share * moving),
                loss=task.loss,
                method="rotor",
                repeats=1,
            )
        except InfeasibleError:
            say(f"rotor, layers: nothing within {share}")
            return found
        found.append((share, Step(task, lean).train()))
    return found


def _times(modules: Sequence[nn.Module], args: tuple[Tensor, Tensor]) -> list[float]:
    """The least seconds of a step of each: others on the machine disturbed that one least."""
    rows: list[list[float]] = []
    end, order = time.monotonic() + TIMING_S, list(range(len(modules)))
    source = random.Random(0)
    while len(rows) < 1 + LEAST_ROUNDS or time.monotonic() < end:
        source.shuffle(order)
        row = [0.0] * len(modules)
        for index in order:
            begin = time.thread_time()
            modules[index](*args).backward()
            row[index] = time.thread_time() - begin
        rows.append(row)
    say(f"{len(rows) - 1} rounds")
    return [min(column) for column in zip(*rows[1:], strict=True)]


def draw(found: dict[str, Any]) -> None:
    """Time over peak, a diagram per network."""
    groups = []
    for name, each in found.items():
        plain = next(p for p in each["points"] if p["method"] == "plain")
        lines: dict[str, list[tuple[float, float | None]]] = {}
        for point in sorted(each["points"], key=lambda p: p["peak"]):
            over = 100 * (point["step_ms"] / plain["step_ms"] - 1)
            lines.setdefault(point["method"], []).append((100 * point["peak"], over))
        groups.append(Curves(name, "measured peak, % of a plain step's", "over plain, %", lines))
    draw_curves(groups, PICTURE, columns=len(groups))


def page(found: dict[str, Any]) -> Iterator[str]:
    """The page of the results."""
    machine = next(iter(found.values()))["machine"]
    yield "# Measured time over measured peak"
    yield (
        "The command `python -m benchmarks.measured_curves` measures all of this page, in the form"
        " of Figures 2.5 to 2.8 of X. Zhao's thesis (2024): modules that were planned for budgets"
        " are trained on one thread of a processor with two cores"
        f" ({machine['cpu']}, torch {machine['torch']}); the load average before it says whether"
        " others computed, too. A peak is the most live bytes beyond"
        " weights, gradients and the input, as a share of a plain step's; a time is the least"
        " processor time of a step over rounds in which each module runs once, over that of a"
        " plain step."
        " `rotor, layers` is `rematerialize(method='rotor')`, which recomputes whole layers;"
        " `rockmate` and `ours` (`auto`) recompute operators."
    )
    yield "![measured time over measured peak](../img/measured-curves.png)"
    for name, each in found.items():
        yield f"## {name}"
        yield (
            f"{each['text']}: {each['moving_bytes']:,} bytes come and go in a plain step. Load"
            f" average before: {each['load']}."
        )
        yield table(("method", *(f"{100 * share:.0f} %" for share in SHARES)), _rows(each))
    yield "A cell is the time over a plain step at the measured peak; empty: no plan was found."


def _rows(each: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    points = each["points"]
    plain = next(point for point in points if point["method"] == "plain")
    for method in dict.fromkeys(point["method"] for point in points):
        if method != "plain":
            mine = {point["share"]: point for point in points if point["method"] == method}
            yield method, *(_cell(mine.get(share), plain) for share in SHARES)


def _cell(point: dict[str, Any] | None, plain: dict[str, Any]) -> str:
    if point is None:
        return ""
    over = point["step_ms"] / plain["step_ms"] - 1
    return f"{over:+.1%} at {point['peak']:.1%}"


if __name__ == "__main__":
    main(chosen_names(__doc__, list(NETWORKS)))
