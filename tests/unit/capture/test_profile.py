"""Profiling a task: the chain's fields, what is left untouched, what is refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
from torch import Tensor, nn

from pipeplan.capture import profile, profile_task, split
from pipeplan.capture.measurement.companions import companions
from pipeplan.capture.measurement.task_profile import layer_times
from pipeplan.chain import Chain
from pipeplan.errors import InputError
from pipeplan.task import Task
from tests.capture_tasks import conv, gpt2, mlp, sgd

quick = partial(profile_task, repeats=1, warmup=0)


@functools.cache
def short_gpt2() -> Chain:
    """One block."""
    return quick(gpt2(blocks=1))


TASK_FILE = """
import torch
from torch import nn
from pipeplan.task import Task

def task(seed=0):
    return Task(
        model=nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)),
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        data=lambda microbatch: (torch.ones(8, 4), torch.ones(8, 1)),
    )

def failing(seed=0):
    raise RuntimeError("no data here")

def printing(seed=0):
    print("making the model")
    return task(seed)
"""


@pytest.fixture
def reference(tmp_path: Path) -> str:
    """A task in a file."""
    path = tmp_path / "small_task.py"
    path.write_text(TASK_FILE, encoding="utf-8")
    return f"{path}:task"


def test_profile_of_a_reference(reference: str) -> None:
    """The chain names its task, its digest and how it was measured, and survives its file."""
    lines: list[str] = []
    chain = profile(reference, repeats=3, warmup=1, progress=lines.append)
    assert chain.task == reference
    assert chain.name == "small_task:task"
    assert chain.mode == "measured"
    assert chain.microbatch_size == 8
    assert chain.device["threads"] == 1
    assert chain.device["repeats"] == 3
    assert chain.device["torch"] == torch.__version__
    assert all(layer.forward_ns > 0 and layer.backward_ns > 0 for layer in chain.layers)
    assert all((layer.forward_light_ns or 0) > 0 for layer in chain.layers)
    assert any("3 of 3" in line for line in lines)
    assert Chain.from_json(chain.to_json()) == chain


def test_digest_is_that_of_the_split_model() -> None:
    """What `launch` compares is what `profile` wrote."""
    assert short_gpt2().task_digest == split(gpt2(blocks=1)).digest()


def test_digest_tells_what_is_trained() -> None:
    """Frozen parameters have no gradients and no states, which a plan counts on."""
    rows = torch.ones(4, 3), torch.ones(4, 3)

    def digest(*, trained: bool, rounds: bool = False) -> str:
        first = nn.Linear(3, 3).requires_grad_(trained)
        layers = [nn.Linear(3, 3), Rounds() if rounds else nn.ReLU(), first]
        model = nn.Sequential(*layers)
        return split(replace(mlp(), model=model, data=lambda _: rows)).digest()

    digests = [digest(trained=True), digest(trained=False), digest(trained=True, rounds=True)]
    assert len(set(digests)) == 3


class Rounds(nn.Module):
    """Hands on no gradient."""

    def forward(self, value: Tensor) -> Tensor:
        return value.detach().round()


def test_threads_are_given_back(reference: str) -> None:
    """The profile's thread count does not outlive it."""
    before = torch.get_num_threads()
    profile(reference, repeats=1, warmup=0, threads=before + 1)
    assert torch.get_num_threads() == before


def test_profile_beside_companions(reference: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Companions run while the profile does, and none is left behind.

    What a task prints is nothing that a companion says to the profile.
    """
    before = psutil.Process().children()
    printing = reference.replace(":task", ":printing")
    chain = profile(printing, repeats=2, warmup=0, companions=1)
    assert chain.device["companions"] == 1
    assert psutil.Process().children() == before
    out, err = capfd.readouterr()
    assert out == "making the model\n", "the profile's own task prints, too"
    assert "making the model" in err


def test_companions_that_fail_are_reported(reference: str) -> None:
    """A companion that cannot load the task ends the profile with one message."""
    broken = reference.replace(":task", ":failing")
    with (
        pytest.raises(InputError, match=r"companion process .* ended with code 1"),
        companions(1, broken, seed=0, threads=1),
    ):
        pass


@pytest.mark.parametrize("name", ["repeats", "threads", "warmup", "companions"])
def test_refuses_arguments_out_of_range(name: str, reference: str) -> None:
    """No argument is silently replaced."""
    with pytest.raises(InputError, match=f"{name}: got -1"):
        profile(reference, **{name: -1})  # type: ignore[arg-type]


def test_refuses_other_devices() -> None:
    """Only the processor is measured, and that is said."""
    model = nn.Sequential(nn.Linear(4, 1, device="meta"))
    rows = torch.ones(8, 4, device="meta"), torch.ones(8, 1, device="meta")
    task = replace(mlp(), model=model, data=lambda _: rows)
    with pytest.raises(InputError, match="on meta, need cpu or cuda"):
        quick(task)


def test_refuses_an_optimizer_that_cannot_step() -> None:
    """An optimizer that needs a closure cannot be used by the runtime."""
    task = replace(mlp(), optimizer=lambda parameters: torch.optim.LBFGS(parameters))
    with pytest.raises(InputError, match="optimizer: failed"):
        quick(task)


def test_model_is_left_as_it_was() -> None:
    """Weights, running statistics and random state are unchanged; no gradient stays."""
    torch.manual_seed(0)
    task = replace(conv(), data=lambda _: (torch.ones(4, 3, 16, 16), torch.ones(4).long()))
    assert isinstance(task.model, nn.Sequential)
    before = {name: value.clone() for name, value in task.model.state_dict().items()}
    random = torch.random.get_rng_state()
    quick(task)
    assert torch.equal(random, torch.random.get_rng_state())
    for name, value in task.model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all(parameter.grad is None for parameter in task.model.parameters())


def test_tied_weight_counts_once_and_is_named_twice() -> None:
    """One GPU holds both layers and the weight once, so one layer counts its bytes."""
    plain, tied = short_gpt2(), quick(gpt2(tied=True, blocks=1))
    head, embedding = tied.layers[-1], tied.layers[0]
    assert set(embedding.parameters) & set(head.parameters) == {"transformer.wte.weight"}
    assert embedding.weight_bytes == plain.layers[0].weight_bytes
    assert embedding.optimizer_bytes == plain.layers[0].optimizer_bytes
    table = 64 * 32 * 4
    assert plain.layers[-1].weight_bytes - head.weight_bytes == table


def test_frozen_weights_and_buffers_are_kept_once() -> None:
    """They have one version and no gradient: they count beside the optimizer's state."""
    model = nn.Sequential(
        nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)
    )
    task = Task(
        model=model,
        loss=nn.functional.mse_loss,
        optimizer=sgd,
        data=lambda _: (torch.ones(8, 4), torch.ones(8, 1)),
    )
    frozen, linear, norm, _ = quick(task).layers
    size = (4 * 4 + 4) * 4
    assert (frozen.weight_bytes, frozen.gradient_bytes, frozen.optimizer_bytes) == (0, 0, size)
    assert (linear.weight_bytes, linear.gradient_bytes, linear.optimizer_bytes) == (size,) * 3
    buffers = 2 * 4 * 4 + 8
    assert norm.optimizer_bytes == norm.weight_bytes + buffers
    assert frozen.output_gradient_bytes == 0
    assert frozen.optimizer_ns == 0


def test_integer_boundaries_send_no_gradient() -> None:
    """A boundary of a float and an integer tensor sends only the float one's gradient back."""

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, value: Tensor) -> tuple[Tensor, Tensor]:
            hidden = self.linear(value)
            return hidden, hidden.argmax(1)

    class Tail(nn.Module):
        def forward(self, hidden: Tensor, index: Tensor) -> Tensor:
            return hidden.gather(1, index.unsqueeze(1))

    task = replace(
        mlp(), model=[Head(), Tail()], data=lambda _: (torch.ones(8, 4), torch.ones(8, 1))
    )
    first, _ = quick(task).layers
    assert first.output_bytes == 8 * 4 * 4 + 8 * 8
    assert first.output_gradient_bytes == 8 * 4 * 4


def test_tables_made_once_are_no_cost_of_a_micro_batch() -> None:
    """What a layer makes at its first call and keeps is not counted as saved."""

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.cache: Tensor | None = None

        def forward(self, value: Tensor) -> Tensor:
            if self.cache is None:
                self.cache = torch.ones(1000, 4)
            return self.linear(value) + self.cache[: len(value)]

    task = replace(mlp(), model=[Table(), nn.Linear(4, 1)])
    task = replace(task, data=lambda _: (torch.ones(8, 4), torch.ones(8, 1)))
    assert quick(task).layers[0].saved_bytes == 0


def test_times_are_medians_and_noise_tells_of_slow_rounds() -> None:
    """A few slow micro-batches leave no trace; by how much whole rounds are slower is told."""
    slowdown = [3] * 5 + [1, 1, 9, 1, 1] + [2] * 5

    def swept(number: int) -> tuple[list[int], list[int]]:
        return [10 * slowdown[number], 20 * slowdown[number]], [30 * slowdown[number], 40]

    found, noise = layer_times(swept, 15, 0, print)
    assert found == ([20, 40], [60, 40])
    assert noise == pytest.approx((20 + 40 + 60 + 40) / 100 - 1)


class InPlace(nn.Module):
    """Works on its input where it lies."""

    def forward(self, value: Tensor) -> Tensor:
        """Same shape."""
        return value.sub_(0.5) * value


class Fading(nn.Module):
    """Changes a buffer that autograd keeps."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(4))

    def forward(self, value: Tensor) -> Tensor:
        """Same shape."""
        self.scale.mul_(0.99)
        return value * self.scale


class KeepsItsOutput(nn.Module):
    """As models do whose attention is looked at later."""

    last: Tensor

    def forward(self, value: Tensor) -> Tensor:
        """Same shape."""
        self.last = torch.tanh(value)
        return self.last


def halved_target(output: Tensor, target: Tensor) -> Tensor:
    """A loss that works on the target where it lies."""
    return ((output * target.mul_(0.5)) ** 2).mean()


@pytest.mark.parametrize(
    ("first", "inner", "loss"),
    [
        (InPlace(), nn.ReLU(), nn.functional.mse_loss),
        (nn.Linear(4, 4), Fading(), nn.functional.mse_loss),
        (nn.Linear(4, 4), KeepsItsOutput(), nn.functional.mse_loss),
        (nn.Linear(4, 4), nn.ReLU(), halved_target),
    ],
)
def test_layers_that_change_what_they_are_given(
    first: nn.Module, inner: nn.Module, loss: Callable[[Tensor, Tensor], Tensor]
) -> None:
    """They are measured, with one micro-batch in flight where a second one is in the way."""
    layers = [first, nn.Linear(4, 4), inner, nn.Linear(4, 4)]
    rows = torch.ones(8, 4), torch.ones(8, 4)
    found = quick(Task(model=layers, loss=loss, optimizer=sgd, data=lambda _: rows), repeats=3)
    assert all(layer.forward_ns > 0 and layer.backward_ns >= 0 for layer in found.layers)
    assert all(layer.saved_bytes >= 0 for layer in found.layers)


class ItsOwnLoss(nn.Module):
    """A model that computes its loss; an empty tensor comes along."""

    def forward(self, value: Tensor, empty: Tensor) -> Tensor:
        """One number."""
        return value.square().mean() + empty.sum()


class WithNothing(nn.Module):
    """Passes an empty tensor on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, value: Tensor, empty: Tensor) -> tuple[Tensor, Tensor]:
        """Both."""
        return self.inner(value), empty


def test_a_loss_or_an_empty_tensor_that_is_handed_on_rides_nowhere() -> None:
    """The last layer gives the loss as it came; a tensor without elements has no bytes."""
    rows = torch.ones(8, 4), torch.ones(0)
    layers = [WithNothing(), WithNothing(), ItsOwnLoss(), nn.Identity()]
    task = Task(
        model=layers,
        loss=lambda output, _: output,
        optimizer=sgd,
        data=lambda _: (rows, None),
    )
    assert not any(layer.riding for layer in quick(task).layers)
