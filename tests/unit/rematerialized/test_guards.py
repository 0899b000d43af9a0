"""What would make a rematerialized module differ from the plain one is followed or refused."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeplan.errors import InputError
from pipeplan.livebytes import LiveBytes
from pipeplan.rematerialized import layers, timing
from tests import grids, odd_models
from tests.lean_modules import LOSS, SAMPLE, by_layers, exported, lean, row, source


def left_by(module: nn.Module, around: AbstractContextManager[Any] | None = None) -> list[Tensor]:
    """Gradients and buffers of one call, whose backward runs inside of `around`."""
    loss = LOSS(module(source()), SAMPLE[1])
    with around or nullcontext():
        loss.backward()
    gradients = [parameter.grad for parameter in module.parameters()]
    found = [gradient for gradient in gradients if gradient is not None]
    assert len(found) == len(gradients)
    return [*found, *module.buffers()]


def there_and_back(module: nn.Module) -> None:
    """Puts other tensors in the place of all buffers."""
    module.double()
    module.float()


def other_statistics(module: nn.Module) -> None:
    """As users reset them."""
    for each in module.modules():
        if isinstance(each, nn.BatchNorm1d):
            each.running_mean = torch.full((16,), 0.5)


@pytest.mark.parametrize("change", [there_and_back, other_statistics])
def test_running_statistics_follow_the_buffers(change: Callable[[nn.Module], None]) -> None:
    """Statistics are updated once where buffers were replaced after the module was planned."""
    module = lean(row())
    plain = row()
    change(module)
    change(plain)
    assert all(map(torch.equal, left_by(module), left_by(plain)))


def assigned(module: nn.Module) -> None:
    """New parameters and buffers."""
    values = {name: value.clone() for name, value in module.state_dict().items()}
    module.load_state_dict(values, assign=True)


def new_weight(module: nn.Module) -> None:
    """In the first block."""
    block = next(each for each in module.modules() if isinstance(each, nn.Linear))
    block.weight = nn.Parameter(block.weight.detach().clone())


def new_head(module: nn.Module) -> None:
    """The last child."""
    name, _ = list(module.named_children())[-1]
    setattr(module, name, nn.Linear(8, 8))


def one_more(module: nn.Module) -> None:
    """A child that was not there."""
    module.add_module("more", nn.Linear(8, 8))


@grids.each_value(
    change={each.__name__: each for each in (assigned, new_weight, new_head, one_more)},
    build={"exported": exported, "row": row},
)
def test_replaced_parts_are_refused(
    build: Callable[[], nn.Module], change: Callable[[nn.Module], None]
) -> None:
    """Nothing is computed with, or trained on, what the module does not have any more."""
    module = lean(build())
    waiting = LOSS(module(source()), SAMPLE[1])
    change(module)
    with pytest.raises(InputError, match="was replaced"):
        module(source())
    with pytest.raises(InputError, match="was replaced"):
        waiting.backward()


@pytest.mark.parametrize("change", [there_and_back, other_statistics])
def test_replaced_buffers_of_an_exported_module_are_refused(
    change: Callable[[nn.Module], None],
) -> None:
    """Its layers hold the old ones."""
    module = lean(exported())
    change(module)
    with pytest.raises(InputError, match="running_mean: was replaced"):
        module(source())


@pytest.mark.parametrize("build", [row, exported])
def test_backward_under_autocast_is_the_plain_modules(build: Callable[[], nn.Module]) -> None:
    """Layers run again as in the forward, backwards as in the caller's."""
    casts = torch.autocast("cpu", torch.bfloat16)
    found = left_by(lean(build()), casts)
    assert all(map(torch.equal, found, left_by(build(), casts)))


class Weighted(nn.Module):
    """A loss with a weight and a count."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.count = nn.Buffer(torch.zeros(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        """Counts calls."""
        self.count.add_(1)
        return self.weight * LOSS(output, target)


@pytest.mark.parametrize("given", [None, torch.full((), 3.0)])
def test_the_loss_and_the_target_are_left_as_they_were(given: Tensor | None) -> None:
    """Their gradients and buffers know nothing of the measuring."""
    loss, target = Weighted(), torch.zeros(64, 8, requires_grad=True)
    loss.weight.grad = given if given is None else given.clone()
    kept = loss.weight.grad
    by_layers(row(), (SAMPLE[0], target), "1GiB", loss=loss, repeats=1)
    assert target.grad is None
    assert loss.count == 0
    assert loss.weight.grad is kept
    assert kept is None or kept == given


def test_hooks_that_step_are_refused() -> None:
    """Measuring would train the module; behind it they run as they do in the plain one."""

    def step(parameter: Tensor) -> None:
        with torch.no_grad():
            parameter.sub_(parameter.grad if parameter.grad is not None else 0)
        parameter.grad = None

    module = row()
    hook = next(module.parameters()).register_post_accumulate_grad_hook(step)
    before = [parameter.detach().clone() for parameter in module.parameters()]
    with pytest.raises(InputError, match=r"0\.0\.weight: has a hook"):
        by_layers(module, SAMPLE, "1GiB", loss=LOSS, repeats=1)
    assert all(map(torch.equal, before, module.parameters()))
    hook.remove()
    small, plain = lean(module), row()
    for each in (small, plain):
        for parameter in each.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        LOSS(each(source()), SAMPLE[1]).backward()
    assert all(map(torch.equal, small.parameters(), plain.parameters()))


def test_an_input_that_changes_before_the_backward_is_refused() -> None:
    """Layers that run again would see the new one."""
    module, given = lean(row()), source()
    loss = module(given).sum()
    given.zero_()
    with pytest.raises(InputError, match="input changed between"):
        loss.backward()


class Scaled(nn.Module):
    """Multiplies by a buffer, which it may change."""

    def __init__(self, scale: Tensor, growth: float) -> None:
        super().__init__()
        self.register_buffer("scale", scale)
        self.growth = growth

    def forward(self, value: Tensor) -> Tensor:
        """Changes it behind its use."""
        scale = self.get_buffer("scale")
        value = value * scale.clone()
        if self.growth != 1:
            scale.mul_(self.growth)
        return value


def test_a_buffer_that_changes_before_the_backward_is_refused() -> None:
    """One that no forward changes: layers that run again would see other values."""
    module = lean(row(lambda: Scaled(torch.ones(()), 1)))
    loss = module(source()).sum()
    next(each for each in module.modules() if isinstance(each, Scaled)).get_buffer("scale").zero_()
    with pytest.raises(InputError, match="buffers changed between"):
        loss.backward()


def test_a_buffer_that_another_layer_changes_is_kept() -> None:
    """A layer that only reads it sees the same value when it runs again."""

    def build() -> nn.Module:
        scale, growths = torch.ones(()), iter([1, 1, 2])
        return row(lambda: Scaled(scale, next(growths)))

    assert all(map(torch.equal, left_by(lean(build())), left_by(build())))


class Following(nn.Module):
    """A frozen mean that follows what comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(8), requires_grad=False)

    def forward(self, value: Tensor) -> Tensor:
        """Without the mean."""
        with torch.no_grad():
            self.mean.mul_(0.75).add_(0.25 * value.mean(0))
        return value - self.mean


@pytest.mark.parametrize("budget", ["1GiB", None])
@pytest.mark.parametrize("build", [row, exported])
def test_frozen_parameters_that_forwards_move(
    build: Callable[..., nn.Module], budget: str | None
) -> None:
    """Planning leaves them, layers that run again move them once, also of two forwards at once."""
    module, plain = build(Following), build(Following)
    planned = lean(module) if budget is None else by_layers(module, SAMPLE, budget, loss=LOSS)
    assert all(map(torch.equal, module.state_dict().values(), plain.state_dict().values()))
    for each in (planned, plain):
        losses = [LOSS(each(source() + number), SAMPLE[1]) for number in range(2)]
        for loss in losses:
            loss.backward()
    for got, expected in zip(module.parameters(), plain.parameters(), strict=True):
        assert torch.equal(got, expected)
        if expected.grad is not None:
            assert got.grad is not None
            assert torch.equal(got.grad, expected.grad)


def test_a_dropped_module_is_gone_at_once() -> None:
    """No cycle keeps its weights until the collector runs."""
    module = lean(row())
    LOSS(module(source()), SAMPLE[1]).backward()
    weight = weakref.ref(next(module.parameters()))
    gc.collect()
    gc.disable()
    try:
        del module
        assert weight() is None
    finally:
        gc.enable()


def test_gradients_that_are_there_are_not_replaced_while_measuring() -> None:
    """They are the ones that are added to, so that a device does not hold them twice."""
    seen = []

    class Look(nn.Module):
        def forward(self, value: Tensor) -> Tensor:
            seen.append(weight.grad)
            return value * 1

    module = row(Look)
    weight = next(module.parameters())
    weight.grad = torch.full_like(weight, 2.0)
    given = weight.grad
    by_layers(module, SAMPLE, "1GiB", loss=LOSS, repeats=1)
    assert all(each is given for each in seen)
    assert weight.grad is given
    assert torch.equal(given, torch.full_like(weight, 2.0))


@pytest.mark.parametrize("draw", [odd_models.LayerDrop, odd_models.NumpyNoise])
def test_draws_of_python_are_refused(draw: type[nn.Module]) -> None:
    """A second forward would draw other numbers, or every forward the same ones."""
    module, sample = nn.Sequential(draw(), nn.Linear(6, 6)), torch.ones(4, 6)
    with pytest.raises(InputError, match=r"rematerialize: module '0' draws from .*torch.rand"):
        by_layers(module, (sample, sample), "1GiB", loss=LOSS, repeats=1)


def test_the_rehearsal_holds_the_budget_and_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the budget only copies of buffers and of gradients that were there."""
    module = row()
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    states = [*module.parameters(), *gradients, *module.buffers()]
    live, peaks = LiveBytes([*states, *SAMPLE]), []

    def watched(*given: Any) -> Any:
        live.reset_peak()
        result = timing.rehearsed(*given)
        peaks.append(live.peak)
        return result

    monkeypatch.setattr(layers, "rehearsed", watched)
    with live:
        planned: Any = lean(module)
    copies = sum(each.nbytes for each in [*gradients, *module.buffers()])
    assert max(peaks) <= planned.rematerialization.outcome.peak_bytes + copies


class Adjacent(nn.Module):
    """A sparse buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.adjacent = nn.Buffer(2 * torch.eye(8).to_sparse())

    def forward(self, value: Tensor) -> Tensor:
        """A matrix product."""
        result: Tensor = (self.adjacent @ value.T).T.contiguous()
        return result


@pytest.mark.parametrize("options", [{}, {"offload": True, "host_bandwidth": "1GB/s"}])
def test_sparse_buffers(options: dict[str, Any]) -> None:
    """They are compared, kept and counted as others are."""
    found, expected = left_by(lean(row(Adjacent), **options)), left_by(row(Adjacent))
    for first, second in zip(found, expected, strict=True):
        assert torch.equal(first.to_dense(), second.to_dense())


class Replaces(nn.Module):
    """A mean that is a new tensor each time."""

    def __init__(self) -> None:
        super().__init__()
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, value: Tensor) -> Tensor:
        """Without the mean."""
        self.mean = 0.5 * self.mean + 0.5 * value.detach().mean(0)
        return value - self.mean


def test_buffers_that_a_forward_replaces_are_refused() -> None:
    """Running the layer again would update them twice; the module is left as it was."""
    module = row(Replaces)
    before = list(module.buffers())
    with pytest.raises(InputError, match="'mean': its layer's forward replaces it"):
        by_layers(module, SAMPLE, "1GiB", loss=LOSS, repeats=1)
    assert all(a is b for a, b in zip(before, module.buffers(), strict=True))
    assert all(torch.equal(mean, torch.zeros(8)) for mean in before if mean.shape == (8,))


def test_a_copy_is_a_module_of_its_own() -> None:
    """A deep copy trains its own parameters and looks at its own parts."""
    module = lean(exported())
    other = copy.deepcopy(module)
    new_head(module)
    assert all(map(torch.equal, left_by(other), left_by(exported())))
    new_head(other)
    with pytest.raises(InputError, match="was replaced"):
        other(source())
