"""The fastest way through branches that meet in a tail, all of them chains of blocks with options.

(J3) of docs/reference/remat-rules.md for unequal steps: sizes in bytes take the place of tensors,
blocks with options (RK-Rotor) that of equal steps, and the tail, a chain as well, that of the
turn. After Theorem 3 of O. Beaumont, J. Herrmann, G. Pallez, A. Shilova, *Optimal Memory-aware
Backpropagation of Deep Join Networks* (2019); what is found is the best of nested orders.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt

from pipeplan.errors import InputError
from pipeplan.remat.graph.blocks.rk_rotor import NEVER, ChainBlock, RkRotor, RotorStep

MOST_ENTRIES = 100_000_000
Position = tuple[int, ...]
"""Per branch how many of its blocks have run."""
Needs = Sequence[Sequence[Position]]
"""Per branch and number of its blocks: where other branches are before these may have run."""

_Times = npt.NDArray[np.int64]


@dataclass(frozen=True)
class PartStep:
    """A step of a chain: of a branch by its number, of the tail by the next one."""

    part: int
    step: RotorStep


class JoinTable:
    """Least times from every position of the branches, for all memories up to `most` bytes.

    Memory is what is free beside the outputs of the branches' last blocks that have run.

    Attributes:
        unit: bytes of a slot of memory.
    """

    def __init__(
        self,
        branches: Sequence[Sequence[ChainBlock]],
        tail: Sequence[ChainBlock],
        most: int,
        slots: int = 500,
        needs: Needs | None = None,
    ) -> None:
        """Fills the table.

        Args:
            branches: chains whose last values the tail reads.
            tail: a chain whose last block has the loss.
            most: bytes of the largest memory.
            slots: into which it is divided; sizes are rounded up.
            needs: which positions a branch waits for; None for none.

        Raises:
            InputError: if the branches are too long for the table.
        """
        shape = tuple(len(each) + 1 for each in branches)
        if np.prod([float(each) for each in shape]) * slots > MOST_ENTRIES:
            raise InputError(
                f"join: got branches of {[len(each) for each in branches]} blocks with {slots}"
                f" slots, need the product of all at most {MOST_ENTRIES}. Give fewer slots, or"
                " use method hiremate."
            )
        self.branches, self.slots, self.needs = branches, slots, needs
        self.tail = RkRotor(tail, most, slots)
        self.unit = self.tail.unit
        # Behind a branch waits the gradient of its output: its chain does not end with the loss.
        none = ChainBlock((), 0, 0, 0, 0)
        self.alone = [RkRotor([*each, none], most, slots) for each in branches]
        self._ahead = [
            [_Ahead(self, branch, at) for at in range(len(each))]
            for branch, each in enumerate(branches)
        ]
        # One more slot, where nothing fits, is what lies below no memory.
        self._table = np.full((*shape, slots + 2), NEVER, np.int64)
        self._choice = np.zeros((*shape, slots + 1), np.int32)
        end = tuple(len(each) for each in branches)
        self._table[end][:-1] = self.tail.segment(0, len(tail))
        for position in product(*(range(size - 1, -1, -1) for size in shape)):
            if position != end:
                self._fill(position)

    def units(self, size: int) -> int:
        """Slots that hold `size` bytes."""
        return -(-size // self.unit)

    def time_ns(self, memory: int) -> int | None:
        """The least time within `memory` bytes, ns; None where nothing fits."""
        found = int(self._table[(0,) * len(self.branches)][min(memory // self.unit, self.slots)])
        return None if found >= NEVER else found

    def _waiting(self, position: Position, branch: int) -> int:
        """Bytes of the gradients where other branches are, which take the place of the values."""
        return sum(
            max(0, chain[at - 1].gradient_bytes - chain[at - 1].value_bytes)
            for index, (chain, at) in enumerate(zip(self.branches, position, strict=True))
            if at and index != branch
        )

    def _allowed(self, position: Position, branch: int) -> int:
        """How many blocks of `branch` may have run while the others stay where they are."""
        if self.needs is None:
            return len(self.branches[branch])
        most = position[branch]
        for place in range(position[branch] + 1, len(self.branches[branch]) + 1):
            needed = self.needs[branch][place]
            if any(
                a < b for i, (a, b) in enumerate(zip(position, needed, strict=True)) if i != branch
            ):
                break
            most = place
        return most

    def _ways(self, position: Position) -> Iterator[tuple[int, _Times]]:
        """Per branch that may go on: its number, and times of its ways, one row each."""
        for branch, at in enumerate(position):
            allowed = self._allowed(position, branch)
            if allowed > at:
                rows: list[int | slice] = [*position]
                rows[branch] = slice(at + 1, allowed + 1)
                waiting = self._waiting(position, branch)
                yield branch, self._ahead[branch][at].times(self._table[tuple(rows)], waiting)

    def _fill(self, position: Position) -> None:
        best = self._table[position][:-1]
        choice = self._choice[position]
        for branch, times in self._ways(position):
            index = times.argmin(axis=0)
            found = np.take_along_axis(times, index[None], 0)[0]
            better = found < best
            best[better] = found[better]
            choice[better] = index[better] * len(self.branches) + branch

    def steps(self, memory: int) -> list[PartStep] | None:
        """The schedule within `memory` bytes; None where nothing fits."""
        if self.time_ns(memory) is None:
            return None
        found: list[PartStep] = []
        after: list[list[PartStep]] = []
        position, left = (0,) * len(self.branches), min(memory // self.unit, self.slots)
        while position != tuple(len(each) for each in self.branches):
            way, branch = divmod(int(self._choice[position][left]), len(self.branches))
            at, waiting = position[branch], self._waiting(position, branch)
            options = self.branches[branch][at].options
            if way < len(options):
                end, kept = at + 1, options[way].saved + self.branches[branch][at].value_bytes
                ahead = [RotorStep(at, way)]
                back = [RotorStep(at, way, backward=True)]
            else:
                end = at + 1 + way - len(options)
                kept = self.branches[branch][end - 1].value_bytes
                ahead = [RotorStep(each, None) for each in range(at, end)]
                room = left - self.units(waiting)
                back = self.alone[branch].segment_steps(at, end, room)
            found += (PartStep(branch, each) for each in ahead)
            after.append([PartStep(branch, each) for each in back])
            position = (*position[:branch], end, *position[branch + 1 :])
            left -= self.units(kept)
        tail = self.tail.segment_steps(0, len(self.tail.chain), left)
        found += (PartStep(len(self.branches), each) for each in tail)
        return found + [each for back in reversed(after) for each in back]


class _Ahead:
    """What a branch may do at one of its blocks: options, or forwards alone up to a later one.

    Rows are the options, then the ends of the forwards; columns are slots of memory.
    """

    def __init__(self, table: JoinTable, branch: int, at: int) -> None:
        chain, slots, units = table.branches[branch], table.slots, table.units
        self.units, self.options = units, chain[at].options
        columns = np.arange(slots + 1)
        kept = [units(each.saved + chain[at].value_bytes) for each in self.options]
        kept += [units(each.value_bytes) for each in chain[at:]]
        index = columns - np.array(kept)[:, None]
        self._index = np.where(index < 0, slots + 1, index)
        self._own = np.full((len(kept), slots + 1), NEVER, np.int64)
        for row, option in enumerate(self.options):
            self._own[row, units(option.forward_peak) :] = option.time_ns
        forward = peak = comes = 0
        for row, block in enumerate(chain[at:], start=len(self.options)):
            peak = max(peak, comes + block.forward_peak)
            forward, comes = forward + block.forward_ns, block.value_bytes
            self._own[row, units(peak) :] = forward
        ends = range(at + 1, len(chain) + 1)
        self._alone = np.array([table.alone[branch].segment(at, end) for end in ends])

    def times(self, rest: _Times, waiting: int) -> _Times:
        """Times of all ways.

        Args:
            rest: of what comes between, per end of the forwards that are allowed; a last column
                more, where nothing fits.
            waiting: bytes of gradients of other branches while this one runs backward.
        """
        count, ends = len(self.options), len(rest)
        rows = np.concatenate([np.broadcast_to(rest[0], (count, rest.shape[1])), rest])
        found = self._own[: count + ends] + np.take_along_axis(
            rows, self._index[: count + ends], axis=1
        )
        back = self.units(waiting)
        for row, option in enumerate(self.options):
            found[row, : self.units(option.backward_peak + waiting)] = NEVER
        wide = max(0, found.shape[1] - back)
        found[count:, : found.shape[1] - wide] = NEVER
        found[count:, found.shape[1] - wide :] += self._alone[:ends, :wide]
        capped: _Times = np.minimum(found, NEVER)
        return capped
