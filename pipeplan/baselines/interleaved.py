"""Interleaved 1F1B: several stages per GPU, looped or as a V.

With v stages per GPU, looped means stage s on GPU s mod P; a V goes there and back, so that the
first and the last stage share a GPU. On P equal GPUs without communication the looped schedule
takes m * (f + b) + (P - 1) * (f + b) / v, where f + b is a GPU's work for one micro-batch.

Source: D. Narayanan et al., "Efficient Large-Scale Language Model Training" (2021), section 2.2;
P. Qi et al., "Zero Bubble Pipeline Parallelism" (2024), for the V. The order inside the V is ours.
"""

from __future__ import annotations

from heapq import heappop, heappush

from pipeplan.baselines.flush import alternating
from pipeplan.baselines.listed import ListedOp
from pipeplan.errors import InputError
from pipeplan.plan import OpKind


def looped_gpus(gpus: int, chunks: int) -> list[int]:
    """The GPU of each of the gpus * chunks stages."""
    return [stage % gpus for stage in range(gpus * chunks)]


def looped(gpus: int, microbatches: int, *, chunks: int) -> list[list[ListedOp]]:
    """Micro-batches pass in rounds; every GPU does a round's chunks one after the other.

    The rounds are as long as each other, P micro-batches or more: as many as there are whole P,
    as torch's `ScheduleInterleaved1F1B` has them. With r micro-batches in each, GPU g starts with
    2 * (P - 1 - g) + (v - 1) * r forwards, then alternates.

    Raises:
        InputError: if the micro-batches make no equal rounds.
    """
    rounds = max(1, microbatches // gpus)
    if microbatches % rounds:
        raise InputError(
            f"interleaved: got {microbatches} micro-batches on {gpus} GPUs, need a multiple of"
            f" {rounds}: as many rounds of equal size."
        )
    size = microbatches // rounds
    return [
        alternating(
            _rounds(OpKind.F, gpu, gpus, list(range(chunks)), microbatches, size),
            _rounds(OpKind.B, gpu, gpus, list(range(chunks))[::-1], microbatches, size),
            2 * (gpus - 1 - gpu) + (chunks - 1) * size,
        )
        for gpu in range(gpus)
    ]


def _rounds(
    kind: OpKind, gpu: int, gpus: int, chunks: list[int], microbatches: int, size: int
) -> list[ListedOp]:
    return [
        (kind, chunk * gpus + gpu, begin + m)
        for begin in range(0, microbatches, size)
        for chunk in chunks
        for m in range(size)
    ]


def v_gpus(gpus: int) -> list[int]:
    """The GPU of each of the 2 * gpus stages: there and back."""
    return [*range(gpus), *reversed(range(gpus))]


def v_shaped(gpus: int, microbatches: int, *, rounds: float) -> list[list[ListedOp]]:
    """Two stages per GPU as a V, at most `rounds` times P micro-batches in the pipeline.

    The order is that of equal stages whose backward takes twice the forward, where a GPU prefers
    forwards, then the oldest micro-batch. With two rounds it is as short as the looped one.
    """
    return _Greedy(gpus, microbatches, int(rounds * gpus)).lists


class _Greedy:
    """Runs the V in units of one forward, to see who does what in which order."""

    def __init__(self, gpus: int, microbatches: int, in_flight: int) -> None:
        self.lists: list[list[ListedOp]] = [[] for _ in range(gpus)]
        self._places = v_gpus(gpus)
        self._waiting: list[list[tuple[bool, int, ListedOp]]] = [[] for _ in range(gpus)]
        self._running: list[tuple[int, int, ListedOp]] = []
        self._busy = [False] * gpus
        self._later = list(range(microbatches))[::-1]
        for _ in range(min(in_flight, microbatches)):
            self._wait((OpKind.F, 0, self._later.pop()))
        now = 0
        while self._running or any(self._waiting):
            self._start(now)
            now = self._running[0][0]
            while self._running and self._running[0][0] == now:
                self._end(*heappop(self._running)[1:])

    def _wait(self, step: ListedOp) -> None:
        kind, stage, microbatch = step
        heappush(self._waiting[self._places[stage]], (kind is OpKind.B, microbatch, step))

    def _start(self, now: int) -> None:
        for gpu, waiting in enumerate(self._waiting):
            if waiting and not self._busy[gpu]:
                step = heappop(waiting)[2]
                self.lists[gpu].append(step)
                self._busy[gpu] = True
                heappush(self._running, (now + (1 if step[0] is OpKind.F else 2), gpu, step))

    def _end(self, gpu: int, step: ListedOp) -> None:
        self._busy[gpu] = False
        kind, stage, microbatch = step
        if kind is OpKind.F:
            last = stage + 1 == len(self._places)
            self._wait((OpKind.B if last else OpKind.F, stage + (not last), microbatch))
        elif stage:
            self._wait((OpKind.B, stage - 1, microbatch))
        elif self._later:
            self._wait((OpKind.F, 0, self._later.pop()))
