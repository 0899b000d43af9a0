"""A layer that does something else when it is computed again is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pipeplan.capture import profile_task
from pipeplan.errors import InputError
from pipeplan.plan import Remat, Semantics
from pipeplan.runtime.stages.second_forward import SecondForward
from pipeplan.task import Task
from pipeplan.testing import reference
from tests import pipelines
from tests.capture_tasks import sgd


class Asking(nn.Linear):
    """Another function where autograd records nothing."""

    def forward(self, rows: Tensor) -> Tensor:
        made = super().forward(rows)
        return made if torch.is_grad_enabled() else 0.9 * made


class Counting(nn.Linear):
    """Another function at every call."""

    calls = 0

    def forward(self, rows: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(rows) * self.calls


class Hooked(nn.Linear):
    """Halves the gradient of its output."""

    guarded = True

    def forward(self, rows: Tensor) -> Tensor:
        made = super().forward(rows)
        if made.requires_grad or not self.guarded:
            made.register_hook(lambda gradient: 0.5 * gradient)
        return made


class Unguarded(Hooked):
    guarded = False


def trained(kind: type[nn.Module], semantics: Semantics) -> pipelines.Outcome:
    """Two ranks train four layers, of which the third and fourth are computed again."""
    torch.manual_seed(7)
    layers = [nn.Linear(6, 6), nn.Linear(6, 6), kind(6, 6), nn.Linear(6, 3)]  # type: ignore[call-arg]
    split, task = pipelines.split_by_hand(layers, "sgd")
    plan = pipelines.plan_of([1], [0, 1], semantics, 4, layers=4)
    last = plan.stages[1].model_copy(update={"remat": Remat(recompute=((2, 3),))})
    plan = plan.model_copy(update={"stages": (plan.stages[0], last)})
    return pipelines.train(plan, pipelines.pattern_of(plan, period=2), split, task, 2)


@pytest.mark.parametrize("semantics", ["flush", "2bw"])
@pytest.mark.parametrize("kind", [Asking, Counting])
def test_another_function_is_refused(kind: type[nn.Module], semantics: Semantics) -> None:
    """It trained on gradients of a forward whose loss nobody saw."""
    with pytest.raises(InputError, match=rf"layers 2 to 3 \({kind.__name__}, Linear\): got other"):
        trained(kind, semantics)


@pytest.mark.parametrize("semantics", ["flush", "2bw"])
def test_hooks_of_the_second_forward_count(semantics: Semantics) -> None:
    """As in one process, though the first forward has nothing to register them on."""
    torch.manual_seed(7)
    layers = [nn.Linear(6, 6), nn.Linear(6, 6), Hooked(6, 6), nn.Linear(6, 3)]
    split, task = pipelines.split_by_hand(layers, "sgd")
    expected = reference.train(semantics, split, task, 2, 4, 3)
    outcome = trained(Hooked, semantics)
    assert outcome.losses == expected.losses
    assert all(torch.equal(outcome.weights[n], v) for n, v in expected.weights.items())


def test_hooks_without_autograd_are_refused() -> None:
    """Where they are registered in any case, a profile says how to do it."""
    rows = torch.ones(8, 4)
    model = nn.Sequential(nn.Linear(4, 4), Unguarded(4, 4))
    task = Task(
        model=model, loss=nn.functional.mse_loss, optimizer=sgd, data=lambda _: (rows, rows)
    )
    with pytest.raises(InputError, match=r"Register it `if tensor\.requires_grad`"):
        profile_task(task, repeats=1, warmup=0)


def test_outputs_of_8_bits_are_not_compared() -> None:
    """Torch cannot sum them up; outputs of more bits beside them are compared."""
    second, rows = SecondForward("layers 0 to 1"), torch.ones(3)
    second.made(0, [rows.to(torch.float8_e4m3fn), rows])
    second.check(0, [rows.to(torch.float8_e4m3fn), rows])
    with pytest.raises(InputError, match="layers 0 to 1: got other outputs"):
        second.check(0, [rows.to(torch.float8_e4m3fn), 2 * rows])
