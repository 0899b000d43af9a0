"""`rematerialize` with method `auto`: operators or layers, whichever is faster, and why."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeplan import rematerialize
from pipeplan.errors import InfeasibleError, InputError
from pipeplan.livebytes import peak_bytes
from pipeplan.rematerialized import choice, operators
from pipeplan.task import Task
from pipeplan.testing.refusals import least_bytes
from tests import short_networks
from tests.lean_modules import LOSS, SAMPLE, by_layers, row

NAMES = ("operators", "layers")


def blocks() -> Task:
    """A few layers of a mixer."""
    torch.manual_seed(0)
    return short_networks.mixer(blocks=1)


def left_by(module: nn.Module, task: Task) -> list[Tensor]:
    """Losses, gradients and the state of the generator of two micro-batches."""
    torch.manual_seed(5)
    losses = []
    for step in range(2):
        source, target = task.microbatch(step)
        loss = task.loss(module(source), target)
        loss.backward()
        losses.append(loss.detach())
    gradients = [each.grad for each in module.parameters() if each.grad is not None]
    return [*losses, *(each.clone() for each in gradients), torch.get_rng_state()]


def lean(task: Task, budget: int, **options: Any) -> Any:
    """The task's model by method `auto`."""
    model = copy.deepcopy(task.model)
    assert isinstance(model, nn.Module)
    return rematerialize(
        model, task.microbatch(0), budget, loss=task.loss, repeats=1, time_limit_s=1, **options
    )


def between(task: Task) -> int:
    """A budget between the least of layers and a plain step's bytes."""
    assert isinstance(task.model, nn.Module)
    with pytest.raises(InfeasibleError) as refused:
        by_layers(task.model, task.microbatch(0), 1, loss=task.loss, repeats=1)
    model = copy.deepcopy(task.model)
    left_by(model, task)
    return (least_bytes(refused.value) + peak_bytes(model, task.loss, *task.microbatch(0))) // 2


@pytest.mark.parametrize("faster", NAMES)
def test_the_faster_way_is_taken(faster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the times of steps; both keep the budget, bit for bit; the choice tells of both."""
    told = {"layers": 2, "operators": 2, faster: 1}

    def times(_: Any, leans: Any) -> list[int]:
        kinds = ["operators" if hasattr(each, "operator_plan") else "layers" for each in leans]
        return [told[kind] for kind in kinds]

    monkeypatch.setattr(choice, "_step_times", times)
    task = blocks()
    budget = between(task)
    found = lean(task, budget)
    chosen = found.rematerialization_choice
    assert chosen.taken == faster
    assert hasattr(found, "operator_plan") == (faster == "operators")
    assert {each.name: each.step_ns for each in chosen.ways} == told
    assert all(each.peak_bytes <= budget for each in chosen.ways)
    assert chosen.refusal is None
    expected = left_by(copy.deepcopy(task.model), task)  # type: ignore[arg-type]
    assert all(map(torch.equal, expected, left_by(found, task)))
    assert peak_bytes(found, task.loss, *task.microbatch(0)) <= budget


def test_times_are_those_of_steps_and_leave_no_trace() -> None:
    """Weights, gradients, buffers and random numbers are as they were; the least time is taken."""
    task = short_networks.resnet(batch=2, side=16, width=4)
    model = task.model
    assert isinstance(model, nn.Module)
    left_by(model, task)
    before = [*model.parameters(), *(p.grad for p in model.parameters()), *model.buffers()]
    kept = [None if each is None else each.clone() for each in before]
    state = torch.get_rng_state()
    lines: list[str] = []
    found: Any = rematerialize(
        model, task.microbatch(0), "1TiB", loss=task.loss, repeats=1, progress=lines.append
    )
    after = [*model.parameters(), *(p.grad for p in model.parameters()), *model.buffers()]
    assert all(a is b for a, b in zip(before, after, strict=True))
    for now, then in zip(after, kept, strict=True):
        assert (now is None) == (then is None)
        assert now is None or then is None or torch.equal(now, then)
    assert torch.equal(state, torch.get_rng_state())
    chosen = found.rematerialization_choice
    times = {each.name: each.step_ns for each in chosen.ways}
    assert all(times.values())
    assert times[chosen.taken] == min(times.values())
    assert lines[0] == "layers: measuring"
    assert lines[-1] == f"taken: {chosen.taken}"


class Branch(nn.Linear):
    """Decides by values, which no graph holds; as a layer it may."""

    def forward(self, value: Tensor) -> Tensor:
        """Same shape."""
        return super().forward(value if value.sum() > 0 else -value)


def test_what_cannot_be_captured_is_planned_by_layers() -> None:
    """The choice names what was in the way; so does the progress."""
    module = nn.Sequential(nn.Linear(8, 8), Branch(8, 8), nn.Linear(8, 8))
    lines: list[str] = []
    found: Any = rematerialize(module, SAMPLE, "1GiB", loss=LOSS, repeats=1, progress=lines.append)
    chosen = found.rematerialization_choice
    assert chosen.taken == "layers"
    assert "torch cannot trace the call" in chosen.refusal
    assert f"operators: {chosen.refusal}" in lines
    assert "operators: not taken: operators: torch cannot trace" in str(chosen)


class Again(nn.Module):
    """Reads its input again at its end, which layers cannot give a gradient to."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU())
        self.head = nn.Linear(8, 8)

    def forward(self, value: Tensor) -> Tensor:
        """Same shape."""
        result: Tensor = self.head(self.body(value)) + value
        return result


def test_what_cannot_be_cut_is_planned_by_operators() -> None:
    """The choice names what was in the way of layers."""
    source = torch.randn(64, 8, requires_grad=True)
    with pytest.raises(InputError, match="reads the module's input again"):
        by_layers(Again(), source, "1GiB", repeats=1)
    found: Any = rematerialize(Again(), source, "1GiB", repeats=1)
    chosen = found.rematerialization_choice
    assert chosen.taken == "operators"
    ways = {each.name: each for each in chosen.ways}
    assert "reads the module's input again" in str(ways["layers"])
    assert ways["operators"].step_ns is None


def test_a_budget_that_neither_keeps_names_one_that_is_kept() -> None:
    """With what the other way says in a note."""
    module = row()[:2]
    with pytest.raises(InfeasibleError, match="need at least") as refused:
        rematerialize(module, SAMPLE, 1, loss=LOSS, repeats=1, time_limit_s=1)
    (note,) = refused.value.__notes__
    assert note.startswith(NAMES)
    least = least_bytes(refused.value)
    assert least == refused.value.least_bytes
    found: Any = rematerialize(module, SAMPLE, least, loss=LOSS, repeats=1, time_limit_s=1)
    ways = {each.name: each for each in found.rematerialization_choice.ways}
    assert ways[found.rematerialization_choice.taken].peak_bytes <= least


def test_too_little_memory_to_measure_operators_leaves_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Measuring them holds what a plain step holds."""

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("tried to allocate 2 GiB\nand more")

    monkeypatch.setattr(operators, "measured", full)
    found: Any = rematerialize(row(), SAMPLE, "1GiB", loss=LOSS, repeats=1)
    chosen = found.rematerialization_choice
    assert chosen.taken == "layers"
    assert "too much here: tried to allocate 2 GiB. Plan" in chosen.refusal
