"""The profiled bytes, put together by (M2) and (M3), are what the runtime's stages really hold."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeplan.capture import profile_task, split
from pipeplan.chain import Chain
from pipeplan.errors import InputError
from pipeplan.livebytes import LiveBytes
from pipeplan.runtime.parameters.optimizer_factory import OptimizerFactory
from pipeplan.runtime.parameters.ownership import ParameterOwnership
from pipeplan.runtime.stages.stage import StageRunner, StageSpec
from pipeplan.split_model import SplitModel, TensorSpec
from pipeplan.task import Task
from tests.capture_tasks import conv, gpt2, mlp, rows, sgd, skips, transformer
from tests.captured import captured, chain_of


@dataclass(frozen=True)
class Held:
    """Bytes of one stage beyond its states, with `count` micro-batches in flight."""

    kept: int
    forward_peak: int
    backward_peak: int


def kept_between(chain: Chain, left: int) -> int:
    """K of docs/reference/model.md: what the boundary behind layer `left` keeps inside a stage."""
    return max(chain.layers[left].saved_output_bytes, chain.layers[left + 1].saved_input_bytes)


def predicted(chain: Chain, first: int, last: int, count: int) -> Held:
    """(M2) and (M3) of the stage [first, last] that has its GPU for itself."""
    layers = chain.layers
    start = layers[first].saved_input_bytes

    def rest(upto: int) -> int:
        return sum(layer.saved_bytes for layer in layers[first : upto + 1])

    def inner(upto: int) -> int:
        return sum(kept_between(chain, left) for left in range(first, upto))

    forward = [
        (start + inner(x - 1) + max(kept_between(chain, x - 1), chain.input_of(x)))
        if x > first
        else max(start, chain.input_of(first))
        for x in range(first, last + 1)
    ]
    forward = [
        held + rest(x) + layers[x].forward_workspace_bytes + layers[x].output_bytes
        for x, held in enumerate(forward, start=first)
    ]
    backward = [
        start
        + rest(x)
        + inner(x)
        + layers[x].saved_output_bytes
        + layers[x].backward_workspace_bytes
        + layers[x].gradient_of_output_bytes
        + chain.gradient_of_input(x)
        for x in range(first, last + 1)
    ]
    kept = start + rest(last) + inner(last) + layers[last].saved_output_bytes
    others = (count - 1) * kept
    return Held(count * kept, others + max(forward), others + max(backward))


def measured(
    task: Task, model: SplitModel, first: int, last: int, count: int, *, again: bool = False
) -> Held:
    """The same of a stage of the runtime, all of it computed `again`, counted by LiveBytes."""
    stage, inputs, final = make_stage(task, model, first, last, count, again=again)
    buffers = [tensor for layer in stage.spec.layers for tensor in layer.buffers()]
    live = LiveBytes([*stage.weights.tensors(), *buffers])
    target = task.microbatch(0)[1]

    def forward(microbatch: int) -> None:
        with live.paused():
            arrived = [value.clone() for value in inputs]
        live.count(arrived)
        live.reset_peak()
        stage.forward(microbatch, arrived, lambda _: target.clone())

    def backward(microbatch: int) -> None:
        outgoing = [] if final else model.boundaries[last + 1]
        gradients = [zeros(spec) for spec in outgoing if spec.differentiable]
        live.reset_peak()
        stage.backward(microbatch, gradients)

    with live:
        forward(0)
        backward(0)
        base = live.live
        for microbatch in range(count):
            forward(microbatch)
        kept, forward_peak = live.live - base, live.peak - base
        backward(0)
        backward_peak = live.peak - base
        for microbatch in range(1, count):
            backward(microbatch)
        assert live.live == base, "a stage without micro-batches must hold its states only"
    return Held(kept, forward_peak, backward_peak)


def make_stage(
    task: Task,
    model: SplitModel,
    first: int,
    last: int,
    count: int,
    *,
    split_backward: bool = False,
    again: bool = False,
) -> tuple[StageRunner, tuple[Tensor, ...], bool]:
    """The runtime's stage of layers first..last, an input for it, whether it is the last one."""
    final = last == len(model.layers) - 1
    spec = StageSpec(
        index=min(first, 1),
        first_layer=first,
        layers=model.layers[first : last + 1],
        fqns=model.fqns[first : last + 1],
        boundaries=model.boundaries[first : last + 1],
        outputs=() if final else model.boundaries[last + 1],
        loss=task.loss if final else None,
        seed=0,
        split_backward=split_backward,
        runs=((0, last - first),) if again else (),
    )
    optimizing = OptimizerFactory(task.optimizer)
    ownership = ParameterOwnership((), optimizing, versions=1, microbatches=count, deferred=False)
    values: tuple[Tensor, ...] = (task.microbatch(0)[0],)
    with torch.no_grad():
        for layer in model.layers[:first]:
            result = layer(*values)
            values = result if isinstance(result, tuple) else (result,)
    return StageRunner(spec, count, ownership.hold(spec.layers, first)), values, final


def zeros(spec: TensorSpec) -> Tensor:
    """A tensor of this shape and dtype."""
    return torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype.removeprefix("torch.")))


@functools.cache
def profiled(make: Callable[[], Task]) -> tuple[Task, SplitModel, Chain]:
    """A task, split and profiled once for all tests."""
    model, task = captured(make)
    return task, model, chain_of(make)


def spans(count: int) -> list[tuple[int, int]]:
    """Stages that begin or end anywhere, not all pairs: ends, singles, halves, the whole."""
    middle = count // 2
    singles = [(layer, layer) for layer in range(count)]
    return [*singles, (0, 1), (0, middle), (1, count - 2), (middle, count - 1), (0, count - 1)]


MADE = {"mlp": mlp, "conv": conv, "transformer": transformer, "gpt2": gpt2}


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_stage_holds_what_the_chain_predicts(make: Callable[[], Task], count: int) -> None:
    """Any stage, with one or three micro-batches in flight, holds (M2) and (M3) to the byte."""
    task, model, chain = profiled(make)
    for first, last in spans(len(model.layers)):
        got = measured(task, model, first, last, count)
        assert got == predicted(chain, first, last, count), (first, last)


class GivesItsWeight(nn.Module):
    """Returns a parameter of its own that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(40, 60))

    def forward(self, value: Tensor) -> tuple[Tensor, Tensor]:
        return value.relu(), self.weight


class TakesWeight(nn.Module):
    """Uses it, or does not."""

    def __init__(self, uses: bool) -> None:
        super().__init__()
        self.uses = uses

    def forward(self, value: Tensor, weight: Tensor) -> Tensor:
        return value * weight.mean() if self.uses else value * 1


def giving(*, uses: bool) -> Task:
    """A list of layers, the second of which hands its weight on."""
    layers = [nn.Linear(6, 6), GivesItsWeight(), TakesWeight(uses), nn.Linear(6, 3)]

    def data(number: int) -> tuple[Tensor, Tensor]:
        return rows(number, 4, 6), rows(number + 1, 4, 3)

    return Task(model=layers, loss=functional.mse_loss, optimizer=sgd, data=data)


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_a_first_forward_needs_what_the_chain_predicts(make: Callable[[], Task]) -> None:
    """(V3) to the byte, of any run; one that ends with the loss has given up its last input."""
    task, model, chain = profiled(make)
    final = len(model.layers) - 1
    for first, last in spans(len(model.layers)):
        needs = [
            (chain.input_of(first) if layer > first else 0)
            + chain.input_of(layer)
            + (chain.layers[layer].forward_light_workspace_bytes or 0)
            + chain.layers[layer].output_bytes
            for layer in range(first, last + 1)
        ]
        got = measured(task, model, first, last, 1, again=True).forward_peak
        given_up = chain.input_of(final) if first < last == final else 0
        assert max(needs) - given_up <= got <= max(needs), (first, last)
        assert got == max(needs) or needs[-1] == max(needs), (first, last)


@pytest.mark.parametrize("count", [1, 3])
def test_passed_through_tensors_are_never_missed(count: int) -> None:
    """Tensors that pass through layers unchanged are counted at both boundaries, never at none.

    What is kept is still exact; only transients are above what is held.
    """
    task, model, chain = profiled(skips)
    for first, last in spans(len(model.layers)):
        got = measured(task, model, first, last, count)
        want = predicted(chain, first, last, count)
        assert got.kept == want.kept
        assert got.forward_peak <= want.forward_peak
        assert got.backward_peak <= want.backward_peak


@pytest.mark.parametrize("uses", [True, False])
def test_a_weight_that_a_layer_hands_on_is_never_missed(uses: bool) -> None:
    """It counts as a tensor of the boundary, though a stage of both layers has it once."""
    task, model, chain = profiled(functools.partial(giving, uses=uses))
    for first, last in spans(len(model.layers)):
        got = measured(task, model, first, last, 2)
        want = predicted(chain, first, last, 2)
        assert got.kept <= want.kept
        assert got.forward_peak <= want.forward_peak
        assert got.backward_peak <= want.backward_peak


def test_optimizer_bytes_are_all_state_tensors() -> None:
    """AdamW holds two moments per weight and a 4-byte step counter per parameter tensor."""
    _, _, chain = profiled(mlp)
    linear = chain.layers[0]
    assert linear.optimizer_bytes == 2 * linear.weight_bytes + 2 * 4
    assert linear.gradient_bytes == linear.weight_bytes == (64 * 128 + 128) * 4


def test_states_that_a_schedule_asks_for_count() -> None:
    """A one-cycle schedule gives SGD a momentum; a schedule that cannot be made is refused."""

    def task(schedule: Callable[[torch.optim.Optimizer], object]) -> Task:
        plain = _several(nn.Linear(64, 64), nn.Linear(64, 64))
        return replace(plain, scheduler=schedule)  # type: ignore[arg-type]

    schedules = torch.optim.lr_scheduler
    chain = profile_task(task(partial(schedules.OneCycleLR, max_lr=0.1, total_steps=5)), repeats=1)
    assert [each.optimizer_bytes for each in chain.layers] == [
        each.weight_bytes for each in chain.layers
    ]
    rate = torch.tensor(0.5)
    shared = replace(
        task(partial(schedules.LinearLR, start_factor=0.5)),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=rate, foreach=False),
    )
    profile_task(shared, repeats=1)
    assert rate == 0.5, "a schedule has written into the user's rate"
    for wrong, why in (
        (schedules.StepLR, "failed on one layer's optimizer: TypeError: .*step_size"),
        (schedules.ReduceLROnPlateau, "got ReduceLROnPlateau, need a schedule"),
        (lambda _: None, "got NoneType, need a schedule"),
    ):
        with pytest.raises(InputError, match=f"task: scheduler: {why}"):
            profile_task(task(wrong), repeats=1)


def test_optimizer_workspace_is_the_peak_of_a_real_step() -> None:
    """A step on several layers peaks at the largest of their workspaces above the states."""
    task, model, chain = profiled(gpt2)
    stage, _, _ = make_stage(task, model, 0, len(model.layers) - 1, 1)
    _reach(stage, 0)
    stage.weights.update(0)
    _reach(stage, 1)
    live = LiveBytes(stage.weights.tensors())
    base = live.live
    with live:
        stage.weights.update(1)
    assert live.peak - base == max(layer.optimizer_workspace_bytes for layer in chain.layers)
    states = sum(
        layer.weight_bytes + layer.gradient_bytes + layer.optimizer_bytes for layer in chain.layers
    )
    assert base == states


def _reach(stage: StageRunner, step: int) -> None:
    """Add to all gradients, as a backward does: what none reaches is not updated."""
    for gradient in stage.weights.gradients(step):
        gradient.add_(0.5)


class _Twice(nn.Module):
    """A product with what is passed on, which its backward releases before it needs most."""

    def forward(self, table: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        return table, torch.tanh(functional.linear(rows, table))


class _Two(nn.Module):
    """A tensor that its backward needs, and one that it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.inner.weight * 2), self.inner(rows)


class _Second(nn.Module):
    """Needs the second tensor alone, or joins both."""

    def __init__(self, *, joins: bool) -> None:
        super().__init__()
        self.joins = joins

    def forward(self, first: Tensor, second: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        return second @ first if self.joins else (first, second * second)


def _several(*layers: nn.Module) -> Task:
    """Layers between which two tensors pass, a large one and rows."""
    return Task(
        model=list(layers),
        loss=functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        data=lambda _: (torch.ones(8, 64), torch.zeros(8, 64)),
    )


@pytest.mark.parametrize("kind", ["both keep one", "each keeps another"])
def test_what_the_layer_before_keeps_lives_on(kind: str) -> None:
    """A stage of both holds what they keep to the byte; one that begins between, no more."""
    torch.manual_seed(0)
    middle = _Twice() if kind == "both keep one" else _Second(joins=False)
    task = _several(_Two(), middle, _Second(joins=True))
    model, chain = split(task), profile_task(task, repeats=1, warmup=0)
    for first, last in [(0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (2, 2)]:
        got, most = measured(task, model, first, last, 2), predicted(chain, first, last, 2)
        pairs = [(got.kept, most.kept), (got.forward_peak, most.forward_peak)]
        pairs.append((got.backward_peak, most.backward_peak))
        assert all(one <= other for one, other in pairs), (first, last)
        assert got == most or (first, last) != (0, 1)


def test_saved_parts_of_known_layers() -> None:
    """A linear layer saves its input, ReLU its output, dropout its mask, mean loss its target."""
    torch.manual_seed(0)
    task = Task(
        model=nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)),
        loss=functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        data=lambda _: (torch.zeros(8, 16), torch.zeros(8, 16)),
    )
    size = 8 * 16 * 4
    chain = profile_task(task, repeats=1, warmup=0)
    parts = [(x.saved_input_bytes, x.saved_bytes, x.saved_output_bytes) for x in chain.layers]
    # The loss keeps the model's output and the target; both are inside the last layer.
    assert parts == [(size, 0, 0), (0, 0, size), (size, 2 * size, 0)]
    assert [layer.output_bytes for layer in chain.layers] == [size, size, 4]
    assert chain.input_bytes == size
