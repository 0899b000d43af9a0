"""What the executor asks of its surroundings: an observer, stages, and when they update."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from pipeplan.memory_terms import Purpose
from pipeplan.program import Action


class Observer:
    """Told what happens; only the rank with the last stage tells losses and backwards.

    This one does nothing: who wants to hear of something overrides the method.
    """

    def loss(self, microbatch: int, value: float) -> None:
        """The loss of one micro-batch, told before the last stage's update of its step."""

    def backward(self, microbatch: int, end_ns: int) -> None:
        """The last stage's backward of `microbatch`, or the first half of it, ended."""

    def updated(self, stage: int, step: int) -> None:
        """`stage` made its weights of step `step`."""

    def stepped(self, step: int, norm: float, rates: tuple[float, ...]) -> None:
        """All stages made their weights of `step`; told in a session that `reports` steps.

        Args:
            step: 0-based.
            norm: of the whole gradient, before clipping; not finite where it was not.
            rates: learning rates of the update, each once, the largest first.
        """


class MemoryMeter:
    """Told what a rank does while a step is sampled; this one samples none."""

    samples = False
    """Whether actions are told now."""

    def begin_step(self, step: int) -> None:
        """The first action of `step` comes next."""

    def begin(self, action: Action) -> None:
        """`action` begins."""

    def end(self, action: Action) -> None:
        """`action` has ended."""

    def hand_on(
        self, purpose: Purpose, stage: int, microbatch: int, tensors: list[Tensor]
    ) -> None:
        """`stage` has made `tensors`, which wait for their message or the next stage."""


@dataclass(frozen=True, slots=True)
class LossRecord(Observer):
    """Keeps the losses."""

    losses: dict[int, float] = field(default_factory=dict)
    """By micro-batch."""

    def loss(self, microbatch: int, value: float) -> None:
        """See `Observer`."""
        self.losses[microbatch] = value


class StageWeights(Protocol):
    """The weights of a stage."""

    @property
    def version(self) -> int:
        """Updates made."""

    def update(self, step: int) -> None:
        """Make version `step + 1`."""


class HostedStage(Protocol):
    """A stage as the executor sees it: `StageRunner` in a training, `TimedStage` in a dry run."""

    @property
    def in_flight(self) -> int:
        """Micro-batches between their forward and the end of their backward, both halves of it."""

    @property
    def weights(self) -> StageWeights:
        """What an OPT updates."""

    def forward(
        self, microbatch: int, inputs: list[Tensor], target: Callable[[int], Any]
    ) -> list[Tensor]:
        """Outputs for `microbatch`; the last stage's is its loss."""

    def backward(self, microbatch: int, gradients: list[Tensor]) -> list[Tensor]:
        """Gradients of the stage's inputs; waits for what is on its way back from the host.

        Those of weights add up, or wait for `weight_backward` where the plan splits the backward.
        """

    def weight_backward(self, microbatch: int) -> None:
        """The gradients of weights that `backward` left add up."""

    def offload(self, microbatch: int) -> None:
        """Begin to copy what waits for the backward to the host."""

    def free(self, microbatch: int) -> None:
        """Wait for that copy, and give the bytes back."""

    def prefetch(self, microbatch: int) -> None:
        """Begin to bring it back."""


class StepPolicy:
    """When the stages of a rank update; this one never does."""

    def begin(self, first: int) -> None:
        """A run starts from an empty pipeline at step `first`."""

    def before_forward(self, stage: int, step: int) -> None:
        """A forward of `step` comes next on `stage`."""

    def after_backwards(self, stage: int, step: int) -> None:
        """The last backward of `step` on `stage` is over; its OPT comes later."""

    def end_step(self, stage: int) -> None:
        """An OPT: the gradients of the oldest open step of `stage` are complete."""

    def finish(self) -> None:
        """The pipeline is empty."""

    def turn_back(self, step: int) -> None:
        """All from `step` on was dropped: leave nothing of it."""


@dataclass(frozen=True, slots=True)
class ImmediateSteps(StepPolicy):
    """Every stage updates at its OPT."""

    stages: Mapping[int, HostedStage]
    observer: Observer

    def end_step(self, stage: int) -> None:
        """See `StepPolicy`."""
        weights = self.stages[stage].weights
        weights.update(weights.version)
        self.observer.updated(stage, weights.version - 1)
