"""Which messages a stage exchanges, with whom, under which tags. Derived from the plan alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from pipeplan.layout import arrived
from pipeplan.plan import Stage as PlannedStage
from pipeplan.split_model import TensorSpec

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One direction of one boundary between two ranks."""

    peer: int
    tags: tuple[int, ...]
    """One per tensor; equal on both ends and used by nothing else."""
    specs: tuple[TensorSpec, ...]
    device: torch.device
    """Where its tensors are."""

    def check(self, tensors: Sequence[Tensor]) -> None:
        """Refuse to send what the other end does not wait for, and could not tell from silence.

        Raises:
            ValueError: if a tensor has another shape or dtype than its message.
        """
        for number, (tensor, spec) in enumerate(zip(tensors, self.specs, strict=True)):
            dimensions = spec.order or range(len(spec.shape))
            there = tuple(spec.shape[dimension] for dimension in dimensions)
            if tuple(tensor.shape) != there or str(tensor.dtype) != spec.dtype:
                got = tuple(arrived(tensor, spec.order).shape)
                raise ValueError(
                    f"boundary: tensor {number}: got {got} {tensor.dtype}, need"
                    f" {spec.shape} {spec.dtype}, as when the model was split: shapes and dtypes"
                    " must be the same for every micro-batch"
                )


@dataclass(frozen=True, slots=True)
class StageEndpoints:
    """All messages of one stage; None where the neighbour is on the same rank or absent."""

    input: Endpoint | None
    output: Endpoint | None
    output_gradient: Endpoint | None
    input_gradient: Endpoint | None


def endpoints(
    stages: Sequence[PlannedStage],
    boundaries: Sequence[Sequence[TensorSpec]],
    index: int,
    device: torch.device = CPU,
) -> StageEndpoints:
    """The wires of stage `index`.

    Args:
        stages: all stages of the plan, in chain order.
        boundaries: specs of the boundary before each layer.
        index: a stage.
        device: where its tensors are.
    """
    before = _boundary(stages, boundaries, index, device)
    after = _boundary(stages, boundaries, index + 1, device)
    here = stages[index].gpu
    return StageEndpoints(
        input=before.forward(here) if before else None,
        output=after.forward(here) if after else None,
        output_gradient=after.backward(here) if after else None,
        input_gradient=before.backward(here) if before else None,
    )


def first_free_tag(boundaries: Sequence[Sequence[TensorSpec]]) -> int:
    """The smallest tag that no boundary uses, nor any above it."""
    return 2 * sum(map(len, boundaries))


def report_tag(boundaries: Sequence[Sequence[TensorSpec]]) -> int:
    """The tag of reports of steps: behind the one of `first_free_tag`."""
    return first_free_tag(boundaries) + 1


def first_tie_tag(boundaries: Sequence[Sequence[TensorSpec]]) -> int:
    """The first tag of gradients of tied weights: behind `report_tag`."""
    return report_tag(boundaries) + 1


@dataclass(frozen=True, slots=True)
class _Boundary:
    """The boundary before a stage, between two ranks; tags count from the chain's start."""

    stage: int
    first_tag: int
    ranks: tuple[int, int]
    specs: tuple[TensorSpec, ...]
    device: torch.device

    def forward(self, here: int) -> Endpoint:
        return self._endpoint(here, self.specs, 0)

    def backward(self, here: int) -> Endpoint:
        return self._endpoint(here, gradient_specs(self.specs, self.stage), 1)

    def _endpoint(self, here: int, specs: tuple[TensorSpec, ...], direction: int) -> Endpoint:
        peer = self.ranks[1] if here == self.ranks[0] else self.ranks[0]
        tags = tuple(2 * (self.first_tag + i) + direction for i in range(len(specs)))
        return Endpoint(peer, tags, specs, self.device)


def _boundary(
    stages: Sequence[PlannedStage],
    boundaries: Sequence[Sequence[TensorSpec]],
    index: int,
    device: torch.device,
) -> _Boundary | None:
    if not 0 < index < len(stages) or stages[index - 1].gpu == stages[index].gpu:
        return None
    layer = stages[index].first
    first_tag = list(accumulate(map(len, boundaries), initial=0))[layer]
    ranks = (stages[index - 1].gpu, stages[index].gpu)
    return _Boundary(index, first_tag, ranks, tuple(boundaries[layer]), device)


def gradient_specs(specs: Sequence[TensorSpec], stage: int) -> tuple[TensorSpec, ...]:
    """What flows back through the boundary `specs` before `stage`: nothing before the first.

    Gradients lie in memory as backwards leave them, which only a backward could tell: contiguous.
    """
    return tuple(replace(spec, order=()) for spec in specs if spec.differentiable and stage > 0)


def empty(spec: TensorSpec, device: torch.device = CPU) -> Tensor:
    """An uninitialised tensor of this shape, dtype and order in memory."""
    dtype: torch.dtype = getattr(torch, spec.dtype.removeprefix("torch."))
    shape = [spec.shape[dimension] for dimension in spec.order or range(len(spec.shape))]
    return arrived(torch.empty(shape, dtype=dtype, device=device), spec.order)
