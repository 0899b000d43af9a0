"""Which messages a stage exchanges, with whom, under which tags. Derived from the plan alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from pipeplan.plan import Stage as PlannedStage
from pipeplan.runtime.piece import CPU, empty
from pipeplan.runtime.stage import gradient_specs
from pipeplan.task import TensorSpec

_META = torch.device("meta")


@dataclass(frozen=True, slots=True)
class Wire:
    """One direction of one boundary between two ranks."""

    peer: int
    tags: tuple[int, ...]
    """One per tensor; equal on both ends and used by nothing else."""
    specs: tuple[TensorSpec, ...]
    device: torch.device
    """Where its tensors are."""
    sizes: tuple[int, ...]
    """Bytes of each."""

    def check(self, tensors: Sequence[Tensor]) -> None:
        """Refuse to send what the other end does not wait for, and could not tell from silence.

        Raises:
            ValueError: if a tensor has not its size.
        """
        for number, (tensor, size) in enumerate(zip(tensors, self.sizes, strict=True)):
            if tensor.nbytes != size:
                spec = self.specs[number]
                raise ValueError(
                    f"boundary: tensor {number}: got {tuple(tensor.shape)} {tensor.dtype}, need"
                    f" {spec.shape} {spec.dtype}, as when the model was split: shapes and dtypes"
                    " must be the same for every micro-batch"
                )


@dataclass(frozen=True, slots=True)
class Wires:
    """All messages of one stage; None where the neighbour is on the same rank or absent."""

    input: Wire | None
    output: Wire | None
    output_gradient: Wire | None
    input_gradient: Wire | None


def wires(
    stages: Sequence[PlannedStage],
    boundaries: Sequence[Sequence[TensorSpec]],
    index: int,
    device: torch.device = CPU,
) -> Wires:
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
    return Wires(
        input=before.forward(here) if before else None,
        output=after.forward(here) if after else None,
        output_gradient=after.backward(here) if after else None,
        input_gradient=before.backward(here) if before else None,
    )


def first_free_tag(boundaries: Sequence[Sequence[TensorSpec]]) -> int:
    """The smallest tag that no boundary uses, nor any above it."""
    return 2 * sum(map(len, boundaries))


def first_tie_tag(boundaries: Sequence[Sequence[TensorSpec]]) -> int:
    """The first tag of gradients of tied weights: behind the one of `first_free_tag`."""
    return first_free_tag(boundaries) + 1


@dataclass(frozen=True, slots=True)
class _Boundary:
    """The boundary before a stage, between two ranks; tags count from the chain's start."""

    stage: int
    first_tag: int
    ranks: tuple[int, int]
    specs: tuple[TensorSpec, ...]
    device: torch.device

    def forward(self, here: int) -> Wire:
        return self._wire(here, self.specs, 0)

    def backward(self, here: int) -> Wire:
        return self._wire(here, gradient_specs(self.specs, self.stage), 1)

    def _wire(self, here: int, specs: tuple[TensorSpec, ...], direction: int) -> Wire:
        peer = self.ranks[1] if here == self.ranks[0] else self.ranks[0]
        tags = tuple(2 * (self.first_tag + i) + direction for i in range(len(specs)))
        sizes = tuple(empty(spec, _META).nbytes for spec in specs)
        return Wire(peer, tags, specs, self.device, sizes)


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
