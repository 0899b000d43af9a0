"""What capture finds in a call, and what it refuses by name."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from pipeplan.devices import find_device
from pipeplan.operator_graph import Phase, StorageKind
from pipeplan.operators import (
    UncapturableError,
    by_operators,
    capture,
)
from pipeplan.rehearsal import agreement as rehearsal_agreement
from pipeplan.rehearsal import check_agreement, estimated, measured
from pipeplan.remat.programs import judge, keep_all
from tests.operator_models import Gpt, InPlace, Lstm, Model, model
from tests.operator_steps import step


class Small(nn.Module):
    """Does to its input what it is told to."""

    def __init__(self, does: Callable[[Small, Tensor], Any]) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.does = does
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, value: Tensor) -> Any:
        """Whatever it does."""
        return self.does(self, value)


class Numpy(torch.autograd.Function):
    """Leaves torch."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return torch.from_numpy(value.detach().numpy() * 2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


def _replaces(module: Small, value: Tensor) -> Tensor:
    module.seen = module.seen + 1
    return module.body(value)  # type: ignore[no-any-return]


def _in_place(module: Small, value: Tensor) -> Tensor:
    value.add_(1)
    return module.body(value)  # type: ignore[no-any-return]


def _past(module: Small, value: Tensor) -> Tensor:
    result = module.body(value) * module.seen
    with torch.no_grad():
        module.seen.add_(1)
    return result  # type: ignore[no-any-return]


REFUSED: dict[str, Callable[[Small, Tensor], Any]] = {
    "GuardOnDataDependent|data-dependent|torch cannot trace": lambda m, v: (
        m.body(v) if v.sum() > 0 else m.body(-v)
    ),
    "torch cannot trace the call": lambda m, v: m.body(v[v > 0].reshape(-1)[:4]),
    "seen: the forward puts another tensor in its place": _replaces,
    "the forward works in place on input 0": _in_place,
    "the forward returns no tensor": lambda m, v: int(m.body(v).shape[0]),
    "output 1 shows an input or another output": lambda m, v: (lambda y: (y, y.view(-1)))(
        m.body(v)
    ),
    "output 0 shows an input or another output": lambda m, v: (m.body.weight, m.body(v)),
    "modified by an inplace operation": _past,
    "torch cannot trace the call: ": lambda m, v: Numpy.apply(m.body(v)),
    "RuntimeError|NotImplementedError": lambda m, v: m.body(v).to_sparse(),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_no_graph_can_hold_is_refused_by_name(reason: str) -> None:
    """So that the caller can plan whole layers; the module is left as it was."""
    module = Small(REFUSED[reason])
    before = {name: each.clone() for name, each in module.state_dict().items()}
    with pytest.raises(UncapturableError, match=reason) as refused:
        capture(module, torch.ones(2, 4))
    assert refused.value.reason in str(refused.value)
    assert "Plan whole layers instead" in str(refused.value)
    assert all(torch.equal(before[name], each) for name, each in module.state_dict().items())


def test_outputs_that_are_cut_off_may_show_others() -> None:
    """They need no gradient: bits are those of the module."""
    module = Small(lambda m, v: (lambda y: (y, y.detach()[1], v))(m.body(v)))
    chosen = Model(module, (torch.ones(2, 4),))
    plain, _ = step(module, chosen)
    captured = capture(module, *chosen.args)
    done, _ = step(by_operators(module, captured, keep_all(captured.graph)), chosen)
    assert done.differs(plain) == []


def test_hooks_on_gradients_are_refused() -> None:
    """They would not run."""
    module = Small(lambda m, v: m.body(v))
    module.body.weight.register_hook(lambda gradient: 2 * gradient)
    with pytest.raises(UncapturableError, match=r"body\.weight has hooks"):
        capture(module, torch.ones(2, 4))


def test_views_belong_to_what_they_show() -> None:
    """Two operations and their backward, however many views lie between them."""
    module = Small(lambda m, v: m.body(v).view(4, 2).t()[1:].unsqueeze(0))
    graph = capture(module, torch.ones(2, 4)).graph
    assert [each.name for each in graph.operations if each.phase is Phase.FORWARD] == ["addmm"]
    assert [each.bytes for each in graph.storages if each.kind is StorageKind.ACTIVATION] == [32]


def test_backwards_are_split_by_what_depends_on_them() -> None:
    """W: nothing but weights; I: the input's gradient. Without one there is no I."""
    module = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
    split = capture(module, torch.ones(2, 4, requires_grad=True)).graph
    phases = [each.phase for each in split.operations if each.phase is not Phase.FORWARD]
    writes = {
        each.phase: {split.storages[index].kind for index in each.writes}
        for each in split.operations
    }
    assert phases.count(Phase.INPUT_GRADIENT) == 3
    assert phases.count(Phase.WEIGHT_GRADIENT) == 4
    assert writes[Phase.WEIGHT_GRADIENT] == {StorageKind.WEIGHT_GRADIENT}
    alone = capture(module, torch.ones(2, 4)).graph
    assert {each.phase for each in alone.operations} == {Phase.FORWARD, Phase.WEIGHT_GRADIENT}


def test_names_bytes_and_targets_are_the_modules() -> None:
    """Shared weights are one; statistics of a batch norm are updated; gradients are counted."""
    body = nn.Linear(4, 4)
    module = nn.Sequential(body, nn.BatchNorm1d(4), body)
    graph = capture(module, torch.ones(2, 4)).graph
    named = {each.name: each for each in graph.storages}
    assert {"0.weight", "0.bias", "1.weight", "1.running_mean"} <= set(named)
    assert "2.weight" not in named
    assert graph.gradient_bytes == sum(each.nbytes for each in module.parameters())
    updated = {name for index in graph.updated for name in graph.storages[index].targets}
    assert updated == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    added = [name for index in graph.accumulated for name in graph.storages[index].targets]
    assert sorted(added) == sorted(dict(module.named_parameters()))


def test_what_reads_a_buffer_that_changes_runs_once() -> None:
    """But for a batch norm in training, which reads it only to update it."""
    once = {
        each.name for each in capture(InPlace(), torch.ones(4, 8)).graph.operations if each.once
    }
    assert once == {"mul"}
    norm = capture(nn.BatchNorm1d(4), torch.ones(2, 4)).graph.operations
    assert not any(each.once for each in norm if "batch_norm" in each.name)


def test_dropout_between_recurrent_layers_is_there() -> None:
    """The tracer's own twin of the layer has none (torch 2.13)."""
    graph = capture(Lstm(), torch.ones(3, 5, 8)).graph
    assert [each.name for each in graph.operations if each.random] == ["native_dropout"]


def test_dropout_of_zero_costs_nothing() -> None:
    """No operation, no storage."""
    graph = capture(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0)), torch.ones(2, 4)).graph
    assert graph.forwards == 1


def test_a_call_without_memory_has_the_same_graph() -> None:
    """Weights and arguments may be fake: the same storages; times come from a roofline."""
    real = capture(Gpt(1, 32, 4, 0.1), torch.zeros(2, 16, dtype=torch.long))
    with FakeTensorMode():
        module, ids = Gpt(1, 32, 4, 0.1), torch.zeros(2, 16, dtype=torch.long)
    fake = capture(module, ids)
    assert fake.graph == real.graph
    timed = estimated(module, fake, find_device("a100")).graph
    assert (
        timed.compute_ns
        == estimated(Gpt(1, 32, 4, 0.1), real, find_device("a100")).graph.compute_ns
    )
    assert all(each.time_ns >= 4000 for each in timed.operations)
    assert judge(timed, keep_all(timed)).makespan_ns == timed.compute_ns


def test_measuring_leaves_everything_as_it_was() -> None:
    """Weights, gradients, buffers, the stream of random numbers."""
    chosen = model("resnet")
    before = {name: each.clone() for name, each in chosen.module.state_dict().items()}
    captured = capture(chosen.module, *chosen.args)
    torch.manual_seed(7)
    timed = measured(chosen.module, captured, repeats=1)
    expected = torch.Generator().manual_seed(7)
    assert torch.equal(torch.rand(3), torch.rand(3, generator=expected))
    assert all(
        torch.equal(before[name], each) for name, each in chosen.module.state_dict().items()
    )
    assert all(each.grad is None for each in chosen.module.parameters())
    assert all(each.time_ns > 0 for each in timed.graph.operations)


def test_first_gradients_are_eager_ones_too() -> None:
    """Where a parameter has none yet: same bits, same strides."""
    chosen = model("custom function")
    plain, _ = step(chosen.module, chosen, fresh=True)
    strides = [each.stride() for each in plain.gradients if each is not None]
    captured = capture(chosen.module, *chosen.args)
    module = by_operators(chosen.module, captured, keep_all(captured.graph))
    done, _ = step(module, chosen, fresh=True)
    assert done.differs(plain) == []
    assert [each.stride() for each in done.gradients if each is not None] == strides


def _counts(module: Small, value: Tensor) -> Tensor:
    module.calls = getattr(module, "calls", 0) + 1  # type: ignore[assignment]
    return module.body(value) * module.calls  # type: ignore[no-any-return, operator]


def _random(module: Small, value: Tensor) -> Tensor:
    return module.body(value) * random.random()  # type: ignore[no-any-return]


def test_draws_that_are_not_torchs_are_refused() -> None:
    """The stream of numbers stays where it was."""
    random.seed(3)
    with pytest.raises(UncapturableError, match="draws from Python's or numpy's generator"):
        capture(Small(_random), torch.ones(2, 4))
    assert random.random() == random.Random(3).random()


_STEPS = [0]


def _steps(module: Small, value: Tensor) -> Tensor:
    _STEPS[0] += 1
    return module.body(value) * _STEPS[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("does", [_counts, _steps])
def test_what_the_tracer_does_not_see_is_found_by_a_run(
    does: Callable[[Small, Tensor], Any],
) -> None:
    """Counters are baked into the graph."""
    module = Small(does)
    captured = capture(module, torch.ones(2, 4))
    with pytest.raises(UncapturableError, match="the graph gives other bits than the module"):
        check_agreement(module, captured)


class Drifts(nn.Module):
    """Says a little more with each call: no rounding, but a graph has what it said once."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.calls = nn.Linear(4, 4), 0

    def forward(self, value: Tensor) -> Tensor:
        self.calls += 1
        made: Tensor = self.body(value)
        return made * (1 + 1e-5 * self.calls)


@pytest.mark.parametrize("any_order", [False, True])
def test_a_small_drift_is_no_rounding(any_order: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor where kernels may add up in any order: with the same count the module repeats itself."""
    module = Drifts()
    captured = capture(module, torch.ones(2, 4))
    module(torch.ones(2, 4))
    monkeypatch.setattr(rehearsal_agreement, "_adds_up_in_any_order", lambda _: any_order)
    with pytest.raises(UncapturableError, match="other bits than the module"):
        check_agreement(module, captured)


@pytest.mark.parametrize(
    ("size", "any_order", "masks", "fits"),
    [
        (1e-7, True, False, True),
        (1e-7, True, True, True),
        (1e-7, False, False, False),
        (1e-2, True, False, False),
    ],
)
def test_a_module_that_does_not_repeat_its_bits_is_met_but_for_rounding(
    size: float, any_order: bool, masks: bool, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, whose kernels may add up in any order; nothing else is let through.

    Numbers that are none are in their places.
    """
    monkeypatch.setattr(rehearsal_agreement, "_adds_up_in_any_order", lambda _: any_order)
    chosen = model("resnet")
    captured = capture(chosen.module, *chosen.args)
    plain = rehearsal_agreement._by_module
    runs = count(1)

    def noisy(*given: Any) -> dict[str, Tensor | None]:
        noise, found = 1 + size * next(runs), plain(*given)
        floats = {n: x for n, x in found.items() if x is not None and x.is_floating_point()}
        return masked(found | {name: each * noise for name, each in floats.items()})

    def masked(found: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
        output = found["output 0"]
        assert output is not None
        holes = torch.zeros_like(output, dtype=torch.bool)
        holes.view(-1)[0] = masks
        return found | {"output 0": output.masked_fill(holes, -torch.inf)}

    by_operators = rehearsal_agreement._by_operators
    monkeypatch.setattr(
        rehearsal_agreement, "_by_operators", lambda *given: masked(by_operators(*given))
    )
    monkeypatch.setattr(rehearsal_agreement, "_by_module", noisy)
    fails = pytest.raises(UncapturableError, match="other bits than the module")
    with nullcontext() if fits else fails:
        check_agreement(chosen.module, captured)


@pytest.mark.parametrize("name", ["resnet", "lstm", "gpt2, tied weights", "frozen weights"])
def test_agreement_leaves_everything_as_it_was(name: str) -> None:
    """And is there."""
    chosen = model(name)
    for each in chosen.module.parameters():
        each.grad = torch.ones_like(each) if each.requires_grad else None
    before = {name: each.clone() for name, each in chosen.module.state_dict().items()}
    captured = capture(chosen.module, *chosen.args)
    torch.manual_seed(7)
    check_agreement(chosen.module, captured)
    expected = torch.Generator().manual_seed(7)
    assert torch.equal(torch.rand(3), torch.rand(3, generator=expected))
    assert all(
        torch.equal(before[name], each) for name, each in chosen.module.state_dict().items()
    )
    assert all(
        bool((each.grad == 1).all())
        for each in chosen.module.parameters()
        if each.grad is not None
    )


def test_the_sample_does_not_live_as_long_as_the_module() -> None:
    """It may be as large as the budget."""
    module, sample = nn.Linear(4, 4), torch.ones(2, 4)
    captured = capture(module, sample)
    other = by_operators(module, captured, keep_all(captured.graph))
    gone = weakref.ref(sample.untyped_storage())
    del sample, captured
    gc.collect()
    assert gone() is None
    other(torch.ones(2, 4)).sum().backward()
