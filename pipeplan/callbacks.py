"""What `launch` tells of a run while it goes: to its log and files, and to callbacks of a task.

Data only; torch is not imported. One rank tells: the one with the losses, of the first replica.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStart:
    """What is about to be trained."""

    steps: int
    """In total, those before a resume included."""
    first_step: int
    """Steps done before."""
    semantics: str
    """`flush` or `2bw`."""
    microbatches: int
    """Per step and replica."""
    gpus: int
    """Of one replica."""
    replicas: int
    seed: int
    task: str | None
    """Its reference."""
    plan_digest: str
    out: str | None
    """The folder of the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """One step, once all stages have made their weights of it."""

    step: int
    """Steps done, this one included."""
    loss: float
    """Mean over the step's micro-batches."""
    gradient_norm: float
    """Of the whole gradient as the optimizer gets it, before clipping."""
    learning_rates: tuple[float, ...]
    """Of the step's update: those of all parameter groups, each once, the largest first."""
    step_ns: int
    """Since the step before, whose end is its update, or, where that waits for other stages under
    2bw, its last backward; for the first step since the start."""
    period_ns: float | None
    """Of k micro-batches: mean between the backwards of this step on the last stage."""
    units_per_s: float
    memory_bytes: int
    """Largest resident size of this process so far."""
    allocated_bytes: int | None
    """The most so far by torch's allocator on this rank's GPU; None on the processor."""
    reserved_bytes: int | None
    """The same with the allocator's gaps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationResult:
    """The newest weights on the validation data, in eval mode."""

    step: int
    """Steps that made the weights."""
    loss: float
    """Mean over all micro-batches; so is each metric."""
    metrics: Mapping[str, float]
    """By name, without the loss."""
    microbatches: int
    elapsed_ns: int
    best: bool | None
    """Whether it is the best so far; None where nobody asked for the best."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCheckpoint:
    """A checkpoint; under --save-in-background it is complete once `path`/.metadata exists."""

    step: int
    path: str
    best: bool | None
    """As in the validation of this step; None where there was none."""


EndReason = Literal["complete", "stopped", "not finite"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """How a run ended that did not fail."""

    step: int
    """Steps done."""
    reason: EndReason
    """All steps are done; a signal came; a number was not finite."""


class Callback:
    """Called by one rank, in the order of what happens; the run waits meanwhile.

    This one does nothing: who wants to hear of something overrides the method. Any object with
    these methods will do.
    """

    def start(self, run: RunStart) -> None:
        """The run begins, or goes on."""

    def step(self, step: StepMetrics) -> None:
        """A step is over."""

    def validation(self, result: ValidationResult) -> None:
        """The newest weights were validated."""

    def checkpoint(self, saved: SavedCheckpoint) -> None:
        """A checkpoint was saved."""

    def end(self, end: RunEnd) -> None:
        """The run ends; never called for one that fails."""


CALLED = ("start", "step", "validation", "checkpoint", "end")
"""The methods of a callback."""
