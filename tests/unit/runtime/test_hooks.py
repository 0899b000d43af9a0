"""Hooks on parameters and modules act as in a plain loop, or are refused with a way out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from pipeplan import Pipeline
from pipeplan.capture import profile_task
from pipeplan.capture.estimation.task_estimate import estimate_task
from pipeplan.devices import find_device
from pipeplan.errors import InputError
from pipeplan.plan import Plan, Remat, Semantics
from pipeplan.runtime.transport.base import Transport
from pipeplan.split_model import SplitModel
from pipeplan.task import Task, Tied
from pipeplan.testing import reference
from pipeplan.testing.in_process import run_ranks
from tests import capture_tasks, grids, launch_task, pipelines
from tests.captured import lasting
from tests.unit.runtime.test_memory import measured, planned
from tests.unit.runtime.test_updates import MAPS, STEPS, M, check, same

MODES = ["flush", "2bw"]
Hooked = Callable[[nn.Parameter], object]


def scaled(parameter: nn.Parameter) -> None:
    """The gradient of each micro-batch counts ten times, and no entry more than 0.3."""
    parameter.register_hook(lambda gradient: gradient * 10)
    parameter.register_hook(lambda gradient: gradient.clamp(-0.3, 0.3))


def decayed(parameter: nn.Parameter) -> None:
    """Weight decay that is added to the sum once per micro-batch, out of the weights in use."""

    def decay(used: nn.Parameter) -> None:
        assert used.grad is not None
        used.grad.add_(used.detach(), alpha=0.1).clamp_(-0.5, 0.5)

    parameter.register_post_accumulate_grad_hook(decay)


HOOKS: dict[str, Hooked] = {"gradient": scaled, "sum": decayed}


def toy(hook: Hooked) -> tuple[SplitModel, Task]:
    """The toy with a hook on every second parameter."""
    split, task = pipelines.toy()
    for parameter in [p for layer in split.layers for p in layer.parameters()][::2]:
        hook(parameter)
    return split, task


@grids.each_pair(kind=list(HOOKS), shape=MAPS, semantics=MODES)
def test_hooks_change_gradients_as_in_a_loop(
    kind: str, shape: tuple[Sequence[int], Sequence[int]], semantics: Semantics
) -> None:
    """Hooks on gradients and on their sums train to the bits of the plain loop with hooks."""
    free = reference.train(semantics, *pipelines.toy(), STEPS, M, seed=3)
    expected = check(shape, semantics, *toy(HOOKS[kind]))
    assert any(not torch.equal(free.weights[n], v) for n, v in expected.weights.items())


def recomputing(semantics: Semantics) -> Plan:
    """Two ranks; most layers are computed again."""
    plan = pipelines.plan_of([4], [0, 1], semantics, M)
    runs = ((2, 3),), ((4, 5), (6, 7))
    stages = tuple(
        stage.model_copy(update={"remat": Remat(recompute=run)})
        for stage, run in zip(plan.stages, runs, strict=True)
    )
    return plan.model_copy(update={"stages": stages})


@pytest.mark.parametrize("semantics", MODES)
@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_of_layers_computed_again_run_once(kind: str, semantics: Semantics) -> None:
    """One call per parameter and micro-batch, and the bits of the loop."""
    plan = recomputing(semantics)
    split, task = toy(HOOKS[kind])
    expected = reference.train(semantics, split, task, STEPS, M, seed=3)
    calls: list[str] = []
    for layer, names in zip(split.layers, split.fqns, strict=True):
        for local, parameter in layer.named_parameters():
            parameter.register_hook(lambda _, name=names[local]: calls.append(name))
    same(pipelines.train(plan, pipelines.pattern_of(plan, 3), split, task, STEPS), expected)
    trained = [
        n
        for names, x in zip(split.fqns, split.layers, strict=True)
        for n in (names[local] for local, _ in x.named_parameters())
    ]
    assert sorted(calls) == sorted(trained * STEPS * M)


@pytest.mark.parametrize("semantics", MODES)
def test_hooks_may_come_and_go_between_runs(semantics: Semantics) -> None:
    """Removed and added between two runs they are those of the second run."""
    task = launch_task.task(0)
    first, last = task.model[0][0], task.model[-1][1]
    calls: list[str] = []
    gone = first.weight.register_hook(lambda _: calls.append("gone"))
    first.weight.register_hook(lambda _: calls.append("stays"))

    def work(transport: Transport) -> None:
        plan = launch_task.plan(1, semantics)
        with Pipeline(task, plan, transport=transport) as pipeline:
            pipeline.run(1)
            gone.remove()
            last.bias.register_hook(lambda _: calls.append("new"))
            pipeline.run(1)

    run_ranks(1, work)
    n = launch_task.MICROBATCHES
    assert [calls.count(name) for name in ("gone", "stays", "new")] == [n, 2 * n, n]


def stepping(parameter: nn.Parameter) -> None:
    """An optimizer of its own for each parameter, as some do to save memory."""
    optimizer = torch.optim.SGD([parameter], lr=0.1)

    def step(_: nn.Parameter) -> None:
        optimizer.step()
        optimizer.zero_grad()

    parameter.register_post_accumulate_grad_hook(step)


def emptying(parameter: nn.Parameter) -> None:
    """Takes the gradient away, as those do who have used it."""

    def take(used: nn.Parameter) -> None:
        used.grad = None

    parameter.register_post_accumulate_grad_hook(take)


def together(parameter: nn.Parameter) -> None:
    """Waits for the gradients of several parameters."""
    torch.autograd.graph.register_multi_grad_hook([parameter], lambda _: None)


@pytest.mark.parametrize("semantics", MODES)
@pytest.mark.parametrize(
    ("hook", "message"),
    [
        (stepping, r"parameter '4\.weight'.*hook.*changes the weight.*Task\.optimizer"),
        (emptying, r"parameter '4\.weight'.*hook.*replaces \.grad.*in place"),
        (together, r"parameter '4\.weight'.*register_multi_grad_hook.*on each parameter"),
    ],
)
def test_what_cannot_be_the_same_is_refused(
    hook: Hooked, message: str, semantics: Semantics
) -> None:
    """Hooks that update, take gradients away or look at several are named, with a way out."""
    torch.manual_seed(0)
    layers = [nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)]
    split, task = pipelines.split_by_hand(layers, "sgd")
    hook(layers[4].weight)
    plan = pipelines.plan_of([2], [0, 1], semantics, M, layers=5)
    with pytest.raises(InputError, match=message):
        pipelines.train(plan, pipelines.pattern_of(plan, 3), split, task, 1)


class Forgetful(nn.Module):
    """Registers a hook in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, value: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            self.linear.weight.register_hook(lambda gradient: gradient * 2)
        return self.linear(value)


@pytest.mark.parametrize("semantics", MODES)
def test_hooks_registered_in_a_forward_are_refused(semantics: Semantics) -> None:
    """Forwards of later micro-batches come before a backward: it would meet their hooks."""
    torch.manual_seed(0)
    split, task = pipelines.split_by_hand([Forgetful(), nn.Tanh(), nn.Linear(6, 3)], "sgd")
    for parameter in split.layers[0].parameters():
        parameter._backward_hooks = None
    plan = pipelines.plan_of([1], [0, 1], semantics, M, layers=3)
    with pytest.raises(InputError, match=r"'0\.linear\.weight'.*during a run.*before the run"):
        pipelines.train(plan, pipelines.pattern_of(plan, 3), split, task, 3)


class Turning(nn.Module):
    """Freezes or unfreezes its weight in its sixth forward."""

    def __init__(self, *, trained: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.linear.weight.requires_grad_(trained)
        self.calls = 0

    def forward(self, value: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 6:
            weight = self.linear.weight
            weight.requires_grad = not weight.requires_grad
        return self.linear(value)


@pytest.mark.parametrize("semantics", MODES)
@pytest.mark.parametrize("trained", [True, False])
def test_weights_frozen_or_unfrozen_during_a_run_are_refused(
    trained: bool, semantics: Semantics
) -> None:
    """Optimizers would not follow, and nobody would hear of it."""
    torch.manual_seed(0)
    layers = [nn.Linear(6, 6), Turning(trained=trained), nn.Linear(6, 3)]
    split, task = pipelines.split_by_hand(layers, "sgd")
    plan = pipelines.plan_of([1], [0, 1], semantics, M, layers=3)
    says = rf"1\.linear\.weight: got requires_grad={not trained} during the run, need {trained}"
    with pytest.raises(InputError, match=says):
        pipelines.train(plan, pipelines.pattern_of(plan, 3), split, task, 3)


@pytest.mark.parametrize("how", ["colocate", "synchronize"])
def test_hooks_on_shared_parameters_are_refused(how: Tied) -> None:
    """Layers add up their gradients at the end of a step only: no hook sees the micro-batch's."""
    split, task = pipelines.tied(clip=False, how=how)
    split.layers[0].weight.register_hook(lambda gradient: gradient * 2)
    plan = pipelines.plan_of([1, 2, 4], [0, 1, 1, 0], "flush", M, layers=5)
    with pytest.raises(InputError, match=r"parameter '0\.weight'.*hooks.*2 layers.*outputs"):
        check(([1, 2, 4], [0, 1, 1, 0]), plan.semantics, split, task)


class Backwards(nn.Module):
    """A layer with hooks on itself: its output and its input's gradient are scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.linear.register_forward_hook(lambda module, inputs, output: output * 2)
        self.linear.register_full_backward_hook(lambda module, inner, outer: (inner[0] * 3,))

    def forward(self, value: Tensor) -> Tensor:
        return self.linear(value)


@pytest.mark.parametrize("semantics", MODES)
@pytest.mark.parametrize("shape", [([], [0]), ([1, 3], [0, 1, 0])], ids=["one", "two"])
def test_hooks_on_modules(
    shape: tuple[Sequence[int], Sequence[int]], semantics: Semantics
) -> None:
    """They run in the module, as in a plain loop."""
    torch.manual_seed(0)
    layers = [nn.Linear(6, 6), Backwards(), nn.Tanh(), Backwards(), nn.Linear(6, 3)]
    split, task = pipelines.split_by_hand(layers, "sgd")
    check(shape, semantics, split, task)


@pytest.mark.parametrize("semantics", MODES)
def test_bytes_of_hooks_are_planned(semantics: Semantics) -> None:
    """What a hook makes is counted by both profiles, and held where it was planned."""

    def make() -> Task:
        torch.manual_seed(0)
        task = capture_tasks.mlp()
        for parameter in [p for layer in task.model for p in layer.parameters()]:
            scaled(parameter)
        return task

    chain, fake = (
        profile_task(make(), repeats=1, warmup=0),
        estimate_task(make(), find_device("a100")),
    )
    assert [x.backward_workspace_bytes for x in chain.layers] == [
        x.backward_workspace_bytes for x in fake.layers
    ]
    plain = profile_task(capture_tasks.mlp(), repeats=1, warmup=0)
    assert chain.layers[0].backward_workspace_bytes > plain.layers[0].backward_workspace_bytes
    plan = planned(lasting(chain), 2, semantics, 1, 1)
    assert measured(plan, make()) == [row.peak_bytes for row in plan.memory]


class Listed(nn.Module):
    """Finds its weight in a list of its own."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6).to(dtype))
        self.found = [self.weight]

    def forward(self, value: Tensor) -> Tensor:
        return (value.to(self.weight.dtype) @ self.found[0]).float()


@pytest.mark.parametrize(
    ("semantics", "dtype"), [("2bw", torch.float32), ("flush", torch.bfloat16)]
)
def test_weights_found_past_their_attributes_are_refused(
    semantics: Semantics, dtype: torch.dtype
) -> None:
    """Where leaves stand in for parameters, what comes to a parameter itself would be lost."""
    torch.manual_seed(0)
    split, task = pipelines.split_by_hand([Listed(dtype), nn.Linear(6, 3)], "sgd")
    plan = pipelines.plan_of([1], [0, 1], semantics, M, layers=2)
    task = replace(task, accumulate=torch.float32)
    with pytest.raises(InputError, match=r"'0\.weight'.*no update.*Listed for 'weight'.*self\.w"):
        pipelines.train(plan, pipelines.pattern_of(plan, 3), split, task, 1)


def test_weights_may_be_found_anywhere_under_flush() -> None:
    """There layers know the parameters themselves; a gradient from before a run is no matter."""
    torch.manual_seed(0)
    split, task = pipelines.split_by_hand([Listed(torch.float32), nn.Linear(6, 3)], "sgd")
    check(([1], [0, 1]), "flush", split, task)
    split, task = pipelines.toy()
    for layer in split.layers:
        for parameter in layer.parameters():
            parameter.grad = torch.ones_like(parameter)
    check(([1], [0, 1]), "2bw", split, task)
