"""A rank's peak is the planned one whatever optimizer the task uses, however it steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from pipeplan.chain import Chain
from pipeplan.plan import Plan, Semantics, Stage
from pipeplan.task import Task
from tests import grids
from tests.captured import captured, lasting, measured_chain
from tests.captured import chain_of as captured_chain
from tests.unit.runtime.test_memory import measured, measured_of, planned

Make = Callable[..., Optimizer]


class Classic(Optimizer):
    """A loop of its own over groups and parameters, as optimizers outside torch are written."""

    def __init__(self, groups: Any, lr: float = 0.01, weight_decay: float = 0.1) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay})

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Leaves temporaries of one parameter alive until the next one's are made."""
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                square = state.setdefault("square", torch.zeros_like(parameter))
                gradient = parameter.grad + group["weight_decay"] * parameter
                square.mul_(0.9).add_(gradient * gradient)
                scale = square.sqrt() + 1e-8
                parameter.data.sub_(group["lr"] * gradient / scale)


def steps_of(make: Make) -> int:
    """RAdam takes other temporaries from its sixth step on, ASGD (here) behind its third."""
    return 8 if make in (optim.RAdam, optim.ASGD) else 3


PLAIN: dict[str, tuple[Make, dict[str, Any]]] = {
    "sgd": (optim.SGD, {}),
    "sgd-momentum": (optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "adam": (optim.Adam, {}),
    "adamw": (optim.AdamW, {}),
    "adamw-amsgrad": (optim.AdamW, {"amsgrad": True}),
    "adagrad": (optim.Adagrad, {}),
    "rmsprop": (optim.RMSprop, {"centered": True, "momentum": 0.9}),
    "nadam": (optim.NAdam, {}),
    "radam": (optim.RAdam, {}),
    "adamax": (optim.Adamax, {}),
    "adadelta": (optim.Adadelta, {}),
    "asgd": (optim.ASGD, {"t0": 3}),
    "rprop": (optim.Rprop, {}),
    "adafactor": (optim.Adafactor, {}),
}
FUSED = ("sgd", "sgd-momentum", "adam", "adamw", "adamw-amsgrad", "adagrad")
SEMANTICS: tuple[Semantics, ...] = ("flush", "2bw")


def kinds() -> Iterator[Any]:
    """Every optimizer in every way it can step."""
    for name, (make, options) in PLAIN.items():
        yield pytest.param(make, options | {"foreach": False}, id=f"{name}-plain")
        yield pytest.param(make, options | {"foreach": True}, id=f"{name}-foreach")
        if name in FUSED:
            yield pytest.param(make, options | {"fused": True}, id=f"{name}-fused")
    yield pytest.param(Classic, {}, id="classic")


class Block(nn.Module):
    """Several matrices and vectors, of which a backward takes one gradient after the other."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(inputs, outputs, bias=n > 1) for n in range(4))

    def forward(self, value: Tensor) -> Tensor:
        """The sum of four maps."""
        return sum((linear(value) for linear in self.linears), torch.zeros(()))


def layers() -> list[nn.Module]:
    """Three layers of different sizes, which keep little with two rows."""
    return [Block(24, 32), nn.LayerNorm(32), Block(32, 40)]


def task(make: Make, options: dict[str, Any], groups: bool) -> Task:
    """The three layers; with `groups` only matrices decay, and a group may be empty."""

    def optimizer(parameters: Iterable[nn.Parameter]) -> Optimizer:
        known = list(parameters)
        decay = {} if make is optim.Rprop else {"weight_decay": 0.1}
        if not groups:
            return make(known, **options, **decay)
        rest = {} if make is optim.Rprop else {"weight_decay": 0.0}
        return make(
            [
                {"params": [p for p in known if p.dim() > 1], **decay},
                {"params": [p for p in known if p.dim() < 2], **rest, "lr": 0.02},
            ],
            **options,
        )

    def data(number: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(number)
        return torch.randn(2, 24, generator=generator), torch.randn(2, 40, generator=generator)

    return Task(model=layers(), loss=nn.functional.mse_loss, optimizer=optimizer, data=data)


def sgd() -> Task:
    """The three layers with the first optimizer: what their capture needs."""
    return task(optim.SGD, {}, groups=False)


def chain_of(made: Task) -> Chain:
    """Its chain, with times that make every op last; the layers are captured once for all."""
    return lasting(measured_chain(captured(sgd)[0], made))


def peaks_of(plan: Plan, made: Task, steps: int | None = None) -> list[int]:
    """Of each rank, as measured."""
    return measured(plan, made, steps, captured(sgd)[0])


@grids.each_value(
    kind={param.id or str(place): param.values for place, param in enumerate(kinds())},
    groups={"one-group": False, "two-groups": True},
    size=[1, 3],
    semantics=SEMANTICS,
)
def test_peak_is_as_planned(
    kind: tuple[Make, dict[str, Any]], groups: bool, size: int, semantics: Semantics
) -> None:
    """To the byte, in both modes, for stages of one layer and of three."""
    make, options = kind
    chain = chain_of(task(make, options, groups))
    updates = [layer.optimizer_workspace_bytes for layer in chain.layers]
    stages = tuple(
        Stage(id=gpu, layers=(gpu * size, gpu * size + size - 1), gpu=gpu)
        for gpu in range(len(updates) // size)
    )
    plan = planned(chain, len(stages), semantics, 1, 0, stages)
    peaks = peaks_of(plan, task(make, options, groups), steps_of(make))
    assert peaks == [row.peak_bytes for row in plan.memory]
    if options.get("foreach") and make is not optim.SGD:
        assert max(row.working_bytes for row in plan.memory) == max(updates)


def test_a_short_run_may_take_less() -> None:
    """ASGD averages from its millionth step on, which takes more: planned from the start."""
    made = task(optim.ASGD, {}, groups=False)
    plan = planned(chain_of(made), 1, "flush", 1, 0, (Stage(id=0, layers=(0, 2), gpu=0),))
    early = task(optim.ASGD, {"t0": 4}, groups=False)
    (need,) = (row.peak_bytes for row in plan.memory)
    assert peaks_of(plan, made)[0] < need
    assert peaks_of(plan, early, 8) == [need]


def sharing(foreach: bool) -> Task:
    """Five layers; the inner three share two weights, each on its rank."""
    made = [Block(32, 32) for _ in range(3)]
    for other in made[1:]:
        other.linears[1].weight = made[0].linears[1].weight
        other.linears[2].weight = made[0].linears[2].weight
    plain = task(optim.AdamW, {"foreach": foreach}, groups=False)
    return replace(plain, model=[nn.Linear(24, 32), *made, nn.Linear(32, 40)], tied="synchronize")


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("semantics", SEMANTICS)
def test_copies_of_shared_weights_are_stepped_apart(semantics: Semantics, foreach: bool) -> None:
    """A layer's copies have an optimizer of their own, beside the one of what it owns.

    Under 2bw copies are updated beside the input of the forward behind; (M7) of
    docs/reference/model.md takes all of the stage's updates to be so.
    """
    chain = lasting(captured_chain(sharing, foreach))
    stages = tuple(Stage(id=i, layers=each, gpu=i) for i, each in enumerate(((0, 1), (2, 4))))
    plan = planned(chain, 2, semantics, 1, 0, stages)
    pairs = zip(measured_of(plan, sharing, foreach), plan.memory, strict=True)
    over = [row.peak_bytes - peak for peak, row in pairs]
    assert over == [0, chain.input_of(2) if semantics == "2bw" and foreach else 0]
