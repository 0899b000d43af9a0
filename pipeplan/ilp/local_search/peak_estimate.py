"""A fast estimate of a schedule's peaks: annealing compares it, the exact count (`memory`)
decides.

At the start of each compute op: states, what micro-batches keep, the op's working set, tensors
between two stages of the GPU, and messages. Left out is what only the exact count sees: issue and
posting deferred by running ops, updates, second slots of the paper model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.local_search.list_scheduler import SEND_B, SEND_F, B, F, ModuloListScheduler


@dataclass
class _Gpu:
    """What one GPU hosts."""

    fixed: int = 0
    ops: list[tuple[int, int, int]] = field(default_factory=list)
    """(start, length, working set)."""
    stays: list[tuple[int, int, int]] = field(default_factory=list)
    """(from, until, bytes), counted at an op's start."""
    arrivals: list[tuple[int, int, int]] = field(default_factory=list)
    """As `stays`, but there for any op that still runs at `from`: the receive is posted before."""

    def peak(self, period: int) -> int:
        """The largest sum at the start of an op."""
        best = 0
        for start, length, working in self.ops:
            level = working
            for begin, until, size in self.stays:
                level += size * ((start - begin) // period - (start - until) // period)
            end = start + length - 1
            for begin, until, size in self.arrivals:
                level += size * ((end - begin) // period - (start - until) // period)
            best = max(best, level)
        return self.fixed + best


def estimate_peaks(costs: CostModel, placed: ModuloListScheduler) -> list[int]:
    """Bytes of every GPU at its peak, nearly."""
    gpus = [_Gpu() for _ in range(costs.gpus)]
    runs, times = placed.runs, placed.times
    for stage, (first, last, gpu) in enumerate(runs):
        covered = stage > 0 and runs[stage - 1][2] == gpu
        size = costs.segment(first, last, covered)
        here = gpus[gpu]
        here.fixed += size.states
        forward = costs.forward_ns(first, last, gpu)
        backward = costs.backward_ns(first, last, gpu)
        kept_from = 0 if costs.exact else forward
        own = size.saved if costs.exact else 0
        for begin, end in zip(times[F, stage], times[B, stage], strict=True):
            here.ops.append((begin, forward, size.running - own))
            here.ops.append((end, backward, size.backward))
            here.stays.append((begin + kept_from, end + backward, size.saved))
        if stage:
            _boundary(costs, placed, stage, gpus)
    return [gpu.peak(placed.period) for gpu in gpus]


def _boundary(
    costs: CostModel, placed: ModuloListScheduler, stage: int, gpus: Sequence[_Gpu]
) -> None:
    """The tensors between a stage and the one before it."""
    (first, boundary, source), (_, last, target) = placed.runs[stage - 1 : stage + 1]
    times = placed.times
    ways = (
        ((F, stage - 1), (SEND_F, stage - 1), (F, stage), source, target, False),
        ((B, stage), (SEND_B, stage), (B, stage - 1), target, source, True),
    )
    lengths = (
        costs.forward_ns(first, boundary, source),
        costs.backward_ns(boundary + 1, last, target),
    )
    for (maker, send, user, here, there, backward), length in zip(ways, lengths, strict=True):
        sent = costs.unsaved_bytes(boundary, backward=backward)
        if here == there:
            if sent:
                for made, used in zip(times[maker], times[user], strict=True):
                    gpus[here].stays.append((made + length, used, sent))
            continue
        received = costs.tensor_bytes(boundary, backward=backward)
        if not costs.exact:
            gpus[here].fixed += received
            gpus[there].fixed += received
            continue
        trip = (
            costs.send_backward_ns(boundary, here, there)
            if backward
            else costs.send_forward_ns(boundary, here, there)
        )
        for made, left, used in zip(times[maker], times[send], times[user], strict=True):
            if sent:
                gpus[here].stays.append((made + length, left + trip, sent))
            gpus[there].arrivals.append((left, used, received))
