"""Whatever the plan, a pipelined run trains bit for bit as one process does."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipeplan import lowering
from pipeplan.errors import InputError
from pipeplan.plan import Remat, Semantics
from pipeplan.testing import reference
from pipeplan.testing.plans import random_plan
from tests import grids, pipelines

STEPS, M = 4, 4
MAPS = {
    "one rank, one stage": ([], [0]),
    "one rank, three stages": ([3, 5], [0, 0, 0]),
    "two ranks": ([4], [0, 1]),
    "two ranks, looped": ([2, 4, 6], [0, 1, 0, 1]),
    "four ranks": ([2, 4, 6], [0, 1, 2, 3]),
    "four ranks, there and back": ([1, 3, 4, 5, 7], [0, 1, 2, 3, 1, 0]),
    "a rank without stages, neighbours on one rank": ([1, 2, 5], [0, 2, 2, 0]),
}


def equal(weights: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    """Same names, same bits."""
    return weights.keys() == expected.keys() and all(
        torch.equal(weights[name], expected[name]) for name in weights
    )


def train_alone(semantics: Semantics, optimizer: str, steps: int, m: int) -> reference.Trained:
    """The one-process run of the toy model."""
    split, task = pipelines.toy(optimizer)
    trainer = reference.train_2bw if semantics == "2bw" else reference.train_flush
    return trainer(split, task, steps, m, seed=3)


@grids.each_pair(shape=MAPS, semantics=["flush", "2bw"], optimizer=["sgd", "adamw"])
def test_equals_one_process(
    shape: tuple[Sequence[int], Sequence[int]], semantics: Semantics, optimizer: str
) -> None:
    """Losses and final weights equal the one-process reference, dropout and skips included.

    So do the gradient norms and learning rates that the rank with the losses is told.
    """
    cuts, gpus = shape
    split, task = pipelines.toy(optimizer)
    plan = pipelines.plan_of(cuts, gpus, semantics, microbatches=M)
    outcome = pipelines.train(plan, pipelines.pattern_of(plan, period=3), split, task, STEPS)
    expected = train_alone(semantics, optimizer, STEPS, M)
    assert outcome.losses == expected.losses
    assert equal(outcome.weights, expected.weights)
    assert (outcome.norms, outcome.rates) == (expected.norms, expected.rates)


@grids.first(10, seed=range(16))
def test_random_lowered_plans_equal_one_process(seed: int) -> None:
    """Random valid plans, k up to 3, lowered by the real lowering, train exactly."""
    plan = pipelines.without_first_in_place(random_plan(seed, layers=8))
    split, task = pipelines.toy()
    outcome = pipelines.train(plan, lowering.lower(plan), split, task, 3)
    expected = train_alone(plan.semantics, "sgd", 3, plan.microbatches)
    assert outcome.losses == expected.losses
    assert equal(outcome.weights, expected.weights)
    assert outcome.norms == expected.norms


RUNS = [
    ((0, 0),), ((0, 7),), ((2, 3), (4, 6)), ((0, 2), (0, 1), (3, 4), (5, 7)),
    ((0, 7), (0, 2), (0, 0), (4, 6), (5, 5)),
]  # fmt: skip


@grids.each_pair(semantics=["flush", "2bw"], cuts=[[], [3], [4, 6]], runs=RUNS)
def test_computing_again_changes_nothing(
    semantics: Semantics, cuts: list[int], runs: tuple[tuple[int, int], ...]
) -> None:
    """Losses, weights and running statistics equal those of one process that keeps everything."""
    split, task = pipelines.toy()
    plan = pipelines.plan_of(cuts, list(range(len(cuts) + 1)), semantics, microbatches=M)
    stages = tuple(
        stage.model_copy(update={"remat": Remat(recompute=mine)})
        if (mine := tuple(run for run in runs if stage.first <= run[0] <= run[1] <= stage.last))
        else stage
        for stage in plan.stages
    )
    plan = plan.model_copy(update={"stages": stages})
    outcome = pipelines.train(plan, pipelines.pattern_of(plan, period=3), split, task, STEPS)
    expected = train_alone(semantics, "sgd", STEPS, M)
    assert outcome.losses == expected.losses
    assert equal(outcome.weights, expected.weights)


def test_a_run_may_not_begin_in_place() -> None:
    """What is kept to be computed from again must not change: the layer is named."""
    split, task = pipelines.toy()
    plan = pipelines.plan_of([], [0], "flush", microbatches=M)
    stage = plan.stages[0].model_copy(update={"remat": Remat(recompute=((1, 2),))})
    plan = plan.model_copy(update={"stages": (stage,)})
    with pytest.raises(InputError, match="layer 1: works in place"):
        pipelines.train(plan, pipelines.pattern_of(plan, period=3), split, task, 1)


def test_fewest_micro_batches_of_2bw() -> None:
    """With m = in-flight - 1, the least that (R6) allows, 2bw is still exact."""
    split, task = pipelines.toy()
    plan = pipelines.plan_of([2, 4, 6], [0, 1, 2, 3], "2bw", microbatches=3)
    outcome = pipelines.train(plan, pipelines.pattern_of(plan, period=2), split, task, 6)
    expected = train_alone("2bw", "sgd", 6, 3)
    assert equal(outcome.weights, expected.weights)


def test_2bw_differs_from_flush() -> None:
    """The two modes are different algorithms: the references must not agree by accident."""
    flush, delayed = (train_alone(mode, "sgd", STEPS, M) for mode in ("flush", "2bw"))
    assert not equal(flush.weights, delayed.weights)


def test_recurrent_layers_switch_versions() -> None:
    """An LSTM keeps its own list of weights; 2bw must reach it too."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.lstm(x)[0]
            return result

    def layers() -> list[nn.Module]:
        torch.manual_seed(2)
        return [Recurrent(), nn.Linear(6, 3)]

    split, task = pipelines.split_by_hand(layers(), "sgd")
    plan = pipelines.plan_of([1], [0, 1], "2bw", microbatches=4, layers=2)
    expected = reference.train_2bw(split, task, 4, 4, seed=3)
    outcome = pipelines.train(plan, pipelines.pattern_of(plan, period=2), split, task, 4)
    assert equal(outcome.weights, expected.weights)


class Recomputed(nn.Module):
    """Drops its activations and computes them again in the backward, by torch's checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return result


def test_recomputing_layers_see_their_own_weights() -> None:
    """Under 2bw a backward that recomputes uses the version and the masks of its forward."""
    torch.manual_seed(4)
    layers = [nn.Linear(6, 6), Recomputed(), Recomputed(), nn.Linear(6, 3)]
    split, task = pipelines.split_by_hand(layers, "sgd")
    plan = pipelines.plan_of([1, 3], [0, 1, 0], "2bw", microbatches=5, layers=4)
    expected = reference.train_2bw(split, task, 4, 5, seed=3)
    outcome = pipelines.train(plan, pipelines.pattern_of(plan, period=1), split, task, 4)
    assert outcome.losses == expected.losses
    assert equal(outcome.weights, expected.weights)


@pytest.mark.parametrize("semantics", ["flush", "2bw"])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_all_ranks_stop_at_the_same_step(rank: int, semantics: Semantics) -> None:
    """One rank's wish ends all ranks behind the steps begun, with exactly their weights."""
    split, task = pipelines.toy()
    plan = pipelines.plan_of([1, 2, 5], [0, 2, 1, 0], semantics, microbatches=M)
    pattern = pipelines.pattern_of(plan, period=3)
    outcome = pipelines.train(plan, pattern, split, task, 9, stop_at={rank: 3})
    assert 3 <= outcome.steps <= (4 if semantics == "flush" else 5)
    expected = train_alone(semantics, "sgd", outcome.steps, M)
    assert outcome.losses == expected.losses
    assert equal(outcome.weights, expected.weights)
