"""A layer whose backward in two halves would differ from one backward is never split."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn

from pipeplan.capture import estimate_task, profile_task, split
from pipeplan.chain import Chain
from pipeplan.devices import find_device
from pipeplan.runtime.parameters.tied_parameters import untie
from tests import odd_models, pipelines
from tests.unit.capture.test_odd_models import (
    SEED,
    STEPS,
    Build,
    M,
    assert_equal,
    plain_loop,
    task_of,
)

BOTH_WAYS = ("spectral norm", "spectral norm by a hook")
"""Models whose middle layer uses a weight in a product, which waits, and elsewhere."""


def measured(build: Build, say: Callable[[str], None] = lambda _: None) -> Chain:
    """By running it."""
    return profile_task(task_of(build), repeats=1, warmup=0, progress=say)


def estimated(build: Build, say: Callable[[str], None] = lambda _: None) -> Chain:
    """Without."""
    return estimate_task(task_of(build), find_device("h100"), say)


def told(chain: Chain) -> list[bool]:
    """Which layers may be split."""
    halves = [
        (layer.backward_weight_ns is not None, layer.saved_for_weight_bytes is not None)
        for layer in chain.layers
    ]
    assert all(one == other for one, other in halves)
    return [one for one, _ in halves]


def without(chain: Chain, name: str) -> None:
    """Layer `name` tells nothing of halves."""
    (layer,) = (layer for layer in chain.layers if layer.name == name)
    assert layer.backward_weight_ns is None
    assert layer.saved_for_weight_bytes is None
    assert layer.saved_input_for_weight_bytes == 0
    assert layer.input_backward_workspace_bytes == 0
    assert layer.weight_backward_workspace_bytes == 0


@pytest.mark.parametrize("profile", [measured, estimated])
@pytest.mark.parametrize("name", BOTH_WAYS)
def test_a_weight_that_is_used_both_ways(name: str, profile: Callable[..., Chain]) -> None:
    """Its layer tells no halves, in both modes, and one line says why; other layers tell them."""
    lines: list[str] = []
    chain = profile(odd_models.EXACT[name], lines.append)
    without(chain, "middle")
    assert told(chain)[-1]
    (line,) = (line for line in lines if "not be split" in line)
    assert "middle" in line
    assert "two sums" in line
    assert "last" not in line


def trained(build: Build, splits: Iterable[bool]) -> dict[str, Tensor]:
    """Weights after three steps of a pipeline, a stage per layer, those in `splits` split."""
    task = task_of(build)
    model = untie(split(task), task.tied)
    layers = len(model.layers)
    plan = pipelines.plan_of(
        list(range(1, layers)), [at % 2 for at in range(layers)], "flush", M, layers=layers
    )
    plan = pipelines.split_backwards(plan, [at for at, flag in enumerate(splits) if flag and at])
    assert any(stage.split_backward for stage in plan.stages)
    pattern = pipelines.pattern_of(plan, period=2)
    return pipelines.train(plan, pattern, model, task, STEPS, seed=SEED).weights


@pytest.mark.parametrize("name", BOTH_WAYS)
def test_what_may_be_split_trains_as_a_plain_loop_does(name: str) -> None:
    """Bit-equal with every stage split that the profile allows."""
    build = odd_models.EXACT[name]
    assert_equal(trained(build, told(measured(build))), plain_loop(build))


@pytest.mark.parametrize("name", BOTH_WAYS)
def test_what_may_not_be_split_trains_otherwise(name: str) -> None:
    """With all stages split, some of ten first weights end in other bits: which, CPUs decide."""

    def differs(seed: int) -> bool:
        def build() -> nn.Module | list[nn.Module]:
            torch.manual_seed(seed)
            return odd_models.EXACT[name]()

        expected = plain_loop(build)
        by_force = trained(build, [True] * 3)
        return any(not torch.equal(value, expected[key]) for key, value in by_force.items())

    assert any(map(differs, range(10)))


class _Watched(nn.Module):
    """Computes a little differently where somebody watches its operations."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, value: Tensor) -> Tensor:
        made = self.linear(value)
        watched = torch._C._len_torch_function_stack()  # type: ignore[attr-defined]
        return made * (1 + 1e-6) if watched else made


def _watched() -> list[nn.Module]:
    return [nn.Linear(6, 6), _Watched(), nn.Linear(6, 3)]


def test_bits_are_compared() -> None:
    """A layer whose gradients differ for any other reason is found by its bits."""
    lines: list[str] = []
    chain = measured(_watched, lines.append)
    assert told(chain) == [False, False, True]
    name = chain.layers[1].name
    without(chain, name)
    (line,) = (line for line in lines if "not be split" in line)
    assert line.endswith(f": {name}")
    assert "bits" in line


def test_what_one_backward_gives_is_told() -> None:
    """Dropout, batch norm, hooks: nobody is told that a backward cannot be split."""
    for name in ("parameter hook", "batch norm", "weight norm", "LayerDrop"):
        lines: list[str] = []
        chain = measured((odd_models.EXACT | odd_models.DRAWN)[name], lines.append)
        assert all(told(chain)[1:]), name
        assert not any("not be split" in line for line in lines)
