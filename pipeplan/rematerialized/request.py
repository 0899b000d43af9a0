"""What one call of `rematerialize` asks for, checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import nn

from pipeplan.capture.layer_costs.device_clock import ModelDevice
from pipeplan.rematerialized.measured import Sample

Module = TypeVar("Module", bound=nn.Module)


@dataclass(frozen=True)
class RematerializationRequest(Generic[Module]):
    """A module, its sample, and what it is to keep.

    Attributes:
        module: in training mode.
        sample: an input, and the loss with its target.
        place: the device, and its clock.
        limit: bytes.
        reserve: bytes that others take all the time.
        offload: whether tensors may wait on the host.
        host_bandwidth: of the way there; measured where it is None.
        method: a name in `pipeplan.remat.METHODS`, or `auto` for the best of them.
        slots: memory units of the dynamic programs.
        max_layers: into which layers are merged, or None.
        repeats: times that all is timed.
        time_limit_s: seconds for a search among programs of operators.
        say: takes one line of progress.
    """

    module: Module
    sample: Sample
    place: ModelDevice
    limit: int
    reserve: int
    offload: bool
    host_bandwidth: str | None
    method: str
    slots: int
    max_layers: int | None
    repeats: int
    time_limit_s: float
    say: Callable[[str], None]

    @property
    def touched(self) -> list[nn.Module]:
        """What measuring runs: the module, and a loss that is one."""
        loss = self.sample.loss[0] if self.sample.loss else None
        return [self.module, *([loss] if isinstance(loss, nn.Module) else [])]
