"""Forward passes of the newest weights in eval mode, between two steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from pipeplan.eval_switch import switch_to_eval
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
    layers = [layer for stage in stages.values() for layer in stage.spec.layers]
    modes = {module: module.training for layer in layers for module in layer.modules()}
    own: list[nn.Module] = []
    try:
        own += switch_to_eval(layers)
        yield
    finally:
        for module in own:
            module.train(modes[module])
        for module, training in modes.items():
            module.training = training


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
