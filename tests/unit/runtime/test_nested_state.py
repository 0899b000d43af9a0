"""Optimizers that keep lists, tuples and dicts of tensors: saved and loaded whole, or refused."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict, deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from pipeplan import Pipeline
from pipeplan.errors import InputError
from pipeplan.runtime.build import Worker
from pipeplan.runtime.checkpoint import named_state, nesting, storage
from pipeplan.runtime.checkpoint.writer import CheckpointWriter, HostCopies
from pipeplan.runtime.transport.gloo import LocalTransport
from pipeplan.task import Task
from tests import launch_task, pipelines
from tests.unit.runtime.test_checkpoint import meta, worker


class Remembering(torch.optim.SGD):
    """Steps along the mean of its last gradients, each scaled by what it has seen of them."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Changes what it keeps in place, and adds to it."""
        for group in self.param_groups:
            for parameter in group["params"]:
                assert parameter.grad is not None
                state = self.state[parameter]
                if not state:
                    sums = {"largest": torch.zeros(()), 2: (torch.zeros_like(parameter), 0.5)}
                    state |= {"history": [], "sums": sums, "rates": [0.25, 0.125], "none": ()}
                state["history"] = [*state["history"], parameter.grad.clone()][-2:]
                sums = state["sums"]
                sums["largest"].clamp_(min=parameter.grad.abs().max().item())
                sums[2][0].mul_(sums[2][1]).add_(parameter.grad)
                state["rates"][0] *= 0.75
                mean = torch.stack(state["history"]).mean(0) + sums[2][0]
                parameter -= state["rates"][0] * mean / (1 + sums["largest"])


@pytest.fixture(autouse=True)
def remembering(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is one of the toy's optimizers."""
    monkeypatch.setitem(pipelines.OPTIMIZERS, "remembering", lambda p: Remembering(p, lr=0.1))


def made(cuts: list[int]) -> Worker:
    """One rank with fresh weights."""
    plan = pipelines.plan_of(cuts, [0] * (len(cuts) + 1), "flush", microbatches=6)
    return worker(plan, "remembering", LocalTransport())


def equal(left: Any, right: Any) -> bool:
    """Whether two nested values have the same form, and the same leaves in every bit.

    Dicts of all keys of a state may have them in another order.
    """
    if isinstance(left, dict) and any(str(key).startswith("optimizer.") for key in left):
        left, right = dict(sorted(left.items())), dict(sorted(right.items()))
    (mine, form), (others, other) = tree_flatten(left), tree_flatten(right)
    return form == other and all(
        torch.equal(a, b) if isinstance(a, Tensor) else type(a) is type(b) and a == b
        for a, b in zip(mine, others, strict=True)
    )


@pytest.mark.parametrize("way", ["file", "background", "memory"])
def test_nested_state_is_resumed(tmp_path: Path, way: str) -> None:
    """Under another plan, while the one that wrote it trains on: steps on end, bit for bit."""
    trained = made([4])
    trained.executor.run(0, 3)
    saver = CheckpointWriter(LocalTransport(), background=way == "background")
    saver.save(tmp_path / "c", meta(3), trained.stages.values())
    kept = copy.deepcopy(named_state.state_of(trained.stages.values()))
    trained.executor.run(3, 2)
    saver.finish()
    resumed = made([2])
    if way == "memory":
        named_state.put(resumed, 3, kept, (), 0)
    else:
        named_state.load(tmp_path / "c", 3, resumed)
    assert equal(named_state.state_of(resumed.stages.values()), kept)
    resumed.executor.run(3, 2)
    expected, found = pipelines.weights_of(trained), pipelines.weights_of(resumed)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    if way == "memory":
        again = made([])
        named_state.put(again, 3, kept, (), 0)
        assert equal(named_state.state_of(again.stages.values()), kept), "training changed it"


def test_copies_are_of_the_moment() -> None:
    """Also of lists, of what is in them, and of objects."""
    state: dict[str, Any] = {"a": [torch.zeros(2), {"b": torch.zeros(2)}], "c": bytearray(b"0")}
    before, copied = copy.deepcopy(state), HostCopies().begin(state)
    state["a"][0].add_(1)
    state["a"][1]["b"].add_(1)
    state["a"].append(1)
    state["c"].append(1)
    assert equal(copied(), before)


@pytest.mark.parametrize(
    "value",
    [
        [],
        {},
        (torch.ones(2), [torch.zeros(1)], 3),
        {"a.b": {1: 2.5, "1": torch.ones(1)}, None: [True, "x"], 0.5: (())},
        OrderedDict([("b", torch.ones(1)), ("a", [1])]),
        "pipeplan-nested/1 is what forms begin with",
        torch.Size([2, 3]),
        bytearray(b"0"),
        None,
    ],
)
def test_forms_are_read_again(tmp_path: Path, value: Any) -> None:
    """Types of containers and of keys, their order, and text that looks like a form."""
    state = {"optimizer.w.x": value, "optimizer.w.y": torch.ones(1)}
    storage.write(tmp_path / "c", meta(1), nesting.flat(state), rank=0, alone=True)
    reading = storage.CheckpointReader(tmp_path / "c")
    stored = {key: reading.blank(key) for key in reading.metadata.state_dict_metadata}
    reading.fill(stored)
    found = nesting.nested(stored, "here")
    assert equal(found, state)
    assert type(found["optimizer.w.x"]) is type(value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (defaultdict(list), "optimizer.w.x: got a defaultdict, need tensors"),
        ([{(1, 2): 3}], "got a dict with a key that is a tuple, need"),
        ([deque([1.0])], r"optimizer\.w\.x: got a collections\.deque, need tensors and numbers"),
        (np.float64(1.0), r"got a numpy\.float64, need"),
        ({"a": np.ones(2)}, r"got a numpy\.ndarray, need"),
        (lambda: 1, r"got a builtins\.function, need"),
    ],
)
def test_what_could_not_be_read_again_is_not_written(value: Any, message: str) -> None:
    """Before the run depends on it."""
    with pytest.raises(InputError, match=message):
        nesting.flat({"optimizer.w.x": value})


@pytest.mark.parametrize(
    "found",
    [
        {"optimizer.w.x": 'pipeplan-nested/1 {"list": [0]}'},
        {"optimizer.w.x": "pipeplan-nested/1 {"},
        {"optimizer.w.x": 'pipeplan-nested/1 {"set": [0]}', "optimizer.w.x/0": 1},
        {"optimizer.w.x": 'pipeplan-nested/1 {"list": []}', "optimizer.w.x/0": 1},
        {"optimizer.w.x": 1, "optimizer.w.x/0": 1},
    ],
)
def test_leaves_that_do_not_fit_are_refused(found: dict[str, Any]) -> None:
    """None is lost, none made up."""
    with pytest.raises(InputError, match=r"here: .*optimizer\.w\.x.*go on from the checkpoint"):
        nesting.nested(found, "here")


def task() -> Task:
    """The launch task with this optimizer."""
    return replace(launch_task.task(0), optimizer=lambda p: Remembering(p, lr=0.1))


def test_what_nobody_takes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What earlier versions left to torch, and the state of a parameter that is none."""
    plan = launch_task.plan(1, "flush")
    with Pipeline(task(), plan) as pipeline, monkeypatch.context() as context:
        context.setattr(nesting, "flat", dict)
        pipeline.run(1)
        pipeline.save(tmp_path)
        state = copy.deepcopy(pipeline.state_dict())
    lost = r"got 'optimizer\..*', need optimizer\.NAME\.FIELD"
    with Pipeline(task(), plan) as pipeline, pytest.raises(InputError, match=lost):
        pipeline.load(tmp_path)
    with Pipeline(task(), plan) as pipeline:
        with pytest.raises(InputError, match=r"state_dict: got 'optimizer\.foreign\.x', need"):
            pipeline.load_state_dict({**state, "optimizer.foreign.x": torch.ones(1)})
        pipeline.load_state_dict(state)
        assert pipeline.steps == 1


def test_a_field_without_a_name_is_refused(tmp_path: Path) -> None:
    """It could not be told from the name of its parameter."""

    class Odd(torch.optim.SGD):
        def step(self, closure: None = None) -> None:  # type: ignore[override]
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter]["a.b"] = torch.ones(1)

    odd = replace(launch_task.task(0), optimizer=lambda p: Odd(p, lr=0.1))
    with Pipeline(odd, launch_task.plan(1, "flush")) as pipeline:
        pipeline.run(1)
        with pytest.raises(
            InputError, match=r"keeps 'a\.b' of a parameter, need fields with names"
        ):
            pipeline.save(tmp_path)
