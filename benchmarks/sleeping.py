"""Layers that sleep, and what an ideal executor would make of their measured sleeps.

Both runtimes run the same modules: forward sleeps F, backward sleeps 2 F (where it may be split, F
for the gradient of the input and F for that of a weight), and 64 KiB pass between stages. Every
sleep is logged with its real start and end, since a busy machine oversleeps; the ideal executor is
fed with these durations, so the ratio shows the runtime and nothing else.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipeplan.runtime.dry_run.clock import SleepClock

ROWS, WIDTH = 16, 1024
"""Of one micro-batch: 64 KiB of float32."""

Op = tuple[str, int, int]
"""(F, B, I or W, layer, micro-batch)."""


@dataclass(frozen=True, slots=True)
class Slept:
    """One op of a rank as it happened, in ns of the machine's monotonic clock."""

    op: Op
    start: int
    end: int


class Log:
    """What one rank did, in order; micro-batches are counted as they come."""

    def __init__(self) -> None:
        self.entries: list[Slept] = []
        self._clock = SleepClock()
        self._count: dict[tuple[str, int], int] = defaultdict(int)

    def sleep(self, kind: str, stage: int, duration_ns: int) -> None:
        """Sleep as the next op of its kind and stage."""
        start = time.monotonic_ns()
        self._clock.until(start + duration_ns)
        number = self._count[kind, stage]
        self._count[kind, stage] += 1
        self.entries.append(Slept((kind, stage, number), start, time.monotonic_ns()))


class Sleeper(nn.Module):
    """A layer that does nothing for a while."""

    def __init__(self, log: Log, stage: int, forward_ns: int, *, split: bool = False) -> None:
        """`split`: half of the backward is the gradient of a weight, which may come later."""
        super().__init__()
        self.log, self.stage, self.forward_ns = log, stage, forward_ns
        self.weight = nn.Parameter(torch.ones(1, WIDTH)) if split else None
        if self.weight is not None:
            self.weight.register_hook(lambda _: log.sleep("W", stage, forward_ns))

    @property
    def backward(self) -> tuple[str, int]:
        """Op, and its ns, that the gradient of the input is part of."""
        return ("B", 2 * self.forward_ns) if self.weight is None else ("I", self.forward_ns)

    def forward(self, value: Tensor) -> Tensor:
        """The input, later."""
        if not value.requires_grad:  # the first stage's input: its backward sleeps too
            value.requires_grad_()
        if self.weight is not None:
            value = value * self.weight
        slept: Tensor = _Sleep.apply(value, self)
        return slept


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, layer: Sleeper) -> Tensor:
        ctx.layer = layer
        layer.log.sleep("F", layer.stage, layer.forward_ns)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        kind, lasts = ctx.layer.backward
        ctx.layer.log.sleep(kind, ctx.layer.stage, lasts)
        return gradient.clone(), None


def mean(output: Tensor, _: Tensor) -> Tensor:
    """A loss that costs nothing."""
    return output[0, :1].sum()


def ideal_ns(ranks: Sequence[Sequence[Slept]], stages: int) -> int:
    """Makespan of the same ops in the same order per rank, each starting as soon as it may."""
    ended: dict[Op, int] = {}
    position, now = [0] * len(ranks), [0] * len(ranks)
    left = sum(map(len, ranks))
    while left:
        before = left
        for rank, entries in enumerate(ranks):
            while position[rank] < len(entries):
                entry = entries[position[rank]]
                needed = _needed(entry.op, stages)
                if needed is not None and needed not in ended:
                    break
                start = max(now[rank], ended[needed] if needed else 0)
                now[rank] = ended[entry.op] = start + entry.end - entry.start
                position[rank] += 1
                left -= 1
        if left == before:
            raise ValueError("sleeping ops: the lists wait for each other")
    return max(now)


def _needed(op: Op, stages: int) -> Op | None:
    kind, stage, microbatch = op
    if kind == "F":
        return ("F", stage - 1, microbatch) if stage else None
    return ("B", stage + 1, microbatch) if stage + 1 < stages else ("F", stage, microbatch)


def steps_of(ranks: Sequence[Sequence[Slept]], size: int) -> list[list[list[Slept]]]:
    """Per step of `size` micro-batches the entries of each rank."""
    count = 1 + max(entry.op[2] for entries in ranks for entry in entries)
    return [
        [[e for e in entries if e.op[2] // size == step] for entries in ranks]
        for step in range(count // size)
    ]


def span_ns(ranks: Sequence[Sequence[Slept]]) -> int:
    """From the first start to the last end."""
    entries = [entry for each in ranks for entry in each]
    return max(entry.end for entry in entries) - min(entry.start for entry in entries)


def replay_ratio(ranks: Sequence[Sequence[Slept]], stages: int) -> float:
    """Measured makespan over the ideal one."""
    return span_ns(ranks) / ideal_ns(ranks, stages)


def period_ns(ranks: Sequence[Sequence[Slept]], skip: int) -> float:
    """Mean time between the last backwards of micro-batches, the first `skip` left out."""
    ends = _exits(ranks)
    first, last = min(ends) + skip, max(ends)
    return (ends[last] - ends[first]) / (last - first)


def _exits(ranks: Sequence[Sequence[Slept]]) -> Mapping[int, int]:
    return {e.op[2]: e.end for entries in ranks for e in entries if e.op[:2] == ("B", 0)}
