"""Whether an optimizer keeps no more of its layer than the plan's chain counts.

The digest of a task does not know its optimizer: functions have no name that two processes agree
on. So bytes are compared, as soon as a step has made them.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_iter

from pipeplan.errors import InputError
from pipeplan.livebytes import storage_bytes
from pipeplan.plan import Plan
from pipeplan.split_model import SplitModel
from pipeplan.units import format_bytes


@dataclass(slots=True)
class StateRoom:
    """Of one layer's optimizer."""

    layer: str
    """Name in the chain."""
    size_bytes: int
    """What the chain has for the optimizer's state and master weights."""
    master_bytes: int = 0
    """Of the master weights that the optimizer steps."""
    _parameters: int = 0
    """How many have been looked at."""

    def check(self, optimizer: Optimizer) -> None:
        """Refuse state for which there is no room; looks at it when that of a parameter has come.

        Raises:
            InputError: if there is more than the chain counts.
        """
        if len(optimizer.state) == self._parameters:
            return
        self._parameters = len(optimizer.state)
        entries = tree_iter(list(optimizer.state.values()))
        got = self.master_bytes + storage_bytes(
            each for each in entries if isinstance(each, Tensor)
        )
        if got > self.size_bytes:
            raise InputError(
                f"task: optimizer: {type(optimizer).__name__} keeps {format_bytes(got)} of states"
                f" for layer {self.layer!r}, the plan's chain has {format_bytes(self.size_bytes)}:"
                " it was profiled with another optimizer or other options of it, and the run would"
                " need more memory than planned. Profile and plan again with this optimizer."
            )


def rooms_of(plan: Plan, split: SplitModel) -> dict[nn.Parameter, tuple[str, int]]:
    """Of each parameter its layer's name, and the bytes of states that the chain has for it.

    Empty where the chain was not profiled from a task. A parameter that several layers share
    counts in the first of them.
    """
    found: dict[nn.Parameter, tuple[str, int]] = {}
    if not plan.task_digest:
        return found
    for layer, module in zip(plan.chain.layers, split.layers, strict=True):
        # Buffers of a rank may lie closer than those that were profiled, as sparse ones do.
        rest = layer.frozen_bytes + min(layer.buffer_bytes, storage_bytes(module.buffers()))
        for parameter in module.parameters():
            found.setdefault(parameter, (layer.name, layer.optimizer_bytes - rest))
    return found
