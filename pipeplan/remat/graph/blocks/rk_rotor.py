"""RK-Rotor: the fastest way through a chain of blocks with options (X. Zhao's thesis, 2.5).

Two corrections of the equations as printed. (2.20) repeats Opt(s, t, .) on its right side; it must
say Opt(s + 1, t, .), as Algorithm 6 does. And it takes x_s off the memory, which Opt(s, t, m)
does not count, where the next subproblem keeps x_(s+1): here an option takes off what it saves and
x_(s+1). Further than the thesis, the gradient of a subproblem's output is counted while its
forwards run again, as m_empty of Rotor has it (section 2.1.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipeplan.errors import InputError
from pipeplan.remat.graph.blocks.options import BlockOption

NEVER = np.iinfo(np.int64).max // 4
"""ns: what cannot be done."""
_MOST_ENTRIES = 400_000_000


@dataclass(frozen=True)
class ChainBlock:
    """A block as the dynamic program sees it.

    Attributes:
        options: ways to run it forward and backward.
        value_bytes: of its output, the next block's input.
        gradient_bytes: of the gradient of its output.
        forward_ns: time of its forward alone.
        forward_peak: bytes of its forward where nothing is kept but the output.
    """

    options: Sequence[BlockOption]
    value_bytes: int
    gradient_bytes: int
    forward_ns: int
    forward_peak: int


@dataclass(frozen=True)
class RotorStep:
    """A piece of the schedule: a block's forward alone, or with an option, or its backward.

    Attributes:
        block: its index.
        option: index of the option; None where nothing is kept.
        backward: whether this is the backward.
    """

    block: int
    option: int | None
    backward: bool = False


_Times = npt.NDArray[np.int64]


class RkRotor:
    """The table Opt(s, t, m) of a chain, for all memories up to `most`.

    Attributes:
        unit: bytes of a slot of memory.
    """

    def __init__(
        self, chain: Sequence[ChainBlock], most: int, slots: int = 2000, reserve: int = 0
    ) -> None:
        """Fills the table.

        Args:
            chain: the blocks.
            most: bytes of the largest memory.
            slots: into which it is divided.
            reserve: bytes that must be left at the end of the forward; memory less this is what
                may be saved.

        Raises:
            InputError: if the chain is too long for the table.
        """
        self.chain, self.slots, self.reserve = chain, slots, reserve
        self.unit = max(1, -(-most // slots))
        if len(chain) ** 2 * slots > _MOST_ENTRIES:
            raise InputError(
                f"chain: got {len(chain)} blocks with {slots} slots, need blocks * blocks * slots"
                f" at most {_MOST_ENTRIES}. Give fewer slots."
            )
        self._table: dict[tuple[int, int], _Times] = {}
        self._choice: dict[tuple[int, int], _Times] = {}
        for length in range(1, len(chain) + 1):
            for begin in range(len(chain) - length + 1):
                self._fill(begin, begin + length)

    def _units(self, size: int) -> int:
        return -(-size // self.unit)

    def time_ns(self, memory: int) -> int | None:
        """The least time within `memory` bytes, ns; None where nothing fits."""
        found = int(self._table[0, len(self.chain)][min(memory // self.unit, self.slots)])
        return None if found >= NEVER else found

    @property
    def least_memory(self) -> int | None:
        """Bytes of the smallest memory within which anything fits; None where nothing does."""
        times = self._table[0, len(self.chain)]
        fitting = np.flatnonzero(times < NEVER)
        return int(fitting[0]) * self.unit if len(fitting) else None

    def _fill(self, begin: int, end: int) -> None:
        best = np.full(self.slots + 1, NEVER, np.int64)
        choice = np.zeros(self.slots + 1, np.int64)
        for index, (cost, times) in enumerate(self._ways(begin, end)):
            better = times + cost < best
            best[better], choice[better] = times[better] + cost, index
        self._table[begin, end], self._choice[begin, end] = best, choice

    def _ways(self, begin: int, end: int) -> list[tuple[int, _Times]]:
        """Options first (2.20), then places of the next kept value (2.21)."""
        block = self.chain[begin]
        back = self._incoming(end)
        found = []
        for option in block.options:
            least = max(option.forward_peak + back, option.backward_peak)
            if end == len(self.chain) == begin + 1:
                least = max(least, option.saved + self.reserve)
            if end == begin + 1:
                rest: _Times = np.zeros(self.slots + 1, np.int64)
            else:
                kept = self._units(option.saved + block.value_bytes)
                rest = _shifted(self._table[begin + 1, end], kept)
            found.append((option.time_ns, _valid(rest, self._units(least))))
        forward, peak = 0, 0
        for place in range(begin + 1, end):
            before = self.chain[place - 1]
            comes = 0 if place - 1 == begin else self.chain[place - 2].value_bytes
            peak = max(peak, comes + before.forward_peak + back)
            forward += before.forward_ns
            kept = self._units(before.value_bytes)
            both = _shifted(self._table[place, end], kept) + self._table[begin, place]
            found.append((forward, _valid(np.minimum(both, NEVER), self._units(peak))))
        return found

    def _incoming(self, end: int) -> int:
        """Bytes of the gradient that waits while forwards run again; none in the first forward."""
        return 0 if end == len(self.chain) else self.chain[end - 1].gradient_bytes

    def steps(self, memory: int) -> list[RotorStep] | None:
        """The schedule within `memory` bytes (Algorithm 6); None where nothing fits."""
        if self.time_ns(memory) is None:
            return None
        return self.segment_steps(0, len(self.chain), min(memory // self.unit, self.slots))

    def segment(self, begin: int, end: int) -> _Times:
        """Least times of blocks begin..end-1, by slots of memory; `NEVER` where nothing fits."""
        return self._table[begin, end]

    def segment_steps(self, begin: int, end: int, slots: int) -> list[RotorStep]:
        """The schedule of these blocks within so many slots, which must be enough."""
        found: list[RotorStep] = []
        self._build(begin, end, slots, found)
        return found

    def _build(self, begin: int, end: int, memory: int, found: list[RotorStep]) -> None:
        """Unrolled where one block follows the other, so that long chains need no deep stack."""
        open_blocks = []
        while True:
            block, choice = self.chain[begin], int(self._choice[begin, end][memory])
            if choice >= len(block.options):
                place = begin + 1 + choice - len(block.options)
                found.extend(RotorStep(each, None) for each in range(begin, place))
                kept = self._units(self.chain[place - 1].value_bytes)
                self._build(place, end, memory - kept, found)
                end = place
                continue
            found.append(RotorStep(begin, choice))
            open_blocks.append(RotorStep(begin, choice, backward=True))
            if end == begin + 1:
                break
            memory -= self._units(block.options[choice].saved + block.value_bytes)
            begin += 1
        found.extend(reversed(open_blocks))


def _shifted(times: _Times, by: int) -> _Times:
    """Times with `by` slots less memory."""
    if by >= len(times):
        return np.full(len(times), NEVER, np.int64)
    return np.concatenate([np.full(by, NEVER, np.int64), times[: len(times) - by]])


def _valid(times: _Times, least: int) -> _Times:
    """Times where memory is at least `least` slots."""
    found = times.copy()
    found[:least] = NEVER
    return found
