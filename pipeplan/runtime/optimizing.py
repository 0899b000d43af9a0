"""The user's optimizer and learning-rate schedule, made for some of the parameters."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from pipeplan.errors import InputError


@dataclass(frozen=True, slots=True)
class Optimizing:
    """How parameters are optimized: both functions of the task."""

    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]
    scheduler: Callable[[Optimizer], LRScheduler] | None = None

    def begin(
        self, parameters: Sequence[nn.Parameter], step: int
    ) -> tuple[Optimizer | None, LRScheduler | None]:
        """A new optimizer whose schedule has made `step` steps; (None, None) for no parameters.

        A schedule is a function of the number of updates, so it is replayed, not stored: a run
        may go on with another number of stages, hence of optimizers.

        Raises:
            InputError: if either cannot work here.
        """
        if not parameters:
            return None, None
        optimizer = self.optimizer(list(parameters))
        if isinstance(optimizer, LBFGS):
            raise InputError(
                "task: optimizer: got LBFGS, which computes the loss again and looks at all"
                " parameters at once; need one whose step() takes no argument, such as AdamW"
            )
        if self.scheduler is None:
            return optimizer, None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch: schedule stepped before the optimizer
            scheduler = self.scheduler(optimizer)
            if not isinstance(scheduler, LRScheduler) or isinstance(scheduler, ReduceLROnPlateau):
                raise InputError(
                    f"task: scheduler: got {type(scheduler).__name__}, need a schedule of"
                    " torch.optim.lr_scheduler that depends on the number of updates alone"
                )
            for _ in range(step):
                scheduler.step()
        return optimizer, scheduler


def kept_fields(optimizer: Optimizer) -> dict[nn.Parameter, frozenset[str]]:
    """What a step leaves in the state of each parameter, as torch's own optimizers do it.

    A twin steps on a single zero: which fields there are depends on the group and on the number
    of dimensions (Adafactor). Nothing is known of other optimizers, which may look at more.
    """
    if not type(optimizer).__module__.startswith("torch.optim."):
        return {}
    make: Callable[..., Optimizer] = type(optimizer)
    known: dict[tuple[object, ...], frozenset[str]] = {}
    found = {}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            kind = (number, parameter.dim(), parameter.dtype, parameter.device)
            if kind not in known:
                zero = nn.Parameter(parameter.new_zeros((1,) * parameter.dim()))
                zero.grad = torch.zeros_like(zero)
                twin = make([{**group, "params": [zero]}])
                twin.step()
                known[kind] = frozenset(twin.state[zero])
            found[parameter] = known[kind]
    return found
