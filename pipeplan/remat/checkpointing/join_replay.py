"""The steps of a join of equal layers, and the judge that counts their tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from pipeplan.errors import InvalidPlanError


class JoinKind(StrEnum):
    """What a step does; forwards and backwards write where an input was that they give up."""

    KEEP_INPUT = "F_ck"
    KEEP_NOTHING = "F_none"
    TURN = "turn"
    """The loss: every branch's last tensor becomes its gradient."""
    BACKWARD = "B"
    FREE = "free"
    """Give up the gradient at the front of a branch."""


@dataclass(frozen=True)
class JoinStep:
    """A step of `branch`, from its tensor `index` (a forward) or to its gradient (a backward)."""

    kind: JoinKind
    branch: int
    index: int

    def __str__(self) -> str:
        if self.kind is JoinKind.TURN:
            return str(self.kind)
        return f"{self.kind} {self.branch}.{self.index}"


Tensor = tuple[str, int, int]
"""("x" or "g", branch, index)."""


def replay_join(lengths: Sequence[int], steps: Sequence[JoinStep]) -> int:
    """The most tensors in memory at once over `steps`, from all inputs to all gradients.

    Raises:
        InvalidPlanError: if a step lacks an input, or something is left at the end.
    """
    held: set[Tensor] = {("x", branch, 0) for branch in range(len(lengths))}
    done = {branch: length for branch, length in enumerate(lengths)}
    peak = len(held)
    for number, step in enumerate(steps):
        gone, made = effect(lengths, step)
        missing = gone - held
        if missing:
            name, branch, index = min(missing)
            raise InvalidPlanError(
                f"step {number}, {step}: needs {name}{index} of branch {branch},"
                " which is not there."
            )
        held = held - gone | made
        peak = max(peak, len(held))
        if step.kind is JoinKind.BACKWARD:
            done[step.branch] -= 1
    if held or any(done.values()):
        raise InvalidPlanError(f"the end: {len(held)} tensors left, backwards missing: {done}.")
    return peak


def effect(lengths: Sequence[int], step: JoinStep) -> tuple[set[Tensor], set[Tensor]]:
    """Tensors that `step` reads and gives up, and tensors that are there after it instead."""
    branch, index = step.branch, step.index
    if step.kind is JoinKind.TURN:
        ends = list(enumerate(lengths))
        return {("x", at, end) for at, end in ends}, {("g", at, end) for at, end in ends}
    if step.kind is JoinKind.BACKWARD:
        return {("x", branch, index), ("g", branch, index + 1)}, {("g", branch, index)}
    if step.kind is JoinKind.FREE:
        return {("g", branch, 0)}, set()
    source: Tensor = ("x", branch, index)
    target: Tensor = ("x", branch, index + 1)
    kept = {source} if step.kind is JoinKind.KEEP_INPUT else set()
    return {source}, {target} | kept
