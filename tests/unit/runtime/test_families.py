"""Models of six families train exactly on 1, 2 and 4 ranks, in both semantics, k up to 2."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pipeplan.plan import Semantics
from pipeplan.runtime.parameters.tied_parameters import untie
from pipeplan.testing import reference
from tests import grids, models, pipelines

STEPS, M = 3, 4
MAPS = {
    "one rank, k = 1": ([3, 5], [0, 0, 0], 1),
    "looped on two ranks, k = 2": ([2, 4, 6], [0, 1, 0, 1], 2),
    "four ranks, k = 1": ([2, 4, 6], [0, 1, 2, 3], 1),
    "four ranks, there and back, k = 2": ([1, 3, 4, 5, 7], [0, 1, 2, 3, 1, 0], 2),
}


@grids.each_pair(family=list(models.FAMILIES), shape=MAPS, semantics=["flush", "2bw"])
def test_family_trains_exactly(
    family: str, shape: tuple[Sequence[int], Sequence[int], int], semantics: Semantics
) -> None:
    """Losses, weights and running statistics equal one process, with dropout and clipping."""
    cuts, gpus, k = shape
    split, task = models.make(family)
    plan = pipelines.plan_of(cuts, gpus, semantics, M, k=k)
    expected = reference.train(semantics, split, task, STEPS, M, seed=3)
    assert max(expected.norms) > 0.2
    pattern = pipelines.pattern_of(plan, period=3)
    outcome = pipelines.train(plan, pattern, untie(split, task.tied), task, STEPS)
    assert outcome.losses == expected.losses
    assert outcome.weights.keys() == expected.weights.keys()
    for name, value in outcome.weights.items():
        assert torch.equal(value, expected.weights[name]), name
