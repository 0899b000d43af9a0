"""Nothing in the schedule reads a number from the device: each read would wait for a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pipeplan.plan import Plan
from pipeplan.runtime import executor
from pipeplan.runtime.losses import Losses
from pipeplan.runtime.parameters.gradient_clipping import LossScaler, StepDecisions
from pipeplan.runtime.parameters.gradient_norms import NormLayout, norms_of
from pipeplan.runtime.transport.gloo import LocalTransport
from pipeplan.runtime.transport.host_staging import moved
from pipeplan.task import LossScale
from pipeplan.testing import reference
from tests import pipelines

STEPS = 3


class Reads(TorchDispatchMode):
    """Counts the numbers that are read out of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def plan(semantics: Any) -> Plan:
    """Six stages on four GPUs."""
    return pipelines.plan_of([1, 3, 4, 5, 7], [0, 1, 2, 0, 1, 3], semantics, microbatches=6)


def test_losses_are_told_in_order_once_they_are_wanted() -> None:
    """Those of a step leave behind its last forward, and nobody hears them before `tell`."""
    told: list[tuple[int, float]] = []
    losses = Losses(3, lambda number, value: told.append((number, value)), lambda _: True)
    values = torch.rand(6, dtype=torch.float64)
    with Reads() as reads:
        for number in range(3, 8):
            losses.add(number, values[number - 3])
    assert not told
    assert not reads.count
    losses.tell()
    assert told == [(number, values[number - 3].item()) for number in range(3, 6)]
    losses.add(8, values[5])
    losses.tell()
    assert told[3:] == [(number, values[number - 3].item()) for number in range(6, 9)]


def test_events_are_waited_for_before_losses_are_read() -> None:
    """The copy to the host is complete when its numbers are read."""
    waited: list[Any] = []
    losses = Losses(1, lambda *_: None, lambda _: True, waited.append)
    losses.add(0, torch.ones(()))
    (sent,) = losses._sent
    event = object()
    losses._sent[0] = type(sent)(sent.first, sent.host, event)
    losses.tell()
    assert waited == [event]


@pytest.mark.parametrize("semantics", ["flush", "2bw"])
def test_losses_read_once_per_step_are_the_same(
    semantics: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: bit-equal to one process, all told before the update of their step."""
    made = plan(semantics)
    known: list[int] = []

    class Listener(pipelines.Listener):
        def updated(self, stage: int, step: int) -> None:
            if stage == len(made.stages) - 1:
                known.append(len(self.losses))

    monkeypatch.setattr(pipelines, "Listener", Listener)
    monkeypatch.setattr(
        executor, "Losses", lambda size, told, settle: Losses(size, told, lambda _: True, settle)
    )
    outcome = pipelines.train(made, pipelines.pattern_of(made, 3), *pipelines.toy(), STEPS)
    train = reference.train_2bw if semantics == "2bw" else reference.train_flush
    expected = train(*pipelines.toy(), STEPS, made.microbatches, seed=3)
    assert outcome.losses == expected.losses
    assert known == [(step + 1) * made.microbatches for step in range(STEPS)]


def test_norms_are_found_without_reading_them() -> None:
    """Of all dtypes and layouts; those of torch's `clip_grad_norm_`, bit for bit."""
    torch.manual_seed(0)
    split, _ = pipelines.toy()
    stages = plan("flush").stages
    layout = NormLayout([stages[0]], split)
    names = [name for name in layout.place]
    kinds = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
    gradients = {
        name: torch.randn(7, 5).t().to(kinds[number % 4]) for number, name in enumerate(names)
    }
    decisions = StepDecisions(layout, LocalTransport(), 1.0, LossScaler(LossScale(), 1), 0)
    with Reads() as reads:
        decisions.add(0, gradients)
        decisions.send(0)
    assert not reads.count
    (row,) = decisions._rows[0].values()
    norms = [torch.linalg.vector_norm(gradients[name]).double() for name in names]
    assert row.tolist() == [1.0, *(norm.item() for norm in norms)]


def test_norms_of_one_dtype_are_found_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `clip_grad_norm_` finds them: on a GPU a list of several dtypes has other bits."""
    asked: list[set[torch.dtype]] = []
    find = torch._foreach_norm

    def counted(tensors: list[Tensor]) -> Any:
        asked.append({each.dtype for each in tensors})
        return find(tensors)

    monkeypatch.setattr(torch, "_foreach_norm", counted)
    kinds = [torch.float32, torch.bfloat16, torch.float32, torch.float64]
    gradients = [torch.full((3,), 1.0 + number).to(kind) for number, kind in enumerate(kinds)]
    found = norms_of(gradients)
    assert sorted(map(str, asked)) == sorted(str({kind}) for kind in set(kinds))
    expected = [torch.linalg.vector_norm(gradient).double().item() for gradient in gradients]
    assert found.tolist() == expected


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
@pytest.mark.parametrize("empty", [False, True])
def test_a_number_that_is_not_finite_is_found(bad: float, empty: bool) -> None:
    """In any gradient of any stage of the rank; an empty gradient is finite."""
    split, _ = pipelines.toy()
    layout = NormLayout([plan("flush").stages[0]], split)
    names = list(layout.place)
    decisions = StepDecisions(layout, LocalTransport(), None, LossScaler(LossScale(), 1), 0)
    for step, value in enumerate((1.0, bad)):
        gradients = {name: torch.ones(3) for name in names}
        gradients[names[-1]][1] = value
        if empty:
            gradients[names[0]] = torch.empty(0)
        decisions.add(step, gradients)
        decisions.send(step)
        assert decisions.wait(step).skip == (step == 1)


def test_data_do_not_wait_for_the_gpu_on_their_way_to_it() -> None:
    """They go through page-locked memory; on the processor they are what they were."""
    done: list[tuple[str, Any]] = []

    class Data:
        is_cuda = False

        def pin_memory(self) -> Data:
            done.append(("pinned", None))
            return self

        def to(self, device: torch.device, **words: Any) -> Data:
            done.append((str(device), words))
            return self

    moved(Data(), torch.device("cuda", 1))  # type: ignore[arg-type]
    assert done == [("pinned", None), ("cuda:1", {"non_blocking": True})]
    value = torch.ones(2)
    assert moved(value, torch.device("cpu")) is value
