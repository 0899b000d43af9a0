"""What an update needs of other stages never changes a bit: clipping, scaling, schedules, ties."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from pipeplan import lowering
from pipeplan.capture import split
from pipeplan.errors import InputError
from pipeplan.plan import Semantics
from pipeplan.runtime.parameters.tied_parameters import find_ties, untie
from pipeplan.split_model import SplitModel
from pipeplan.task import LossScale, Task
from pipeplan.testing import reference
from pipeplan.testing.plans import random_plan
from tests import grids, pipelines

MAPS = {
    "one rank": ([3, 5], [0, 0, 0]),
    "looped": ([2, 4, 6], [0, 1, 0, 1]),
    "there and back": ([1, 3, 4, 5, 7], [0, 1, 2, 3, 1, 0]),
}
STEPS, M = 4, 4


def same(outcome: pipelines.Outcome, expected: reference.Trained) -> None:
    """Losses, norms, learning rates and weights are equal bit for bit."""
    assert outcome.losses == expected.losses
    taken = [step for step in range(outcome.steps) if step not in expected.skipped]
    assert [outcome.norms[step] for step in taken] == expected.norms
    assert [outcome.rates[step] for step in taken] == expected.rates
    assert outcome.weights.keys() == expected.weights.keys()
    for name, value in outcome.weights.items():
        assert torch.equal(value, expected.weights[name]), name


def check(
    shape: tuple[Sequence[int], Sequence[int]],
    semantics: Semantics,
    split: SplitModel,
    task: Task,
    k: int = 1,
    steps: int = STEPS,
) -> reference.Trained:
    """A pipelined run equals the reference, which is returned."""
    cuts, gpus = shape
    plan = pipelines.plan_of(cuts, gpus, semantics, M, layers=len(split.layers), k=k)
    expected = reference.train(semantics, split, task, steps, M, seed=3)
    pattern = pipelines.pattern_of(plan, period=3)
    same(pipelines.train(plan, pattern, untie(split, task.tied), task, steps), expected)
    return expected


@grids.each_pair(shape=MAPS, semantics=["flush", "2bw"], optimizer=["sgd", "adamw"])
def test_clipping_by_global_norm(
    shape: tuple[Sequence[int], Sequence[int]], semantics: Semantics, optimizer: str
) -> None:
    """Equal to torch's clip_grad_norm_ over all parameters; some step is really clipped."""
    split, task = pipelines.toy(optimizer)
    free = reference.train(semantics, split, task, STEPS, M, seed=3)
    expected = check(shape, semantics, split, replace(task, clip_norm=0.5))
    assert max(expected.norms) > 0.5
    assert any(not torch.equal(free.weights[n], v) for n, v in expected.weights.items())


@grids.first(5, seed=range(8))
def test_clipping_under_random_lowered_plans(seed: int) -> None:
    """Random valid plans with k up to 3: waiting for all norms neither hangs nor changes a bit."""
    plan = pipelines.without_first_in_place(random_plan(seed, layers=8))
    split, task = pipelines.toy()
    task = replace(task, clip_norm=0.3)
    expected = reference.train(plan.semantics, split, task, 4, plan.microbatches, seed=3)
    same(pipelines.train(plan, lowering.lower(plan), split, task, 4), expected)


class Counting(torch.optim.Optimizer):
    """Counts its steps per group, not per parameter, and lets its rate follow from the count."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {"step": 0})

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Once per update, whatever else is stepped beside it."""
        for group in self.param_groups:
            group["step"] += 1
            for parameter in group["params"]:
                parameter.data.add_(parameter.grad, alpha=-0.1 / group["step"])


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "Adam": lambda p: torch.optim.Adam(p, amsgrad=True),
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Adagrad": torch.optim.Adagrad,
    "Adadelta": torch.optim.Adadelta,
    "Adamax": torch.optim.Adamax,
    "Adafactor": torch.optim.Adafactor,
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.05),
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "Rprop": torch.optim.Rprop,
    "Nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, fused=True),
    "counting": Counting,
    "groups": lambda p: torch.optim.AdamW(
        [
            {"params": [x for x in p if x.dim() > 1], "weight_decay": 0.1},
            {"params": [x for x in p if x.dim() < 2], "lr": 0.02},
        ]
    ),
}


@grids.each_value(name=list(OPTIMIZERS), semantics=["flush", "2bw"])
def test_optimizers_of_torch(name: str, semantics: Semantics) -> None:
    """Anything that treats parameters one by one: one optimizer per layer equals one for all."""
    split, task = pipelines.toy()
    check(MAPS["looped"], semantics, split, replace(task, optimizer=OPTIMIZERS[name]))


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]] = {
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=3),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.2, total_steps=9),
    "warm-up, then decay": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=2), lr_scheduler.ExponentialLR(o, 0.5)], [2]
    ),
}


@pytest.mark.parametrize("semantics", ["flush", "2bw"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_step_once_per_update(name: str, semantics: Semantics) -> None:
    """Every stage's schedule is the reference's, whenever the stage updates."""
    split, task = pipelines.toy()
    plain = reference.train(semantics, split, task, STEPS, M, seed=3)
    expected = check(MAPS["looped"], semantics, split, replace(task, scheduler=SCHEDULES[name]))
    assert any(not torch.equal(plain.weights[n], v) for n, v in expected.weights.items())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"optimizer": torch.optim.LBFGS}, "optimizer: got LBFGS"),
        ({"scheduler": lr_scheduler.ReduceLROnPlateau}, "scheduler: got ReduceLROnPlateau"),
    ],
)
def test_what_looks_at_losses_is_refused(fields: dict[str, object], message: str) -> None:
    """Optimizers and schedules that need the loss of the whole step get a message, not a guess."""
    split, task = pipelines.toy()
    plan = pipelines.plan_of([4], [0, 1], "flush", M)
    with pytest.raises(InputError, match=message):
        pipelines.train(plan, pipelines.pattern_of(plan, 3), split, replace(task, **fields), 1)


class Overflowing(nn.Module):
    """Passes its input on; the gradient of some micro-batches overflows unless scaled down."""

    class _Gradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, value: Tensor) -> Tensor:
            return value.clone()

        @staticmethod
        def backward(ctx: object, gradient: Tensor) -> Tensor:
            return gradient.half().float()

    def forward(self, value: Tensor) -> Tensor:
        return self._Gradient.apply(value)


def overflowing() -> tuple[SplitModel, Task]:
    """Eight layers whose gradients pass through 16 bits in the middle."""
    torch.manual_seed(7)
    layers = pipelines.layers_of(6)
    layers[3:6] = [nn.Linear(6, 6), Overflowing(), nn.Linear(6, 6)]
    split, task = pipelines.split_by_hand(layers, "adamw")
    rule = LossScale(initial=2.0**21, interval=2)
    return split, replace(task, loss_scale=rule, clip_norm=1.0, scheduler=SCHEDULES["cosine"])


@grids.each_value(shape=MAPS, semantics=["flush", "2bw"])
def test_loss_scaling_skips_on_all_ranks(
    shape: tuple[Sequence[int], Sequence[int]], semantics: Semantics
) -> None:
    """One stage's infinite gradient skips the step everywhere and lowers the scale."""
    split, task = overflowing()
    cuts, gpus = shape
    plan = pipelines.plan_of(cuts, gpus, semantics, M)
    expected = reference.train(semantics, split, task, 10, M, seed=3)
    assert 0 < len(expected.skipped) < 9
    outcome = pipelines.train(plan, pipelines.pattern_of(plan, period=3), split, task, 10)
    same(outcome, expected)


TIES = {
    "one stage": ([], [0]),
    "one rank": ([1, 2, 4], [0, 0, 0, 0]),
    "two stages of one rank": ([1, 2, 4], [0, 1, 1, 0]),
}
FAR_TIES = {
    "two ranks": ([2], [0, 1]),
    "crossed": ([1, 3, 4], [0, 1, 0, 1]),
    "four ranks": ([1, 3, 4], [2, 0, 3, 1]),
}


@grids.each_pair(shape=TIES, semantics=["flush", "2bw"], clip=[False, True])
def test_tied_weights_on_one_rank(
    shape: tuple[Sequence[int], Sequence[int]], semantics: Semantics, clip: bool
) -> None:
    """One storage, one sum of gradients per layer, added in chain order: exact on any stages."""
    check(shape, semantics, *pipelines.tied(clip=clip, how="colocate"))


@grids.each_pair(shape={**TIES, **FAR_TIES}, semantics=["flush", "2bw"], clip=[False, True])
def test_tied_weights_anywhere(
    shape: tuple[Sequence[int], Sequence[int]], semantics: Semantics, clip: bool
) -> None:
    """Copies on any ranks exchange gradients and equal the reference bit for bit."""
    check(shape, semantics, *pipelines.tied(clip=clip, how="synchronize"))


def test_one_module_in_two_layers() -> None:
    """A module that is two layers of the chain has leaves of its own in each."""
    torch.manual_seed(2)
    twice = nn.Linear(6, 6)
    split, task = pipelines.split_by_hand([twice, nn.Tanh(), twice, nn.Linear(6, 3)], "sgd")
    check(([1, 2, 3], [0, 1, 0, 1]), "2bw", split, task)
    check(([1, 2, 3], [0, 1, 2, 1]), "2bw", split, replace(task, tied="synchronize"))


def test_colocated_ties_across_ranks_are_refused() -> None:
    """The message names both layers, the parameter and the way out."""
    split, _ = pipelines.tied(clip=False, how="colocate")
    plan = pipelines.plan_of([1, 2, 4], [0, 1, 1, 1], "flush", M, layers=5)
    with pytest.raises(InputError, match=r"layer0.*layer4.*GPUs 0 and 1.*synchronize"):
        find_ties(plan.stages, split)


def test_shared_statistics_cannot_be_synchronized() -> None:
    """A batch norm that is two layers has one running mean: refused rather than left to drift."""
    norm = nn.BatchNorm1d(6)
    split, _ = pipelines.split_by_hand([norm, nn.Linear(6, 6), norm], "sgd")
    with pytest.raises(InputError, match="shares buffers"):
        untie(split, "synchronize")


class Following(nn.Module):
    """Follows the mean of what it returns: in a buffer that is put in place, or in a tensor."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear, self.count = kind, nn.Linear(6, 6), 0
        self.register_buffer("mean", torch.zeros(6))
        self.plain = torch.zeros(6)

    def forward(self, value: Tensor) -> Tensor:
        made = torch.tanh(self.linear(value))
        now = made.detach().mean(0)
        if self.kind == "buffer":
            self.mean = 0.5 * self.mean + 0.5 * now
        elif self.kind == "tensor":
            self.plain.mul_(0.5).add_(now)
        else:
            self.count += 1
        return made - self.mean - self.plain * (self.count + 1)


def following(kind: str, first: int = 1) -> tuple[SplitModel, Task]:
    """Four layers, of which one module is the third and the `first` one."""
    torch.manual_seed(2)
    layers = [nn.Linear(6, 6), nn.Linear(6, 6), Following(kind), nn.Linear(6, 3)]
    layers[first] = layers[2]
    return pipelines.split_by_hand(layers, "sgd")


def followed(kind: str) -> list[float]:
    """Losses of a step of a loop over the layers themselves."""
    split, task = following(kind)
    losses = []
    for number in range(M):
        value, target = task.data(number)
        for layer in split.layers:
            value = layer(value)
        losses.append(nn.functional.cross_entropy(value, target).item())
    return losses


@pytest.mark.parametrize("kind", ["buffer", "tensor"])
@pytest.mark.parametrize("shape", [([3], [0, 1]), ([2], [0, 0])])
def test_one_module_in_two_layers_has_one_state(
    kind: str, shape: tuple[list[int], list[int]]
) -> None:
    """What the first layer puts into buffers and tensors the second one finds."""
    split, task = following(kind)
    plan = pipelines.plan_of(*shape, "flush", M, layers=4)
    outcome = pipelines.train(
        plan, pipelines.pattern_of(plan, 3), untie(split, "colocate"), task, 1
    )
    assert outcome.losses == followed(kind)


def test_one_module_in_two_stages_has_states_of_two_moments() -> None:
    """Its buffers may be there, and must not change; what it counts in Python never may."""
    split, task = following("buffer", first=0)
    plan = pipelines.plan_of([1, 2, 3], [0, 1, 0, 1], "flush", M, layers=4)
    with pytest.raises(InputError, match=r"buffer '0\.mean': changes in.*stage \d.*of its own"):
        pipelines.train(plan, pipelines.pattern_of(plan, 1), untie(split, "colocate"), task, 1)
    split, _ = following("count")
    with pytest.raises(InputError, match=r"layer1.*layer2.*Python attributes.*in a buffer"):
        untie(replace(split, counting=(1, 2)), "colocate")


class Half(nn.Module):
    """A layer under autocast: its weights stay in 32 bits, its sums are made in 16."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, value: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.linear(value)


class Widen(nn.Module):
    """From 16 bits to 32, for the loss."""

    def forward(self, value: Tensor) -> Tensor:
        return value.float()


@pytest.mark.parametrize("semantics", ["flush", "2bw"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits(dtype: torch.dtype, semantics: Semantics) -> None:
    """Weights, boundaries and gradients of 16 bits, scaled and clipped; layers under autocast."""
    torch.manual_seed(5)
    narrow = [nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Dropout(0.1)]
    layers = [Half(), Half(), Narrow(dtype), *(layer.to(dtype) for layer in narrow), Widen()]
    split, task = pipelines.split_by_hand(layers, "sgd")
    assert {spec.dtype for row in split.boundaries for spec in row} >= {str(dtype)}
    task = replace(task, clip_norm=0.2, loss_scale=LossScale(initial=256.0, interval=2))
    check(MAPS["there and back"], semantics, split, task)


class Narrow(nn.Module):
    """To 16 bits."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, value: Tensor) -> Tensor:
        return value.to(self.dtype)


class Waves(nn.Module):
    """A complex weight, whose type few operations of torch have."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6, dtype=torch.cfloat) / 3)

    def forward(self, value: Tensor) -> Tensor:
        return (value.to(torch.cfloat) @ self.weight).abs()


@pytest.mark.parametrize("semantics", ["flush", "2bw"])
def test_complex_weights(semantics: Semantics) -> None:
    """Their gradients are clipped and looked at as those of real ones."""
    torch.manual_seed(5)
    split, task = pipelines.split_by_hand([Waves(), nn.Linear(6, 6), Waves()], "adamw")
    task = replace(task, clip_norm=0.2, loss_scale=LossScale(initial=8.0, interval=2))
    assert check(([1, 2], [0, 1, 0]), semantics, split, task).norms


class Registered(nn.Module):
    """Lists its parameters in another order than it uses them."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(24, 1)
        self.wide = nn.Linear(24, 24)
        self.first = nn.Linear(6, 24)

    def forward(self, rows: Tensor) -> Tensor:
        return self.last(torch.tanh(self.wide(torch.tanh(self.first(rows)))))


def test_the_norm_is_that_of_the_models_list_of_parameters() -> None:
    """Norms and weights are those of a plain loop over `model.parameters()`, bit for bit.

    In the order in which the layers run, some norm would have other bits.
    """
    torch.manual_seed(5)
    model, alone = Registered(), Registered()
    alone.load_state_dict(model.state_dict())
    rows = torch.randn(STEPS * M, 4, 6)
    task = Task(
        model=model,
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        data=lambda number: (rows[number % len(rows)], rows[number % len(rows), :, :1].sin()),
        clip_norm=0.1,
    )
    chain = split(task)
    plan = pipelines.plan_of([1, 2], [0, 1, 0], "flush", M, layers=len(chain.layers))
    outcome = pipelines.train(plan, pipelines.pattern_of(plan, period=3), chain, task, STEPS)

    optimizer = task.optimizer(alone.parameters())
    norms, others = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        for number in range(step * M, (step + 1) * M):
            source, target = task.microbatch(number)
            nn.functional.mse_loss(alone(source), target).backward()
        for parameter in alone.parameters():
            parameter.grad /= M
        used = nn.Sequential(alone.first, alone.wide, alone.last).parameters()
        others.append(nn.utils.get_total_norm([each.grad for each in used]).item())
        norms.append(nn.utils.clip_grad_norm_(alone.parameters(), 0.1).item())
        optimizer.step()
    assert norms != others
    assert list(outcome.norms) == norms
    for name, value in alone.named_parameters():
        assert torch.equal(outcome.weights[name], value), name
