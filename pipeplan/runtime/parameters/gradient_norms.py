"""How long the gradient of a whole model is, from what each stage knows of its own.

The norm is the one of `torch.nn.utils.clip_grad_norm_(model.parameters(), ..)`: the norm of each
parameter's gradient, then the norm of these norms in the order in which the model lists its
parameters, those of one dtype side by side. So the result does not depend on the plan. A shared
parameter counts once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from pipeplan.gradients import sum_dtype
from pipeplan.plan import Stage as PlannedStage
from pipeplan.split_model import SplitModel


class NormLayout:
    """Where each parameter's norm has its place, and which rank knows it."""

    def __init__(
        self,
        stages: Sequence[PlannedStage],
        split: SplitModel,
        accumulate: torch.dtype | None = None,
    ) -> None:
        """Takes the stages, their layers, and the type in which narrow gradients add up."""
        self.ranks: list[list[int]] = [[] for _ in range(1 + max(s.gpu for s in stages))]
        """Places of each rank's parameters, ascending."""
        self.dtypes: list[torch.dtype] = []
        self.place: dict[str, int] = {}
        self.stages: list[int] = []
        """The stage of each place."""
        self.hosts = sorted({stage.gpu for stage in stages})
        """Ranks that host anything."""
        owners = _owners(stages, split)
        for name in split.in_order(owners):
            stage, parameter = owners[name]
            self.place[name] = len(self.dtypes)
            self.ranks[stage.gpu].append(len(self.dtypes))
            self.dtypes.append(sum_dtype(parameter, accumulate))
            self.stages.append(stage.id)
        self._kinds = tuple(_kinds(self.dtypes))

    def told(self, place: int) -> str:
        """A parameter's gradient, for people."""
        name = next(name for name, number in self.place.items() if number == place)
        return f"the gradient of {name!r} (stage {self.stages[place]})"

    def total(self, rows: Mapping[int, Tensor], device: torch.device | None = None) -> Tensor:
        """The norm of the whole gradient.

        Args:
            rows: of each rank that hosts any, the norms of its parameters by ascending place;
                float64, on the host.
            device: a GPU that computes and keeps it; None for the host. A GPU adds in another
                order, so the bits are those of `clip_grad_norm_` where the gradients are.
        """
        values = torch.empty(len(self.dtypes), dtype=torch.float64)
        for rank, row in rows.items():
            values[self.ranks[rank]] = row
        kinds = [values[places].to(dtype) for dtype, places in self._kinds]
        joined = torch.cat(kinds) if kinds else values
        if device is not None:
            joined = joined.pin_memory().to(device, non_blocking=True)
        norm: Tensor = torch.linalg.vector_norm(joined)
        return norm


def _owners(
    stages: Sequence[PlannedStage], split: SplitModel
) -> dict[str, tuple[PlannedStage, nn.Parameter]]:
    """The trained parameters by name, in chain order, each with the first stage that has it."""
    found: dict[str, tuple[PlannedStage, nn.Parameter]] = {}
    for stage in stages:
        for layer in range(stage.first, stage.last + 1):
            for local, parameter in split.layers[layer].named_parameters():
                if parameter.requires_grad:
                    found.setdefault(split.fqns[layer][local], (stage, parameter))
    return found


def norms_of(gradients: list[Tensor]) -> Tensor:
    """The norm of each of `gradients`, where they are, in float64, which holds those of any type.

    Found as torch's `clip_grad_norm_` finds them, those of one dtype together, and not read.
    """
    if len({each.dtype for each in gradients}) == 1:
        return torch.stack(torch._foreach_norm(gradients)).double()  # noqa: SLF001
    found: list[Tensor] = [torch.empty(0)] * len(gradients)
    for _, places in _kinds([each.dtype for each in gradients]):
        norms = torch._foreach_norm([gradients[place] for place in places])  # noqa: SLF001
        for place, norm in zip(places, torch.stack(norms).double().unbind(), strict=True):
            found[place] = norm
    return torch.stack(found)


def _kinds(dtypes: Sequence[torch.dtype]) -> Iterator[tuple[torch.dtype, list[int]]]:
    """Places of one dtype side by side, dtypes in torch's order."""
    likes: list[Tensor | None] = [torch.empty((), dtype=dtype) for dtype in dtypes]
    if likes:
        found = _group_tensors_by_device_and_dtype([likes], with_indices=True)
        for (_, dtype), (_, places) in found.items():
            yield dtype, places
