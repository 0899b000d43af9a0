"""What one rank trains, and how."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pipeplan.plan import Plan
from pipeplan.program import Pattern
from pipeplan.split_model import SplitModel
from pipeplan.task import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingJob:
    """What is trained: alike on all ranks, but for the layers that only their rank has."""

    plan: Plan
    pattern: Pattern
    """The lowered plan."""
    task: Task
    split: SplitModel
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOptions:
    """How it is trained."""

    timeout_ns: int
    """Longest wait for another rank."""
    first_step: int = 0
    """Steps that were done before."""
    drawn: int = 0
    """Micro-batches of the data that these used."""
    out: Path | None = None
    """A directory that all ranks are known to share."""
    background: bool = False
    """Whether checkpoints are written beside the training."""
    keep: int | None = None
    """Complete checkpoints that stay, the newest ones; None: all."""
    allow_nonfinite: bool = False
    """Whether to train on where a number is not finite."""
    drops: bool = True
    """Whether a long step that all ranks are to stop in may be dropped, not finished."""
    counts_bytes: bool = False
    """Whether live bytes are counted all the time."""
    reports: bool = False
    """Whether the observer hears of gradient norms and learning rates (`Observer.stepped`)."""
    samples_bytes: bool = False
    """Whether those of a step now and then are counted, term by term."""
