"""Chains that meet at the loss: the fastest order of equal steps within a number of tensors.

Opt_b-multi of Theorem 3 in O. Beaumont, J. Herrmann, G. Pallez, A. Shilova, *Optimal Memory-aware
Backpropagation of Deep Join Networks* (2019); equations (J1)-(J4) of
docs/reference/remat-rules.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from pipeplan.errors import InfeasibleError, InputError, InternalError
from pipeplan.remat.arrays import Floats
from pipeplan.remat.checkpointing.join_replay import JoinKind, JoinStep
from pipeplan.remat.checkpointing.revolve import opt_0


@dataclass(frozen=True)
class JoinTimes:
    """Time of a forward, of a backward and of the turn (the loss, forward and backward)."""

    forward: float = 1
    backward: float = 1
    turn: float = 1


def least_slots(lengths: Sequence[int]) -> int:
    """c_min of Lemma 4: the fewest tensors that any order of `lengths` needs (J4)."""
    branches = len(lengths)
    if not any(lengths):
        return branches
    base = branches + sum(length > 0 for length in lengths)
    return base if any(length <= 1 for length in lengths) else base + 1


class JoinProgram:
    """The least time of a join of `lengths` within `slots`, and the steps that take it.

    The gradient at the front of a branch is kept where the branch has begun, so that what is left
    of the branches says which of them are kept: b of (J3) is no dimension of the table.

    Attributes:
        span: time of every step once; no order is faster.
    """

    def __init__(self, lengths: Sequence[int], slots: int, times: JoinTimes | None = None) -> None:
        """Solve (J1)-(J3) for all that may be left of the branches.

        Raises:
            InputError: if there is no branch, or a length is negative.
            InfeasibleError: if `slots` is below `least_slots`.
        """
        if not lengths or min(lengths) < 0:
            raise InputError(
                f"join: got lengths {list(lengths)}, need at least one, none negative."
            )
        least = least_slots(lengths)
        if slots < least:
            at = "the turn" if not any(lengths) else f"branches of {list(lengths)} steps"
            raise InfeasibleError(
                f"join: got {slots} slots, need at least {least}: {at} hold that many tensors"
                f" at once. Give at least {least} slots."
            )
        self.lengths, self.slots = tuple(lengths), slots
        self.times = times or JoinTimes()
        steps = self.times.forward + self.times.backward
        self.span = sum(lengths) * steps + self.times.turn
        top = max(lengths)
        self._alone = opt_0(top, slots, self.times.forward, self.times.backward)
        self._shorter: dict[tuple[int, ...], JoinProgram] = {}
        self._table = np.full((*(each + 1 for each in lengths), slots + 1), np.inf)
        for rest in product(*(range(each + 1) for each in lengths)):
            self._table[rest] = self._solve(rest)

    @property
    def time(self) -> float:
        """The least time of the whole join."""
        return self.time_of(self.lengths, self.slots)

    def time_of(self, lengths: Sequence[int], slots: int) -> float:
        """The least time of a join no longer, with no more slots; infinite where none fits."""
        wanted = tuple(lengths)
        if wanted == self.lengths:
            return float(self._table[wanted][slots])
        if wanted not in self._shorter:
            self._shorter[wanted] = JoinProgram(wanted, self.slots, self.times)
        return self._shorter[wanted].time_of(wanted, slots)

    def _solve(self, rest: tuple[int, ...]) -> Floats:
        best: Floats = np.full(self.slots + 1, np.inf)
        if not any(rest):
            best[len(rest) :] = self.times.turn
            return best
        for branch, length in enumerate(rest):
            if length:
                best = np.minimum(best, self._choices(rest, branch).min(axis=0))
        return best

    def _others(self, rest: tuple[int, ...], branch: int) -> int:
        """Branches other than `branch` that have begun: their front gradients are kept."""
        pairs = enumerate(zip(rest, self.lengths, strict=True))
        return sum(left < length for index, (left, length) in pairs if index != branch)

    def _choices(self, rest: tuple[int, ...], branch: int) -> Floats:
        """(J3) for one branch: row i - 1 takes i forwards first; one column per slot count."""
        length, others = rest[branch], self._others(rest, branch)
        rows: list[int | slice] = [*rest]
        rows[branch] = slice(None, length)
        inner = self._table[tuple(rows)][::-1]
        result = np.full((length, self.slots + 1), np.inf)
        columns = np.arange(1, self.slots + 1)
        alone = self._alone[:length, np.maximum(columns - others, 0)]
        ahead = np.arange(1, length + 1)[:, None] * self.times.forward
        result[:, 1:] = ahead + inner[:, :-1] + alone
        return result

    def steps(self) -> tuple[JoinStep, ...]:
        """An order of steps that takes `time` with at most `slots` tensors."""
        found: list[JoinStep] = []
        after: list[tuple[int, int, int, int, bool]] = []
        rest, slots = self.lengths, self.slots
        while any(rest):
            branch, ahead = self._choose(rest, slots)
            start = self.lengths[branch] - rest[branch]
            found += _sweep(branch, start, start + ahead)
            own = slots - self._others(rest, branch)
            after.append((branch, start, ahead - 1, own, not start))
            rest = (*rest[:branch], rest[branch] - ahead, *rest[branch + 1 :])
            slots -= 1
        found.append(JoinStep(JoinKind.TURN, 0, 0))
        found += [
            JoinStep(JoinKind.FREE, branch, 0)
            for branch, length in enumerate(self.lengths)
            if not length
        ]
        for branch, start, length, own, last in reversed(after):
            found += self._chain(branch, start, length, own)
            if last:
                found.append(JoinStep(JoinKind.FREE, branch, start))
        return tuple(found)

    def _choose(self, rest: tuple[int, ...], c: int) -> tuple[int, int]:
        target = self._table[rest][c]
        for branch, length in enumerate(rest):
            if length:
                column = self._choices(rest, branch)[:, c]
                if column.min() == target:
                    return branch, int(column.argmin()) + 1
        raise InternalError(
            f"join: no choice at {rest} with {c} slots takes the least time {target}."
            " This is a bug of pipeplan; please report it with the lengths."
        )

    def _chain(self, branch: int, start: int, length: int, slots: int) -> list[JoinStep]:
        """(C9) on one branch from tensor `start` and the gradient behind step start + length."""
        found: list[JoinStep] = []
        todo = [(start, length, slots)]
        while todo:
            first, size, c = todo.pop()
            if size == 0:
                found.append(JoinStep(JoinKind.BACKWARD, branch, first))
                continue
            ahead = np.arange(1, size + 1)
            inner = self._alone[size - ahead, c - 1] + self._alone[ahead - 1, c]
            cut = 1 + int((ahead * self.times.forward + inner).argmin())
            found += _sweep(branch, first, first + cut)
            todo += [(first, cut - 1, c), (first + cut, size - cut, c - 1)]
        return found


def _sweep(branch: int, start: int, stop: int) -> list[JoinStep]:
    first = JoinStep(JoinKind.KEEP_INPUT, branch, start)
    rest = [JoinStep(JoinKind.KEEP_NOTHING, branch, index) for index in range(start + 1, stop)]
    return [first, *rest]
