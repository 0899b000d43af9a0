"""ZB-V, V-Half and V-Min: a V of two stages per GPU whose steps repeat a building block.

Stage s < P is on GPU s, stage s >= P on GPU 2 P - 1 - s. In units of one op of a stage
(f = i = w), a *building block* says when the six ops of one micro-batch run on each GPU. It
repeats every 6 units, so that no GPU idles in the middle of a step. From one GPU to the next the
first F and the second I move by `down` units, the second F and the first I by `up`: the smaller
they are, the shorter a GPU keeps a micro-batch. On equal stages without communication:

             down  up   stages kept per GPU   idle units of a step
    ZB-V        4   2   2 P                   P - 1
    V-Half      2   1   2 ((P + 2) // 2)      at most 3 (P - 1)
    V-Min       1   1   2 ((P + 4) // 3)      at most 4 P - 3

A step executes F and I in the order of the repeated blocks, each as soon as its input is there and
the GPU keeps no more than with the block; W run where neither can, the oldest first. The backward
of the first stage, for which nobody waits, is one op of two units among the W.

Source: P. Qi et al., "Pipeline Parallelism with Controllable Memory" (2024), sections 3 and 4, for
blocks, offsets and kept bytes. How W fill a step is ours.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations, product
from typing import Final

from pipeplan.baselines.listed import ListedOp
from pipeplan.plan import OpKind

UNITS: Final = 6
"""Of a building block: F, I and W of two stages."""
Starts = tuple[int, int, int, int]
"""When a GPU begins F of its first stage, F and I of its second, I of its first."""


def zb_v(gpus: int, microbatches: int) -> list[list[ListedOp]]:
    """No more kept than with 1F1B, and next to nothing idles."""
    return _step(_building_block(gpus, 4, 2), microbatches)


def v_half(gpus: int, microbatches: int) -> list[list[ListedOp]]:
    """Half of what 1F1B keeps, and half of its idle time."""
    return _step(_building_block(gpus, 2, 1), microbatches)


def v_min(gpus: int, microbatches: int) -> list[list[ListedOp]]:
    """A third of what 1F1B keeps, and two thirds of its idle time."""
    return _step(_building_block(gpus, 1, 1), microbatches)


@dataclass(frozen=True, slots=True)
class _BuildingBlock:
    """One micro-batch on every GPU, in units; it repeats every `UNITS`."""

    starts: tuple[Starts, ...]
    """By GPU."""
    kept: int
    """The most stages' micro-batches that a GPU has between F and W."""


def _building_block(gpus: int, down: int, up: int) -> _BuildingBlock:
    """The block that keeps least, then the shortest, of all gaps at the turns of the V."""
    blocks = []
    for gaps in product(range(1, UNITS + 1), repeat=3):
        rows = tuple(_starts(gpus, down, up, gaps))
        if all(len({start % UNITS for start in row}) == len(row) for row in rows):
            blocks.append(_BuildingBlock(rows, max(map(_kept, rows))))
    return min(blocks, key=lambda block: (block.kept, block.starts[0][3]))


def _starts(gpus: int, down: int, up: int, gaps: tuple[int, ...]) -> Iterator[Starts]:
    """Per GPU, when F and I start: down the V, up, down with gradients and up again."""
    second = (gpus - 1) * down + gaps[0]
    third = second + (gpus - 1) * up + gaps[1]
    fourth = third + (gpus - 1) * down + gaps[2]
    for gpu in range(gpus):
        back = gpus - 1 - gpu
        yield gpu * down, second + back * up, third + gpu * down, fourth + back * up


def _kept(starts: Starts) -> int:
    """The most that is between F and W, with W in the two free units that keep least."""
    first, second, second_input, first_input = starts
    free = set(range(UNITS)) - {start % UNITS for start in starts}
    return min(
        max(
            _between(first, _next(first_input, one), now)
            + _between(second, _next(second_input, other), now)
            for now in (first, second)
        )
        for one, other in permutations(free)
    )


def _next(start: int, unit: int) -> int:
    """The first time behind `start` that is `unit` modulo a block."""
    return start + 1 + (unit - start - 1) % UNITS


def _between(begin: int, end: int, now: int) -> int:
    """Micro-batches whose F has begun and whose W has not ended at `now`, in steady state."""
    return (now - begin) // UNITS + (end - now) // UNITS + 1


def _step(block: _BuildingBlock, microbatches: int) -> list[list[ListedOp]]:
    """What each GPU does in a step that repeats `block`, in order."""
    gpus = [_FilledGpu(block, gpu, microbatches) for gpu in range(len(block.starts))]
    ends: dict[ListedOp, int] = {}
    now = 0
    while any(gpu.waiting or gpu.late for gpu in gpus):
        for gpu in gpus:
            gpu.begin(now, ends)
        now += 1
    return [gpu.listed for gpu in gpus]


class _FilledGpu:
    """One GPU of a step, unit by unit.

    A step ends: the F or I that is next in the order of blocks finds its input, and its bytes once
    those W are done for which the block has time before it.
    """

    def __init__(self, block: _BuildingBlock, gpu: int, microbatches: int) -> None:
        self._last = 2 * len(block.starts) - 1
        stages = (gpu, self._last - gpu, self._last - gpu, gpu)
        kinds = (OpKind.F, OpKind.F, OpKind.I, OpKind.I if gpu else OpKind.B)
        timed = sorted(
            (start + UNITS * microbatch, (kind, stage, microbatch))
            for start, kind, stage in zip(block.starts[gpu], kinds, stages, strict=True)
            for microbatch in range(microbatches)
        )
        self.waiting = deque(op for _, op in timed)
        self.late: deque[ListedOp] = deque()
        self.listed: list[ListedOp] = []
        self._room = block.kept
        self._busy = 0

    def begin(self, now: int, ends: dict[ListedOp, int]) -> None:
        """Begin F or I in order if the next one can, else the oldest W, if the GPU is free."""
        if self._busy > now:
            return
        if self._can_next(now, ends) and self.waiting[0][0] is OpKind.B:
            self.late.append(self.waiting.popleft())  # nobody waits for the first stage
        if self._can_next(now, ends):
            op = self.waiting.popleft()
        elif self.late:
            op = self.late.popleft()
        else:
            return
        kind, stage, microbatch = op
        if kind is OpKind.I:
            self.late.append((OpKind.W, stage, microbatch))
        self._room += {OpKind.F: -1, OpKind.I: 0, OpKind.W: 1, OpKind.B: 1}[kind]
        self._busy = ends[op] = now + (2 if kind is OpKind.B else 1)
        self.listed.append(op)

    def _can_next(self, now: int, ends: dict[ListedOp, int]) -> bool:
        """Whether the next F, I or B has its input, and F room for what it keeps."""
        if not self.waiting:
            return False
        kind, stage, microbatch = self.waiting[0]
        if kind is OpKind.F and (stage == 0 or self._room == 0):
            return self._room > 0
        before: ListedOp
        if kind is OpKind.F:
            before = kind, stage - 1, microbatch
        elif stage == self._last:
            before = OpKind.F, stage, microbatch
        else:
            before = OpKind.I, stage + 1, microbatch
        return ends.get(before, now + 1) <= now
