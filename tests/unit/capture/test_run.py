"""Chains of graphs in the runtime: skips, side inputs and shared weights cross ranks exactly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn

from pipeplan import tasks
from pipeplan.plan import Semantics
from pipeplan.task import Task
from pipeplan.testing import reference
from tests import grids, pipelines, short_networks
from tests.captured import captured


def siamese_as_learnt() -> Task:
    """Statistics of its norms stay as they are, so that both uses of a layer may lie apart."""
    task = tasks.siamese()
    assert isinstance(task.model, nn.Module)
    for part in task.model.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.eval()
    return task


UNET, T5 = partial(tasks.unet, depth=2, side=16), partial(short_networks.t5, sequence=8)
CASES: dict[str, tuple[Callable[[], Task], Sequence[int], Sequence[int]]] = {
    "unet, cut where two skips are open": (UNET, [5], [0, 1]),
    "unet, looped": (UNET, [2, 5, 9], [0, 1, 0, 1]),
    "t5, cut in the decoder": (T5, [6], [0, 1]),
    "t5, ids fed in the middle": (T5, [1, 3, 7], [0, 1, 0, 1]),
    "crossmodal, cut in the text": (partial(tasks.crossmodal, layers=1), [2, 5], [1, 0, 1]),
    "siamese, weights twice on a rank": (siamese_as_learnt, [2, 4, 6, 8], [0, 1, 0, 1, 1]),
    "mixer, tensors transposed in memory": (short_networks.mixer, [1, 4], [0, 1, 0]),
    "densenet": (partial(short_networks.densenet, side=32), [2, 5], [0, 1, 2]),
}


@grids.each_value(case=CASES, semantics=["flush", "2bw"])
def test_equals_one_process(
    case: tuple[Callable[[], Task], Sequence[int], Sequence[int]], semantics: Semantics
) -> None:
    """Losses and final weights of several ranks equal those of one process, bit for bit."""
    make, cuts, gpus = case
    model, task = captured(make)
    alone = reference.train_2bw if semantics == "2bw" else reference.train_flush
    expected = alone(model, task, 2, 3, seed=3)
    plan = pipelines.plan_of(cuts, gpus, semantics, microbatches=3, layers=len(model.layers))
    outcome = pipelines.train(plan, pipelines.pattern_of(plan, period=4), model, task, 2)
    assert outcome.losses == expected.losses
    parameters = {
        names[local]
        for layer, names in zip(model.layers, model.fqns, strict=True)
        for local, _ in layer.named_parameters()
    }
    for name in parameters:
        assert torch.equal(outcome.weights[name], expected.weights[name]), name
