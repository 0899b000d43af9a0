"""Whatever the plan, a pipelined run trains bit for bit as one process does."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from pipeplan.plan import Semantics
from tests import pipelines, reference

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


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("semantics", ["flush", "2bw"])
@pytest.mark.parametrize("shape", MAPS.values(), ids=MAPS)
def test_equals_one_process(
    shape: tuple[Sequence[int], Sequence[int]], semantics: Semantics, optimizer: str
) -> None:
    """Losses and final weights equal the one-process reference, dropout and skips included."""
    cuts, gpus = shape
    split, task = pipelines.toy(optimizer)
    plan = pipelines.plan_of(cuts, gpus, semantics, microbatches=6)
    steps = 4
    trainer = reference.train_2bw if semantics == "2bw" else reference.train_flush
    expected = trainer(split, task, steps, 6, seed=3)
    pattern = pipelines.pattern_of(plan, period=3)
    losses, weights = pipelines.train(plan, pattern, split, task, steps)
    assert losses == expected.losses
    assert equal(weights, expected.weights)
