"""The user's optimizer and learning-rate schedule, made for some of the parameters."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

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
