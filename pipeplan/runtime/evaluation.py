"""Forward passes of the newest weights in eval mode, between two steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from pipeplan.empty import is_empty
from pipeplan.layout import overwrite
from pipeplan.program import ActionKind, Pattern
from pipeplan.runtime.data.feed import Feed
from pipeplan.runtime.executor import Executor
from pipeplan.runtime.interfaces import LossRecord, StepPolicy
from pipeplan.runtime.stages.segment import Heard
from pipeplan.runtime.stages.stage import StageRunner
from pipeplan.runtime.supervision.run_ahead import RunAhead
from pipeplan.runtime.supervision.stop_consensus import NeverStop
from pipeplan.runtime.transport.base import Transport
from pipeplan.runtime.transport.endpoints import StageEndpoints

_FORWARD = {ActionKind.F, ActionKind.RECV_F, ActionKind.SEND_F, ActionKind.FREE_F}


def evaluate(
    pattern: Pattern,
    stages: Mapping[int, StageRunner],
    endpoints: Mapping[int, StageEndpoints],
    feed: Feed,
    transport: Transport,
    microbatches: int,
    ahead: RunAhead | None = None,
    heard: Heard | None = None,
) -> dict[int, float]:
    """The loss of each micro-batch; known on the rank with the last stage, empty elsewhere.

    All ranks call it at the same step, with an empty pipeline. The program is the pattern's
    forward half: what waits there waits for what comes earlier, so it ends as well.

    Args:
        pattern: of the training.
        stages: those this rank hosts.
        endpoints: their messages.
        feed: gives micro-batches 0..microbatches-1.
        transport: to the other ranks.
        microbatches: how many, at least 1.
        ahead: that of the training.
        heard: hears what the loss is given, micro-batch by micro-batch in order.
    """
    ranks = tuple(tuple(a for a in rank if a.kind in _FORWARD) for rank in pattern.ranks)
    half = replace(pattern, ranks=ranks, microbatches=microbatches, semantics="2bw")
    observer = LossRecord()
    hosted = {index: _Evaluated(stage, heard) for index, stage in stages.items()}
    with _eval_mode(stages):
        ends = half, hosted, endpoints, feed, transport, observer, NeverStop()
        Executor(*ends, updates=StepPolicy(), ahead=ahead).run(0, 1)
    return observer.losses


@contextmanager
def _eval_mode(stages: Mapping[int, StageRunner]) -> Iterator[None]:
    modes = {m: m.training for s in stages.values() for x in s.spec.layers for m in x.modules()}
    switched: list[nn.Module] = []
    try:
        for module in modes:
            module.training = False
        for module in _with_own_switch(modes):
            if _switch(module):
                switched.append(module)
        yield
    finally:
        for module in switched:
            module.train(True)
        for module, training in modes.items():
            module.training = training


def _with_own_switch(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Those with a `train()` of their own, without what is inside of another one."""
    own = [module for module in modules if type(module).train is not nn.Module.train]
    inner = {part for module in own for part in module.modules() if part is not module}
    return [module for module in own if module not in inner]


def _switch(module: nn.Module) -> bool:
    """Whether the module's own `train(False)` was called, and has changed no weight.

    One that changes weights (LoRA that is merged) stays as in training, but for its flags: its
    weights have versions, are trained, and must keep their bits.
    """
    weights = [*module.parameters(), *module.buffers()]
    if any(map(is_empty, weights)):
        return False
    kept = [each.detach().clone() for each in weights]
    module.train(False)
    pairs = list(zip(weights, kept, strict=True))
    if all(torch.equal(each.detach(), value) for each, value in pairs):
        return True
    module.train(True)
    for each, value in pairs:
        overwrite(each, value)
    for part in module.modules():
        part.training = False
    return False


@dataclass(frozen=True, slots=True)
class _Evaluated:
    """A stage whose forwards leave no graph."""

    stage: StageRunner
    heard: Heard | None
    in_flight = 0

    @property
    def weights(self) -> _Unchanged:
        """Nothing is updated."""
        return _Unchanged()

    def forward(
        self, microbatch: int, inputs: list[Tensor], target: Callable[[int], Any]
    ) -> list[Tensor]:
        """See `StageRunner`."""
        return self.stage.evaluate(microbatch, inputs, target, self.heard)

    def backward(self, microbatch: int, gradients: list[Tensor]) -> list[Tensor]:
        """Never comes."""
        raise NotImplementedError

    def weight_backward(self, microbatch: int) -> None:
        """Never comes."""

    def offload(self, microbatch: int) -> None:
        """Never comes."""

    def free(self, microbatch: int) -> None:
        """Never comes."""

    def prefetch(self, microbatch: int) -> None:
        """Never comes."""


class _Unchanged:
    """Weights that no OPT of the program changes."""

    version = 0

    def update(self, step: int) -> None:
        """Never comes."""
