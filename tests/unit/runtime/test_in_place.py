"""What a later forward changes in place while a backward needs it is named."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pipeplan.errors import InputError
from pipeplan.plan import Semantics
from pipeplan.runtime.stages.segment import CheckpointedSegment, SegmentSpec, StoredSegment
from pipeplan.split_model import TensorSpec
from tests import pipelines


class Counting(nn.Module):
    """Multiplies by a buffer that each forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("count", torch.zeros(6))

    def forward(self, rows: Tensor) -> Tensor:
        self.count.add_(1)
        return self.linear(rows) * self.count


@pytest.mark.parametrize("semantics", ["flush", "2bw"])
def test_the_buffer_and_its_layer_are_named(semantics: Semantics) -> None:
    """A loop with one micro-batch under way would train it; autograd told a shape alone."""
    layers = [nn.Linear(6, 6), Counting(), nn.Linear(6, 3)]
    split, task = pipelines.split_by_hand(layers, "sgd")
    plan = pipelines.plan_of([2], [0, 1], semantics, 4, layers=3)
    with pytest.raises(InputError, match=r"layer 1: '1\.count', needed .*clone\(\)"):
        pipelines.train(plan, pipelines.pattern_of(plan, period=2), split, task, 2)


class Passing(nn.Module):
    """Takes two tensors and hands the second one on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, rows: Tensor, skip: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(rows * skip), skip


def test_an_input_that_layers_are_computed_again_from() -> None:
    """A later layer that changes it would have them computed again from something else."""
    boundary = (TensorSpec((2, 6), "float32", False),) * 2
    spec = SegmentSpec(
        first_layer=3,
        layers=(Passing(),),
        inputs=boundary,
        entered=(False, False),
        left=(True, False),
        loss=None,
        seed=0,
    )
    for changes in (False, True):
        segment = CheckpointedSegment(spec, (StoredSegment(spec),))
        rows, skip = segment.forward(0, [torch.ones(2, 6), torch.ones(2, 6)], lambda _: None)
        if not changes:
            segment.backward(0, [torch.ones_like(rows)], 1.0)
            continue
        skip.add_(1)
        with pytest.raises(InputError, match=r"layer 3: its input, .* without --recompute"):
            segment.backward(0, [torch.ones_like(rows)], 1.0)
