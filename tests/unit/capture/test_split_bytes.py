"""Profiled halves of backwards: their bytes, summed up by (S3) to (S5), are what stages hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from pipeplan.capture import estimate_task, profile_task, split
from pipeplan.capture.layer_costs.device_clock import ModelDevice
from pipeplan.capture.layer_costs.layer_timer import LayerTimer
from pipeplan.capture.layer_costs.micro_batches import MicroBatches
from pipeplan.chain import Chain, Layer
from pipeplan.devices import find_device
from pipeplan.livebytes import LiveBytes
from pipeplan.split_model import SplitModel
from pipeplan.task import Task
from tests.capture_tasks import sgd, skips
from tests.unit.capture.test_bytes import MADE, make_stage, predicted, profiled, spans, zeros


@dataclass(frozen=True)
class Halves:
    """Bytes of one stage beyond its states, with one micro-batch in flight."""

    kept: int
    """From F to I."""
    first_peak: int
    between: int
    """From I to W."""
    second_peak: int


def expected(chain: Chain, first: int, last: int) -> Halves:
    """(M2) and (S3) to (S5) of the stage [first, last] that has its GPU for itself."""
    layers = chain.layers
    places = range(first, last + 1)

    def rest(layer: Layer) -> int:
        return (layer.saved_for_weight_bytes or 0) - layer.saved_input_for_weight_bytes

    def own(at: int) -> int:
        return layers[at].saved_input_for_weight_bytes

    def stored(upto: int) -> int:
        kept = layers[first].saved_input_bytes + sum(
            layer.saved_bytes for layer in layers[first : upto + 1]
        )
        pairs = range(first, upto)
        return kept + sum(
            max(layers[left].saved_output_bytes, layers[left + 1].saved_input_bytes)
            for left in pairs
        )

    first_half = [
        stored(at)
        + max(layers[at].saved_output_bytes, own(at + 1) if at < last else 0)
        + layers[at].input_backward_workspace_bytes
        + layers[at].gradient_of_output_bytes
        + chain.gradient_of_input(at)
        + sum(rest(layer) for layer in layers[at + 1 : last + 1])
        + sum(own(behind) for behind in range(at + 2, last + 1))
        for at in places
    ]
    second_half = [
        own(first)
        + sum(own(before) for before in range(first + 1, at + 1))
        + sum(rest(layer) for layer in layers[first : at + 1])
        + layers[at].weight_backward_workspace_bytes
        for at in places
    ]
    return Halves(
        kept=predicted(chain, first, last, 1).kept,
        first_peak=max(first_half),
        between=sum(own(at) + rest(layers[at]) for at in places),
        second_peak=max(second_half),
    )


def measured(task: Task, model: SplitModel, first: int, last: int) -> Halves:
    """The same of a stage of the runtime, counted by LiveBytes."""
    stage, inputs, final = make_stage(task, model, first, last, 1, split_backward=True)
    buffers = [tensor for layer in stage.spec.layers for tensor in layer.buffers()]
    live = LiveBytes([*stage.weights.tensors(), *buffers])
    target = task.microbatch(0)[1]

    def once(base: int) -> Halves:
        with live.paused():
            arrived = [value.clone() for value in inputs]
        live.count(arrived)
        stage.forward(0, arrived, lambda _: target.clone())
        kept = live.live - base
        outgoing = [] if final else model.boundaries[last + 1]
        gradients: list[Tensor] = [zeros(spec) for spec in outgoing if spec.differentiable]
        live.reset_peak()
        stage.backward(0, gradients)
        first_peak, between = live.peak - base, live.live - base
        live.reset_peak()
        stage.weight_backward(0)
        return Halves(kept, first_peak, between, live.peak - base)

    with live:
        once(live.live)
        base = live.live
        found = once(base)
        assert live.live == base, "a stage without micro-batches must hold its states only"
    return found


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_split_stage_holds_what_the_chain_predicts(make: Callable[[], Task]) -> None:
    """Any stage behind the first layer: what lives after F and I, and the peaks of I and W."""
    task, model, chain = profiled(make)
    for first, last in spans(len(model.layers)):
        if first:
            got, want = measured(task, model, first, last), expected(chain, first, last)
            assert got == want, (first, last)


def test_tensors_that_two_layers_need_are_never_missed() -> None:
    """A skip that several layers need for their weights counts for each, never for none."""
    task, model, chain = profiled(skips)
    for first, last in spans(len(model.layers)):
        if first:
            got, want = measured(task, model, first, last), expected(chain, first, last)
            assert got.kept == want.kept
            assert got.between <= want.between
            assert got.first_peak <= want.first_peak
            assert got.second_peak <= want.second_peak


def _halves(chain: Chain) -> list[tuple[int | None, ...]]:
    return [
        (
            layer.saved_for_weight_bytes,
            layer.saved_input_for_weight_bytes,
            layer.input_backward_workspace_bytes,
            layer.weight_backward_workspace_bytes,
        )
        for layer in chain.layers
    ]


@pytest.mark.parametrize("make", [*MADE.values(), skips], ids=[*MADE, "skips"])
def test_estimated_bytes_are_the_measured_ones(make: Callable[[], Task]) -> None:
    """To the byte, without memory; and both know the time of every layer but the first."""
    _, _, chain = profiled(make)
    estimated = estimate_task(make(), find_device("h100"))
    assert _halves(estimated) == _halves(chain)
    for found in (chain, estimated):
        assert [x.backward_weight_ns is None for x in found.layers].index(False) == 1
        assert all(x.backward_weight_ns is not None for x in found.layers[1:])


class _Energy(nn.Module):
    """Computes a gradient in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, value: Tensor) -> Tensor:
        with torch.enable_grad():
            seen = value.detach().requires_grad_().clone()
            (slope,) = torch.autograd.grad(self.linear(seen).square().sum(), seen)
        return self.linear(value) + slope


def test_parts_of_known_layers() -> None:
    """A linear layer needs its input and a gradient, a norm nothing; some cannot be split."""
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8), nn.Linear(8, 8, bias=False), nn.LayerNorm(8), nn.GELU(), _Energy()]
    task = Task(
        model=[*layers, nn.Linear(8, 8)],
        loss=functional.mse_loss,
        optimizer=sgd,
        data=lambda _: (torch.zeros(4, 8), torch.zeros(4, 8)),
    )
    chain = profile_task(task, repeats=1, warmup=0)
    size = 4 * 8 * 4
    parts = [(x.saved_for_weight_bytes, x.saved_input_for_weight_bytes) for x in chain.layers]
    assert parts == [
        (None, 0),
        (2 * size, size),
        (0, 0),
        (0, 0),
        (None, 0),
        (2 * size, size),
    ]
    times = [layer.backward_weight_ns for layer in chain.layers]
    assert (times[0], times[2], times[3], times[4]) == (None, 0, 0, None)
    assert chain.layers[1].weight_backward_workspace_bytes == 8 * 8 * 4


class _Products(TorchDispatchMode):
    """Counts products of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += func is torch.ops.aten.mm.default
        return func(*args, **(kwargs or {}))


class _ProductClock:
    """A clock on which nothing but a product of matrices takes time."""

    name = "products"

    def __init__(self, products: _Products) -> None:
        self._products = products

    def mark(self) -> int:
        return self._products.count

    def between(self, start: int, end: int) -> int:
        return end - start


def test_another_micro_batch_is_in_flight_at_each_backward() -> None:
    """As in a pipeline; a companion does nothing but train, and no forward runs for nothing."""
    told: list[str] = []

    class Tells(nn.Module):
        def forward(self, value: Tensor) -> Tensor:
            told.append("F" if torch.is_grad_enabled() else "light")
            result = value * 2
            if result.requires_grad:
                result.register_hook(lambda _: told.append("B"))
            return result

    task = Task(
        model=[nn.Linear(8, 8), Tells(), nn.Linear(8, 8)],
        loss=functional.mse_loss,
        optimizer=sgd,
        data=lambda _: (torch.zeros(4, 8), torch.zeros(4, 8)),
    )
    model = split(task)
    told.clear()
    timer = LayerTimer(model, MicroBatches(task), task.loss, ModelDevice(torch.device("cpu")))
    for number in range(3):
        timer.train(number)
    assert told == ["F", "F", "B", "F", "B", "F", "B"]
    told.clear()
    timer.run(3)
    assert told == ["light", "F", "B"]
    timer.clear()
    told.clear()
    timer.run_split(4, [False, False, True])
    timer.run(5)
    assert told == ["F", "F", "B", "light", "F", "F", "B"]


def test_halves_are_timed_as_they_are_executed() -> None:
    """Of three products of a layer one is of its forward, one of I and one of W."""
    task = Task(
        model=[nn.Linear(8, 8, bias=False) for _ in range(3)],
        loss=functional.mse_loss,
        optimizer=sgd,
        data=lambda _: (torch.zeros(4, 8), torch.zeros(4, 8)),
    )
    place, products = ModelDevice(torch.device("cpu")), _Products()
    place.clock = _ProductClock(products)
    timer = LayerTimer(split(task), MicroBatches(task), task.loss, place)
    with products:
        _, whole, _ = timer.run(0)
        forward, first, second = timer.run_split(0, [False, True, True])
    assert whole == [1, 2, 2]
    assert (forward[1], first, second) == (1, [1, 1, 1], [0, 1, 1])
