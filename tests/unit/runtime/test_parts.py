"""The runtime's parts, one by one: seeds, boundaries, weight slots, gate, periods, transport."""

from __future__ import annotations

import weakref
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from pipeplan.autograd_cut import Slot, enter, leave, run_backward
from pipeplan.errors import DeadlockError, InputError, InternalError, RankError
from pipeplan.program import Action, ActionKind, Pattern
from pipeplan.runtime.data.feed import TaskFeed, Uses
from pipeplan.runtime.parameters.optimizer_factory import OptimizerFactory
from pipeplan.runtime.parameters.slots import attributes_of
from pipeplan.runtime.parameters.weights import Weights
from pipeplan.runtime.stages.random_state import layer_seed
from pipeplan.runtime.supervision.flight_recorder import FlightRecorder
from pipeplan.runtime.supervision.period_meter import PeriodMeter
from pipeplan.runtime.transport.base import Transport, wait_all
from pipeplan.testing.in_process import run_ranks
from tests import pipelines


def test_seeds_differ_where_it_matters() -> None:
    """Seed, layer and micro-batch each change the 32 bits that torch's generator uses."""
    seeds = {
        layer_seed(seed, layer, number) & 0xFFFFFFFF
        for seed in range(4)
        for layer in range(20)
        for number in range(50)
    }
    assert len(seeds) == 4 * 20 * 50


def test_seed_is_a_contract() -> None:
    """Checkpoints are resumed by later versions: the seed of a layer must never change."""
    assert layer_seed(0, 0, 0) == 1279368494785126216
    assert layer_seed(1, 2, 3) == 3851293329796251419


def graph(function: nn.Module, tensor: Tensor) -> tuple[Slot, Slot, Tensor]:
    """Entry slot, exit slot and root of `function` between `enter` and `leave`."""
    entry, exit_ = Slot(), Slot()
    (entered,) = enter(entry, [tensor])
    return entry, exit_, leave(exit_, [function(entered)])


def test_entry_keeps_only_what_autograd_saves() -> None:
    """An input that nothing saved dies with its last name; a saved one lives to the backward."""
    for function, lives in ((nn.Identity(), False), (nn.GELU(), True)):
        tensor = torch.randn(4)
        storage = weakref.ref(tensor.untyped_storage())
        kept = graph(function, tensor)
        del tensor
        assert (storage() is not None) is lives
        kept[1].put([torch.ones(4)])
        run_backward(kept[2])
        assert storage() is None


def test_gradients_pass_through_without_being_kept() -> None:
    """While the first layer's backward runs, nobody holds the gradient of the output any more."""
    alive: list[bool] = []

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, tensor: Tensor) -> Tensor:
            return tensor * 2

        @staticmethod
        def backward(ctx: object, gradient: Tensor) -> Tensor:
            alive.append(storage() is not None)
            return gradient * 2

    entry, exit_ = Slot(), Slot()
    (entered,) = enter(entry, [torch.randn(4)])
    root = leave(exit_, [Probe.apply(entered).exp().exp()])
    gradient = torch.ones(4)
    storage = weakref.ref(gradient.untyped_storage())
    exit_.put([gradient])
    del gradient
    run_backward(root)
    assert alive == [False]
    assert entry.take() is not None


def test_unused_input_gets_a_zero_gradient() -> None:
    """A boundary tensor that the stage ignores sends zeros back, not nothing."""
    entry, exit_ = Slot(), Slot()
    used, _ = enter(entry, [torch.ones(2), torch.ones(3)])
    root = leave(exit_, [used * 5])
    exit_.put([torch.ones(2)])
    run_backward(root)
    got = entry.take()
    assert got is not None
    assert [tensor.tolist() for tensor in got] == [[5.0, 5.0], [0.0, 0.0, 0.0]]


def slots(versions: int) -> tuple[nn.Linear, Weights]:
    """A 1x1 layer whose weight starts at 1 and falls by the mean gradient."""
    layer = nn.Linear(1, 1, bias=False)
    nn.init.ones_(layer.weight)
    optimizing = OptimizerFactory(lambda p: torch.optim.SGD(p, lr=1.0))
    return layer, Weights([attributes_of(layer)], optimizing, versions=versions, microbatches=2)


def one_step(layer: nn.Linear, weights: Weights, step: int) -> float:
    """Two micro-batches of loss w * 1 with gradient 1 each; returns the weight they saw."""
    for _ in range(2):
        weights.begin_graph(step)
        seen = layer(torch.ones(1, 1))
        seen.backward()
        weights.end_graph(step)
    weights.update(step)
    return seen.item()


def test_2bw_reads_the_version_before() -> None:
    """Forwards of steps 0..3 see W(0), W(0), W(1), W(2); the newest is always one step ahead."""
    layer, weights = slots(2)
    assert [one_step(layer, weights, step) for step in range(4)] == [1.0, 1.0, 0.0, -1.0]
    assert [float(t) for t in weights.newest() + weights.previous()] == [-3.0, -2.0]


def test_flush_reads_the_newest_version() -> None:
    """Forwards of steps 0..3 see W(0)..W(3)."""
    layer, weights = slots(1)
    assert [one_step(layer, weights, step) for step in range(4)] == [1.0, 0.0, -1.0, -2.0]


@pytest.mark.parametrize(("versions", "step"), [(1, 1), (2, 2)])
def test_forward_of_a_version_that_is_not_there(versions: int, step: int) -> None:
    """A forward before the update it needs is refused, not run on older weights."""
    _, weights = slots(versions)
    with pytest.raises(InternalError, match="rule `versions`"):
        weights.begin_graph(step)


@pytest.mark.parametrize("versions", [1, 2])
def test_update_under_a_living_graph(versions: int) -> None:
    """An update that would overwrite weights of a graph in flight is refused."""
    _, weights = slots(versions)
    weights.begin_graph(0)
    with pytest.raises(InternalError, match="graphs still use"):
        weights.update(0)


def test_period_of_a_steady_flow() -> None:
    """The best window is the mean over four periods of k micro-batches, the median that of one."""
    meter = PeriodMeter(k=2, microbatches=4, drains=False)
    ends = [0, 10, 20, 40, 50, 60, 70, 80, 90, 100, 200]
    for microbatch, end in enumerate(ends):
        meter.mark(microbatch, end)
    result = meter.result()
    assert (result.best_window_ns, result.median_ns, result.window) == (22.5, 20.0, 4)


def test_period_does_not_span_a_drain() -> None:
    """Under flush the time between the steps is no period."""
    meter = PeriodMeter(k=1, microbatches=3, drains=True)
    for microbatch, end in enumerate([0, 10, 20, 1000, 1012, 1024]):
        meter.mark(microbatch, end)
    result = meter.result()
    assert (result.best_window_ns, result.median_ns, result.window) == (10.0, 11.0, 2)


def test_period_of_a_single_micro_batch_is_unknown() -> None:
    """One micro-batch per drained step shows no period at all."""
    meter = PeriodMeter(k=1, microbatches=1, drains=True)
    for microbatch in range(5):
        meter.mark(microbatch, 10 * microbatch)
    assert meter.result().best_window_ns is None
    assert meter.result().median_ns is None


def test_recorder_keeps_the_last_actions() -> None:
    """The ring holds the newest entries only and names what runs now."""
    recorder = FlightRecorder(capacity=3)
    for number in range(5):
        recorder.end(recorder.begin(Action(ActionKind.F, 0, number)), waited_ns=number)
    recorder.begin(Action(ActionKind.B, 0, 4))
    assert [str(each.action) for each in recorder.last()] == ["0F2", "0F3", "0F4"]
    assert [each.waited_ns for each in recorder.last()] == [2, 3, 4]
    assert recorder.report().splitlines()[-1] == "now: 0B4"


def test_messages_of_one_tag_keep_their_order() -> None:
    """Two messages with one tag arrive as sent, another tag overtakes them."""

    def work(transport: Transport) -> list[float]:
        if transport.rank == 0:
            sent = [transport.send(torch.full((1,), v), 1, t) for v, t in ((1.0, 5), (2.0, 5))]
            wait_all([*sent, transport.send(torch.full((1,), 3.0), 1, 6)])
            return []
        buffers = [torch.zeros(1) for _ in range(3)]
        wait_all([transport.receive(buffers[2], 0, 6)])
        wait_all([transport.receive(buffer, 0, 5) for buffer in buffers[:2]])
        return [float(buffer) for buffer in buffers]

    assert run_ranks(2, work)[1] == [1.0, 2.0, 3.0]


def test_deadlock_is_named_not_hung() -> None:
    """Ranks that only receive end in an error that lists every wait."""

    def work(transport: Transport) -> None:
        wait_all([transport.receive(torch.zeros(1), 1 - transport.rank, 7)])

    with pytest.raises(DeadlockError, match="tag 7") as caught:
        run_ranks(2, work)
    assert len(caught.value.cycle) == 2


class Broken(nn.Module):
    """Fails in the forward of micro-batch 4."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def forward(self, x: Tensor) -> Tensor:
        if pipelines.data(4)[0][0, 0] == x[0, 0]:
            raise self.error
        return x


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (ValueError("no\nsuch luck"), "ValueError: no$"),
        (torch.OutOfMemoryError("CUDA out of memory."), "CUDA out .* with a larger --reserve"),
        (
            RuntimeError("DefaultCPUAllocator: can't"),
            "allocator: can't .* with a larger --reserve",
        ),
    ],
)
def test_failing_action_is_named(error: Exception, cause: str) -> None:
    """An exception inside a layer becomes one line; where memory ran out it says what to do."""
    split, task = pipelines.split_by_hand([Broken(error), nn.Linear(6, 3)], "sgd")
    plan = pipelines.plan_of([1], [0, 1], "flush", microbatches=6, layers=2)
    pattern = pipelines.pattern_of(plan, period=2)
    place = r"^rank 0: action 0F4 \(stage 0, micro-batch 4\) failed: "
    with pytest.raises(RankError, match=rf"(?i){place}.*{cause}"):
        pipelines.train(plan, pattern, split, task, 1)


def test_program_that_leaves_something_over() -> None:
    """A program without the backwards of a stage is a bug that is reported, not ignored."""
    split, task = pipelines.toy()
    plan = pipelines.plan_of([], [0], "flush", microbatches=2)
    pattern = Pattern.parse("pattern k=1 semantics=flush microbatches=2\n0: 0F0+0\n")
    with pytest.raises(InternalError, match="graphs still use"):
        pipelines.train(plan, pattern, split, task, 1)


def test_smaller_last_batch_is_refused() -> None:
    """A micro-batch of another shape than the plan's gives one clear message."""
    split, task = pipelines.toy()
    smaller = pipelines.TensorSpec((4, 6), "torch.float32", False)
    split = replace(split, boundaries=((smaller,), *split.boundaries[1:]))
    feed = TaskFeed(task, split, Uses(inputs=(1,), targets=0))
    with pytest.raises(InputError, match="same shape"):
        feed.input(0)


def test_loss_must_be_a_scalar() -> None:
    """A loss per sample is refused with its shape."""
    split, task = pipelines.toy()
    task = pipelines.Task(
        model=task.model,
        loss=lambda out, target: out.sum(1),
        optimizer=task.optimizer,
        data=task.data,
    )
    plan = pipelines.plan_of([], [0], "flush", microbatches=2)
    with pytest.raises(InputError, match=r"task\.loss: got shape \[5\]"):
        pipelines.train(plan, pipelines.pattern_of(plan, period=2), split, task, 1)
