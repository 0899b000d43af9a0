"""How far layers train as their model does is measured, kept in the chain, and told."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeplan.capture import agreement, profile_task, split
from pipeplan.capture.tensor_distance import largest_difference, largest_size
from pipeplan.capture.user_model.module_attributes import AttributeSnapshot, restored
from pipeplan.chain import Agreement
from pipeplan.errors import InputError
from pipeplan.split_model import SplitModel
from pipeplan.task import Task
from tests import capture_tasks, odd_models, pipelines


class Scaled(nn.Module):
    """A linear layer that an error can be built into."""

    def __init__(self, layer: nn.Module, *, output: float = 1.0, gradient: float = 1.0) -> None:
        super().__init__()
        self.layer, self.output, self.gradient = layer, output, gradient

    def forward(self, value: Tensor) -> Tensor:
        made = self.layer(value) * self.output
        return made * self.gradient - (made * self.gradient - made).detach()


def spoiled(task: Task, **errors: float) -> SplitModel:
    """The split of `task` with an error in its first layer."""
    model = split(task)
    return replace(model, layers=(Scaled(model.layers[0], **errors), *model.layers[1:]))


def mlp() -> Task:
    """Three listed layers."""
    torch.manual_seed(0)
    return Task(
        model=nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)),
        loss=functional.mse_loss,
        optimizer=capture_tasks.sgd,
        data=lambda n: (torch.full((4, 6), n / 10), torch.ones(4, 3)),
    )


def test_equal_layers_agree_bit_for_bit() -> None:
    """A profile says so in the chain, and that three micro-batches were compared."""
    chain = profile_task(mlp(), repeats=1, warmup=0)
    assert chain.agreement == Agreement(microbatches=3, largest_relative_difference=0)
    assert chain.doubt is None


def test_a_wrong_gradient_is_refused() -> None:
    """Though outputs are equal: ten times the gradient, its negative, none."""
    task = mlp()
    for factor in (10.0, -1.0, 0.0):
        wrong = spoiled(task, gradient=factor)
        with pytest.raises(InputError, match=r"the gradient of '0\.(weight|bias)' differs by"):
            agreement(wrong, task)


def test_a_wrong_output_is_refused() -> None:
    """One percent is more than rounding."""
    task = mlp()
    with pytest.raises(InputError, match="the output differs by"):
        agreement(spoiled(task, output=1.01), task)


class ReadTwice(nn.Module):
    """Writes into what its backward needs."""

    def forward(self, value: Tensor) -> Tensor:
        made = torch.sigmoid(value)
        made.mul_(2)
        return made * 1


class Failing(odd_models.Reverse):
    """The identity, without a backward."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ValueError("no backward.")


class FailsBackward(nn.Module):
    """Applies it."""

    def forward(self, value: Tensor) -> Tensor:
        return Failing.apply(value)


class NotAsAWhole(nn.Sequential):
    """Its members run, itself it does not."""

    def forward(self, value: Tensor) -> Tensor:
        raise ValueError("not as a whole")


def numbered(number: int) -> tuple[Tensor, Tensor]:
    """Data whose targets are the micro-batch's number."""
    return torch.ones(4, 6), torch.full((4, 3), float(number))


def failing_later(made: Tensor, target: Tensor) -> Tensor:
    """A loss that knows the first micro-batch only."""
    if target.flatten()[0] > 0:
        raise KeyError("target")
    return functional.mse_loss(made, target)


@pytest.mark.parametrize(
    ("middle", "message"),
    [
        (
            ReadTwice(),
            r"task: model Sequential: its backward fails on data\(0\): RuntimeError: one of"
            r".*inplace.*\. Check that a loop",
        ),
        (
            FailsBackward(),
            r"its backward fails on data\(0\) at test_agreement\.py:\d+ \(backward\):"
            r" ValueError: no backward\. Check that a loop",
        ),
    ],
)
def test_a_backward_that_fails_is_the_users(middle: nn.Module, message: str) -> None:
    """The message names the model, the micro-batch and the user's line."""
    task = replace(mlp(), model=nn.Sequential(nn.Linear(6, 6), middle, nn.Linear(6, 3)))
    with pytest.raises(InputError, match=message):
        agreement(split(task), task)


def test_a_loss_or_a_model_that_fails_is_the_users() -> None:
    """Both on a micro-batch that the split has not seen."""
    task = replace(mlp(), data=numbered)
    later = replace(task, loss=failing_later)
    with pytest.raises(InputError, match=r"task: loss fails on data\(1\) at .*: KeyError: 'tar"):
        agreement(split(later), later)
    whole = replace(task, model=NotAsAWhole(*task.model))
    with pytest.raises(InputError, match=r"model NotAsAWhole: its forward fails on data\(0\) at"):
        agreement(split(task), whole)


def test_memory_that_runs_out_has_a_next_step() -> None:
    """No loop without pipeplan would do better."""

    def large(output: Tensor, target: Tensor) -> Tensor:
        if target[0, 0] == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return nn.functional.mse_loss(output, target)

    task = replace(mlp(), data=numbered, loss=large)
    with pytest.raises(InputError, match=r"2\.00 GiB\. A profile needs .* --mode fake --device"):
        agreement(split(task), task)


def test_a_layer_whose_backward_fails_is_named() -> None:
    """Where that of the model does not."""
    task = mlp()
    model = split(task)
    broken = replace(
        model, layers=(nn.Sequential(model.layers[0], FailsBackward()), *model.layers[1:])
    )
    with pytest.raises(InputError, match=r"layer '0:Linear': its backward fails on data\(0\)"):
        agreement(broken, task)


def test_both_parts_of_complex_numbers_are_compared() -> None:
    """A difference in the imaginary part alone is one."""
    assert largest_difference(torch.tensor([3 + 4j]), torch.tensor([3 + 2j])) == 2
    assert largest_size(torch.tensor([3 + 4j])) == 5


class Late(nn.Module):
    """A buffer that the first forward fills."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", None)

    def forward(self, value: Tensor) -> Tensor:
        self.mean = value.detach().mean(0) if self.mean is None else self.mean
        return value - self.mean


def test_a_buffer_that_comes_later_is_refused() -> None:
    """No checkpoint could put it back; the profile says so, and a run that had none."""
    task = replace(mlp(), model=nn.Sequential(nn.Linear(6, 6), Late(), nn.Linear(6, 3)))
    with pytest.raises(InputError, match=r"buffer '1\.mean' has no tensor before the first"):
        profile_task(task, repeats=1, warmup=0)
    model, task = pipelines.split_by_hand([nn.Linear(6, 6), Late(), nn.Linear(6, 3)], "sgd")
    plan = pipelines.plan_of([], [0], "flush", 2, layers=3)
    with pytest.raises(InputError, match="stage 0: buffer 'mean' has come since"):
        pipelines.train(plan, pipelines.pattern_of(plan, period=2), model, task, 1)


def test_rounding_is_measured_and_told() -> None:
    """A few units in the last place may be; the chain's doubt names how many."""
    task = mlp()
    found = agreement(spoiled(task, output=1 + 4e-7), task)
    assert 1e-8 < found.largest_relative_difference < 1e-5
    assert found.repeats
    chain = profile_task(task, repeats=1, warmup=0).model_copy(update={"agreement": found})
    assert "only up to rounding" in (chain.doubt or "")


def test_a_model_that_does_not_repeat_its_bits_is_told_of() -> None:
    """Layers cannot do better; the doubt says whose rounding it is."""
    runs = count(1)

    def noisy(gradient: Tensor) -> Tensor:
        return gradient * (1 + 1e-6 * next(runs))

    task = mlp()
    assert isinstance(task.model, nn.Module)
    next(task.model.parameters()).register_hook(noisy)
    found = agreement(split(task), task)
    assert not found.repeats
    assert 0 < found.largest_relative_difference < 2e-5
    assert "as the model itself repeats its bits only up to rounding" in found.told


def test_a_data_set_may_be_short() -> None:
    """What is compared are the micro-batches there are."""

    def data(number: int) -> tuple[Tensor, Tensor]:
        return [(torch.ones(4, 6), torch.ones(4, 3))][number]

    task = replace(mlp(), data=data)
    assert agreement(split(task), task).microbatches == 1


def test_the_model_is_left_as_it_was() -> None:
    """Gradients, buffers, attributes and random states are the user's."""

    class Counting(nn.BatchNorm1d):
        calls = 0

        def forward(self, value: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(value)

    model = nn.Sequential(nn.Linear(6, 6), Counting(6), nn.Dropout(0.5), nn.Linear(6, 3))
    task = replace(mlp(), model=model, data=lambda n: (torch.randn(4, 6), torch.ones(4, 3)))
    model[0].weight.grad = torch.ones(6, 6)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    task = replace(task, data=lambda n: (torch.full((4, 6), float(n)), torch.ones(4, 3)))
    agreement(split(task), task)
    assert torch.equal(torch.get_rng_state(), state)
    assert "calls" not in model[1].__dict__
    assert torch.equal(model[0].weight.grad, torch.ones(6, 6))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    "middle",
    [odd_models.Teacher(), odd_models.WatchedTeacher()],
    ids=lambda middle: type(middle).__name__,
)
@pytest.mark.parametrize("whole", [odd_models.Odd, nn.Sequential])
def test_frozen_parameters_that_a_forward_moves_are_put_back(
    whole: Callable[[nn.Module], nn.Module], middle: nn.Module
) -> None:
    """Whether a fake pass or a real one shows it first."""
    model = whole(middle)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    task = replace(mlp(), model=model, loss=lambda made, _: made.square().mean())
    cut = split(task)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert agreement(cut, task).is_exact
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_containers_of_a_module_are_put_back() -> None:
    """Lists, dictionaries and what is in them; they stay the same objects."""
    module = nn.Identity()
    module.rows = rows = [1, (2, 3)]
    module.table = table = {"a": [1], "b": {"c": 2}}
    with restored([module]):
        attributes = AttributeSnapshot([module])
        assert attributes.changed() == []
        module.rows.append(4)
        module.table["a"].append(2)
        module.table["b"]["c"] = 3
        module.new = 1
        assert sorted(key for _, key in attributes.changed()) == ["new", "rows", "table"]
    assert module.rows is rows
    assert module.table is table
    assert rows == [1, (2, 3)]
    assert table == {"a": [1], "b": {"c": 2}}
    assert not hasattr(module, "new")


class Clock:
    """Knows another one, and a table."""

    def __init__(self, other: Clock | None = None) -> None:
        self.ticks, self.other, self.table = 0, other or self, {"ticks": 0}

    def tick(self) -> None:
        """Counts, also in a new attribute and in the table."""
        self.ticks += 1
        self.table["ticks"] = self.late = self.ticks


def test_objects_of_the_users_are_put_back() -> None:
    """Whatever leads to them, a circle, too; what the user has from others is left alone."""
    module, inner, shown = nn.Identity(), Clock(), threading.Event()
    module.clocks, module.shown = [Clock(inner)], shown
    (clock,) = module.clocks
    with restored([module]):
        attributes = AttributeSnapshot([module])
        inner.tick()
        clock.other = Clock()
        shown.set()
        assert not attributes.untouched()
        assert sorted(key for _, key in attributes.changed()) == [
            "clocks.other",
            "clocks.other.late",
            "clocks.other.table",
            "clocks.other.ticks",
        ]
    assert vars(inner) == {"ticks": 0, "other": inner, "table": {"ticks": 0}}
    assert clock.other is inner
    assert shown.is_set()


@pytest.mark.parametrize("whole", [odd_models.Odd, nn.Sequential])
def test_what_counts_in_an_object_is_seen(whole: Callable[[nn.Module], nn.Module]) -> None:
    """By the name that leads there; nothing has counted afterwards."""
    middle = odd_models.Scheduled()
    task = replace(mlp(), model=whole(middle), loss=lambda made, _: made.square().mean())
    cut = split(task)
    assert len(cut.counting) == 1
    assert any("changes its attribute 'plan.steps'" in note for note in cut.notes)
    assert agreement(cut, task).is_exact
    assert middle.plan["main"].steps == 0


class HookedOnce(nn.Module):
    """Its first call registers a hook that collects what its parts give (Hugging Face does so)."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.heads = nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 2)])
        self.hooked, self.collected = False, None

    def forward(self, value: Tensor) -> Tensor:
        """The sum of what each head makes of what its part gave."""
        if not self.hooked:
            self.hooked = True
            for part in self.parts:
                part.register_forward_hook(lambda _, __, made: self.collected.append(made))
        self.collected = []
        self.parts(value)
        pairs = zip(self.heads, self.collected, strict=False)
        result = sum(head(made) for head, made in pairs)
        self.collected = None
        return result


def test_what_a_call_registers_is_taken_away() -> None:
    """With the mark that it is registered: else the next call would collect everything twice."""
    model = HookedOnce()
    task = replace(mlp(), model=model, data=lambda n: (torch.full((4, 4), n + 1.0), None))
    task = replace(task, loss=lambda result, _: result.square().mean())
    value = torch.ones(4, 4)
    expected = HookedOnce()
    expected.load_state_dict(model.state_dict())
    assert agreement(split(task), task).is_exact
    assert torch.equal(model(value), expected(value))
    assert [len(part._forward_hooks) for part in model.parts] == [1, 1]


def test_any_other_content_of_a_module_is_seen() -> None:
    """A tensor or a buffer for another one, too; the latter is no change of a plain attribute."""
    module = nn.BatchNorm1d(3)
    module.table, module.rows = torch.ones(2), [torch.ones(1)]

    def other_table() -> None:
        module.table = torch.ones(2)

    def other_row() -> None:
        module.rows[0] = torch.ones(1)

    def other_buffer() -> None:
        module.running_mean = torch.zeros(3)

    def one_more_part() -> None:
        module.add_module("part", nn.Identity())

    seen = {other_table: ["table"], other_row: ["rows"], other_buffer: [], one_more_part: []}
    for change, names in seen.items():
        attributes = AttributeSnapshot([module])
        assert attributes.untouched()
        change()
        assert not attributes.untouched(), change
        assert attributes.changed() == [("", name) for name in names]


class Remembers(nn.Module):
    """Subtracts what it got before; what it gives stands in an attribute for whoever looks."""

    def __init__(self) -> None:
        super().__init__()
        self.memory, self.shown = torch.zeros(1), torch.zeros(1)

    def forward(self, value: Tensor) -> Tensor:
        """What is new."""
        self.shown = value - self.memory
        self.memory = value.detach()
        return self.shown


def test_a_memory_that_is_an_attribute_is_seen() -> None:
    """What is only shown has a graph; of a memory the user hears that no checkpoint has it."""
    task = replace(mlp(), model=nn.Sequential(nn.Linear(6, 6), Remembers(), nn.Linear(6, 3)))
    model = split(task)
    assert model.counting == (1,)
    said = [note for note in model.notes if "'memory'" in note]
    assert len(said) == 1
    assert "no checkpoint holds what it changes" in said[0]
    assert not any("'shown'" in note for note in model.notes)


class CountsLater(nn.Module):
    """Makes a table in its first call, and counts the calls that find it."""

    def __init__(self) -> None:
        super().__init__()
        self.found, self.table = 0, None

    def forward(self, value: Tensor) -> Tensor:
        """The same."""
        if self.table is None:
            self.table = torch.ones(())
        else:
            self.found += 1
        return value * self.table


def test_what_counts_from_its_second_call_on_is_seen() -> None:
    """The first call changes no number, but it changes what the second one does."""
    model = [nn.Linear(6, 6), CountsLater(), nn.Tanh()]
    task = replace(mlp(), model=model, data=lambda _: (torch.ones(4, 6), torch.ones(4, 6)))
    assert split(task).counting == (1,)


def test_a_layer_that_counts_is_not_computed_again() -> None:
    """The message names the layer and the way out."""
    model = replace(split(mlp()), counting=(1,))
    model.check_again([0, 2], "here")
    with pytest.raises(InputError, match=r"here: computes layer '1:Tanh' again.*--recompute off"):
        model.check_again([0, 1], "here")


class Beside(nn.Module):
    """Makes a second tensor with a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.weight = nn.Linear(4, 4), nn.Parameter(torch.randn(4, 4))

    def forward(self, value: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(value), value @ self.weight


class Detaching(nn.Module):
    """Takes it as a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, value: Tensor, beside: Tensor) -> Tensor:
        return self.linear(value + beside.detach())


def test_weights_that_zeros_would_move_are_refused() -> None:
    """No gradient reaches them in the model; over a boundary come zeros."""

    def task(decay: float) -> Task:
        return Task(
            model=[Beside(), Detaching()],
            loss=nn.functional.mse_loss,
            optimizer=lambda p: torch.optim.AdamW(p, weight_decay=decay),
            data=lambda _: (torch.ones(2, 4), torch.ones(2, 1)),
        )

    moved = task(0.1)
    with pytest.raises(InputError, match=r"'0\.weight': no gradient.*AdamW would.*Freeze"):
        agreement(split(moved), moved)
    harmless = task(0.0)
    assert agreement(split(harmless), harmless).is_exact
    frozen = task(0.1)
    frozen.model[0].weight.requires_grad_(False)
    assert agreement(split(frozen), frozen).is_exact
