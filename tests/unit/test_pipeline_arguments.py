"""What a `Pipeline` refuses: each wrong argument with one line that names it, in time."""

from __future__ import annotations

import copy
import re
import socket
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from pipeplan import Pipeline
from pipeplan.errors import InputError, RankError
from pipeplan.runtime.transport.gloo import LocalTransport
from pipeplan.task import LossScale, Task
from tests import launch_task

M = launch_task.MICROBATCHES
OWN = "transport: got a LocalTransport and"
INPUT, TARGET = torch.ones(M * 5, 6), torch.zeros(M * 5, dtype=torch.int64)


def pipeline(task: Task | None = None, **options: Any) -> Pipeline:
    """One of a single rank."""
    return Pipeline(task or launch_task.task(0), launch_task.plan(1, "flush"), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"timeout": "0s"}, "timeout: got '0s', need at least 1ms"),
        ({"timeout": "999us"}, "timeout: got '999us', need at least 1ms"),
        ({"timeout": "-1s"}, "timeout: got '-1s', which is below 0, need for example"),
        ({"timeout": "soon"}, "timeout: got 'soon', need a number with one of ns"),
        ({"timeout": "600"}, "timeout: got '600', need a number with one of ns"),
        ({"timeout": 600}, "timeout: got 600, need a number with one of ns"),
        ({"timeout": None}, "timeout: got None, need"),
        ({"seed": "3"}, "seed: got '3', need an integer from 0"),
        ({"seed": -1}, "seed: got -1, need an integer from 0"),
        ({"replicas": 0}, "replicas: got 0, need an integer from 1"),
        ({"replicas": 1.5}, "replicas: got 1.5, need an integer from 1"),
        ({"backend": "mpi"}, "backend: got 'mpi', need one of nccl, gloo, auto"),
        ({"backend": []}, "backend: got [], need one of nccl, gloo, auto"),
        ({"mesh": (1, 1)}, "mesh: got a tuple, need a DeviceMesh"),
        ({"transport": LocalTransport(), "replicas": 2}, f"{OWN} replicas, need it alone"),
        ({"transport": LocalTransport(), "backend": "gloo"}, f"{OWN} backend, need it alone"),
        (
            {"transport": LocalTransport(), "replicas": 2, "mesh": mock.Mock(spec=DeviceMesh)},
            f"{OWN} replicas, mesh, need it alone",
        ),
    ],
)
def test_arguments_that_make_no_ranks(options: dict[str, Any], message: str) -> None:
    """They are refused where they are given, not when somebody is waited for."""
    with pytest.raises(InputError) as caught:
        pipeline(**options)
    assert f"pipeline: {message}" in str(caught.value)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE: got 'two', need an integer from 1"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE: got '', need an integer from 1"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE: got '0', need an integer from 1"),
        ({"RANK": "-1"}, "RANK: got '-1', need an integer from 0"),
        ({"RANK": "1"}, "RANK: got 1, need less than WORLD_SIZE = 1"),
        ({"LOCAL_RANK": "1.0"}, "LOCAL_RANK: got '1.0', need an integer from 0"),
        ({"LOCAL_WORLD_SIZE": "9" * 30}, "LOCAL_WORLD_SIZE: got '9999"),
        ({"TORCHELASTIC_RESTART_COUNT": "x"}, "TORCHELASTIC_RESTART_COUNT: got 'x'"),
    ],
)
def test_an_environment_without_sense(
    environ: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The variable is named."""
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError) as caught:
        pipeline()
    assert f"environment: {message}" in str(caught.value)


@pytest.mark.parametrize(
    ("address", "port", "message"),
    [
        (None, "29500", "MASTER_ADDR: got nothing, need where rank 0 listens"),
        ("", "29500", "MASTER_ADDR: got nothing, need where rank 0 listens"),
        ("127.0.0.1", None, "MASTER_PORT: got nothing, need where rank 0 listens"),
        ("127.0.0.1", "two", "MASTER_PORT: got 'two', need an integer from 0 to 65535"),
        ("127.0.0.1", "65536", "MASTER_PORT: got '65536', need an integer from 0 to 65535"),
    ],
)
def test_no_place_to_meet(
    address: str | None, port: str | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that cannot find each other say which variable is wrong."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name, value in (("MASTER_ADDR", address), ("MASTER_PORT", port)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    with pytest.raises(InputError) as caught:
        Pipeline(launch_task.task(0), launch_task.plan(2, "flush"), timeout="1s")
    assert f"environment: {message}" in str(caught.value)


def test_ranks_that_never_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for them in vain says how many there should be, and for how long it waited."""
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1")):
        monkeypatch.setenv(name, value)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MASTER_PORT", str(free.getsockname()[1]))
    with pytest.raises(RankError, match=r"rank 1: got no answer from all 2 ranks, need .* 1 s: "):
        Pipeline(launch_task.task(0), launch_task.plan(2, "flush"), timeout="1s")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: p.step([[0.0] * 2], TARGET), "inputs: got ([0.0, 0.0]), need (tensor), whose"),
        (lambda p: p.step("abc", TARGET), "step: inputs: got ('abc'), need (tensor)"),
        (lambda p: p.step({"x": INPUT}, TARGET), "step: inputs: got (x=tensor), need (tensor)"),
        (lambda p: p.step([[INPUT]], TARGET), "step: inputs: got ([tensor]), need (tensor)"),
        (lambda p: p.step((INPUT, 3), TARGET), "step: inputs: got (tensor, 3), need (tensor)"),
        (lambda p: p.step(torch.tensor(1.0), TARGET), "got a tensor without dimensions, need"),
        (lambda p: p.step(INPUT, [0] * 3), "step: target: got [0, 0, 0], need tensor, whose"),
        (lambda p: p.step(INPUT, [TARGET]), "step: target: got [tensor], need tensor, whose"),
        (lambda p: p.step(INPUT, torch.tensor(1)), "step: target: got a tensor without"),
        (lambda p: p.step([INPUT, INPUT], TARGET), "inputs: got (tensor, tensor), need (tensor)"),
        (lambda p: p.evaluate([1, 2], TARGET), "evaluate: inputs: got (1, 2), need (tensor)"),
        (lambda p: p.evaluate(INPUT, [TARGET]), "evaluate: target: got [tensor], need tensor"),
        (lambda p: p.evaluate(INPUT, torch.tensor(1)), "evaluate: target: got a tensor without"),
        (lambda p: p.evaluate(), "evaluate: got neither inputs nor a target, need"),
        (lambda p: p.evaluate(INPUT[:3], TARGET[:3]), "evaluate: got [3, 3] rows, need"),
        (lambda p: p.evaluate(INPUT.double(), TARGET), "evaluate: got micro-batches [((5, 6)"),
        (lambda p: p.evaluate(INPUT, numbers=[0]), "evaluate: got inputs and 1 numbers, need a"),
        (lambda p: p.evaluate(target=TARGET, numbers=[0, 1]), "got a target and 2 numbers, need"),
        (lambda p: p.evaluate(numbers=3), "evaluate: numbers: got 3, need a list"),
        (lambda p: p.evaluate(numbers=["a"]), "evaluate: numbers: got 'a', need an integer"),
        (lambda p: p.evaluate(numbers=[0, -1]), "evaluate: numbers: got -1, need an integer"),
        (lambda p: p.run("3"), "run: steps: got '3', need an integer from 0 on"),
        (lambda p: p.run(1.5), "run: steps: got 1.5, need an integer from 0 on"),
        (lambda p: torch.no_grad()(p.run)(1), "run: got a call inside of torch.no_grad()"),
        (lambda p: torch.inference_mode()(p.run)(1), "inside of torch.inference_mode()"),
        (lambda p: torch.no_grad()(p.step)(INPUT, TARGET), "nothing would be trained"),
        (lambda p: p.load_state_dict(None), "state: got a NoneType, need the mapping"),
        (lambda p: p.load_state_dict([1]), "state: got a list, need the mapping"),
    ],
)
def test_a_wrong_call_leaves_the_pipeline_whole(
    call: Callable[[Pipeline], object], message: str
) -> None:
    """What is given is described, and the next step works."""
    with pipeline() as made:
        with pytest.raises(InputError) as caught:
            call(made)
        assert message in str(caught.value)
        assert made.step(INPUT, TARGET) is not None


@pytest.mark.parametrize("given", [{"inputs": INPUT}, {"target": TARGET}])
def test_a_batch_that_lacks_its_half_is_refused_by_name(given: dict[str, Any]) -> None:
    """Once this rank needs it."""
    lacks = "target" if "inputs" in given else "inputs"
    for name in ("step", "evaluate"):
        with pipeline() as made, pytest.raises(InputError, match=f"{name}: got no {lacks}, which"):
            getattr(made, name)(**given)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("step", "2"),
        ("step", -1),
        ("step", None),
        ("good_steps", 1.5),
        ("drawn", "all"),
        ("scales", 2.0),
        ("scales", ["big"]),
    ],
)
def test_progress_without_sense(name: str, value: object) -> None:
    """A state whose progress is no number is refused with the entry's name."""
    with pipeline() as made:
        state = made.state_dict() | {name: value}
        with pytest.raises(InputError, match=f"load_state_dict: state: {name}: got "):
            made.load_state_dict(state)


def lacking(state: dict[str, Any], ending: str) -> dict[str, Any]:
    """`state` without the entries of this ending."""
    return {key: copy.deepcopy(value) for key, value in state.items() if not key.endswith(ending)}


def optimizing(make: Callable[..., torch.optim.Optimizer]) -> Task:
    """The task with another optimizer."""
    return replace(launch_task.task(0), optimizer=make)


@pytest.mark.parametrize("ending", ["exp_avg", "step", "weight.exp_avg_sq"])
def test_a_lost_optimizer_field_is_named(ending: str) -> None:
    """AdamW would fail in its next step, or begin anew in silence."""
    with pipeline(optimizing(torch.optim.AdamW)) as made:
        made.run(1)
        state = made.state_dict()
    field = next(key for key in state if key.startswith("optimizer.") and key.endswith(ending))
    alone = {key: value for key, value in state.items() if key != field}
    with pipeline(optimizing(torch.optim.AdamW)) as made:
        before = copy.deepcopy(made.state_dict())
        with pytest.raises(InputError, match=f"state_dict: has no '{field}', which AdamW keeps"):
            made.load_state_dict(alone)
        assert all(
            torch.equal(value, before[key])
            for key, value in made.state_dict().items()
            if isinstance(value, Tensor)
        )


@pytest.mark.parametrize("scale", [None, LossScale(initial=16.0)])
def test_another_optimizers_state_is_refused(scale: LossScale | None) -> None:
    """Momentum is not what AdamW goes on from; SGD that keeps nothing goes on from anything."""

    def of(make: Callable[..., torch.optim.Optimizer]) -> Pipeline:
        plan = launch_task.plan(1, "flush")
        task = replace(optimizing(make), loss_scale=scale)
        return Pipeline(task, launch_task.waiting(plan) if scale else plan)

    with of(lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)) as made:
        made.run(1)
        state = copy.deepcopy(made.state_dict())
    with (
        of(torch.optim.AdamW) as made,
        pytest.raises(InputError, match="which AdamW keeps: it was made with another optimizer"),
    ):
        made.load_state_dict(state)
    with pipeline(optimizing(torch.optim.SGD)) as made:
        made.load_state_dict(lacking(state, ".momentum_buffer"))
        made.run(1)


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.Adafactor])
@pytest.mark.parametrize(("other", "got"), [(torch.ones(2), r"shape \[2\]"), (2.0, "no tensor")])
def test_fields_of_another_shape_are_refused(
    make: Callable[..., torch.optim.Optimizer], other: object, got: str
) -> None:
    """Those with the shape of the parameter: Adafactor's rows and columns have others."""
    with pipeline(optimizing(make)) as made:
        made.run(1)
        state = copy.deepcopy(made.state_dict())
        shaped = ("bias.exp_avg", "bias.variance")
        field = next(key for key in state if key.endswith(shaped))
        with pytest.raises(InputError, match=f"{re.escape(field)}: got {got}, need shape"):
            made.load_state_dict({**state, field: other})
        made.load_state_dict(state)
        made.run(1)


def test_a_state_of_no_step_needs_no_optimizer() -> None:
    """Before the first step there is nothing to go on from."""
    with pipeline(optimizing(torch.optim.AdamW)) as made:
        state = copy.deepcopy(made.state_dict())
        made.run(1)
        made.load_state_dict(state)
        made.run(1)


def test_too_few_loss_scales_are_refused() -> None:
    """A run with loss scaling needs the next steps' scales."""
    task = replace(launch_task.task(0), loss_scale=LossScale(initial=16.0))
    plan = launch_task.waiting(launch_task.plan(1, "2bw"))
    with Pipeline(task, plan) as made:
        made.run(1)
        state = made.state_dict()
        with pytest.raises(InputError, match="scales: got 1, need 2"):
            made.load_state_dict({**state, "scales": state["scales"][:1]})
