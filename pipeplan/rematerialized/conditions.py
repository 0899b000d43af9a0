"""What a plan was made for; calls under other conditions are refused."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pipeplan.errors import InputError
from pipeplan.rematerialized.parts import Parts
from pipeplan.rematerialized.precision import Autocast, autocast


@dataclass(frozen=True, slots=True)
class Conditions:
    """Of one call."""

    device: torch.device
    shape: tuple[int, ...]
    dtype: torch.dtype
    gradient: bool
    """Whether the input has one."""
    modes: tuple[bool, ...]
    """Per submodule: whether it trains."""
    trained: tuple[bool, ...]
    """Per parameter."""
    autocast: Autocast

    @classmethod
    def of(cls, parts: Parts, source: Tensor) -> Conditions:
        """Those of a call with `source` here and now."""
        return cls(
            source.device,
            tuple(source.shape),
            source.dtype,
            source.requires_grad,
            tuple(each.training for each in parts.submodules),
            tuple(parameter.requires_grad for parameter in parts.parameters),
            autocast(source.device),
        )

    def check(self, now: Conditions) -> None:
        """Raises InputError where `now` differs."""
        if now == self:
            return
        what = {
            "device of the input": (now.device, self.device),
            "input": (
                f"{now.dtype} of shape {list(now.shape)}",
                f"{self.dtype} of shape {list(self.shape)}",
            ),
            "requires_grad of the input": (now.gradient, self.gradient),
            "training modes of the submodules": (_sum(now.modes), _sum(self.modes)),
            "requires_grad of the parameters": (_sum(now.trained), _sum(self.trained)),
            "autocast": (now.autocast, self.autocast),
        }
        for name, (got, need) in what.items():
            if got != need:
                raise InputError(
                    f"rematerialized module: {name}: got {got}, need {need} as it was planned."
                    " Call rematerialize again for this, or leave the odd batch out."
                )


def _sum(flags: tuple[bool, ...]) -> str:
    """Which ones are off."""
    off = [str(index) for index, flag in enumerate(flags) if not flag]
    return f"all on but {', '.join(off)}" if off else "all on"
