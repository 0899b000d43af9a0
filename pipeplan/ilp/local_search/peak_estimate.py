"""A fast estimate of a schedule's peaks: annealing compares it, the exact count (`memory`)
decides.

At the start of each compute op: states, what micro-batches keep, the op's working set, tensors
between two stages of the GPU, and messages. Left out is what only the exact count sees: issue and
posting deferred by running ops, updates, second slots of the paper model.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from pipeplan.ilp.compiled import Ints, Records, compiled
from pipeplan.ilp.modulo_scheduling import SEND_B, SEND_F, B, F

GPU, BEGIN, UNTIL, BYTES, POSTED = range(5)
"""Of a stay: where, from when, until when, how much, and whether it is there for any op that
still runs at `BEGIN`, too: the receive is posted before."""
MOST_STAYS: Final = 5
"""Of a micro-batch at a stage: what it keeps, two tensors that leave and two that arrive."""


@compiled
def peaks(stages: Records, period: int, times: Ints, gpus: int) -> Ints:
    """Bytes of every GPU at its peak, nearly.

    Args:
        stages: as `modulo_scheduling.STAGE` says.
        period: in ns.
        times: as `modulo_scheduling.place` fills them in.
        gpus: how many there are.
    """
    stays = _stays(stages, times)
    fixed, best = np.zeros(gpus, np.int64), np.zeros(gpus, np.int64)
    for number in range(len(stages)):
        stage = stages[number]
        fixed[stage.gpu] += stage.fixed
        for copy in range(times.shape[2]):
            for op in (F, B):
                length, working = stage.forward, stage.running
                if op == B:
                    length, working = stage.backward, stage.returning
                start = times[op, number, copy]
                level = working + _staying(stays, stage.gpu, start, start + length - 1, period)
                best[stage.gpu] = max(best[stage.gpu], level)
    return fixed + best


@compiled
def _staying(stays: Ints, gpu: int, start: int, end: int, period: int) -> int:
    """Bytes that stay on a GPU while an op runs from `start` to `end`."""
    level = 0
    # Rows as arrays of their own would take ten times as long.
    for row in range(len(stays)):
        if stays[row, GPU] == gpu:
            seen = end if stays[row, POSTED] else start
            begun, over = seen - stays[row, BEGIN], start - stays[row, UNTIL]
            level += stays[row, BYTES] * (begun // period - over // period)
    return level


@compiled
def _stays(stages: Records, times: Ints) -> Ints:
    """What stays where, in rows."""
    copies, count = times.shape[2], 0
    stays = np.zeros((MOST_STAYS * copies * len(stages), 5), np.int64)
    for number in range(len(stages)):
        stage = stages[number]
        for copy in range(copies):
            begun = times[F, number, copy] + stage.kept_after
            over = times[B, number, copy] + stage.backward
            count = _stay(stays, count, stage.gpu, begun, over, stage.saved, 0)
            if number == len(stages) - 1:
                continue
            following = stages[number + 1]
            made = times[F, number, copy] + stage.forward
            returned = times[B, number + 1, copy] + following.backward
            used, home = times[F, number + 1, copy], times[B, number, copy]
            gone, back = used, home
            if stage.out >= 0:
                left, returns = times[SEND_F, number, copy], times[SEND_B, number + 1, copy]
                count = _stay(stays, count, following.gpu, left, used, stage.received, 1)
                count = _stay(stays, count, stage.gpu, returns, home, stage.gradient_received, 1)
                gone, back = left + stage.send_forward, returns + stage.send_backward
            count = _stay(stays, count, stage.gpu, made, gone, stage.sent, 0)
            count = _stay(stays, count, following.gpu, returned, back, stage.gradient_sent, 0)
    return stays[:count]


@compiled
def _stay(
    stays: Ints, count: int, gpu: int, begin: int, until: int, size: int, posted: int
) -> int:
    """Fill in one more row, if it has bytes; how many there are."""
    if size == 0:
        return count
    stays[count, GPU], stays[count, BEGIN], stays[count, UNTIL] = gpu, begin, until
    stays[count, BYTES], stays[count, POSTED] = size, posted
    return count + 1
