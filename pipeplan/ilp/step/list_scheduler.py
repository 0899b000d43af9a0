"""List scheduling of a step: an idle GPU takes the op that a rule ranks first, if memory allows.

Two things go beyond plain list scheduling (Graham 1969):

- *Patience*: a GPU stays idle for an op that ranks before all that are ready and that is known to
  be ready within so many ns. Without it every transfer costs the length of whatever is ready.
- *Safety* (the banker's algorithm, Dijkstra 1965): a forward starts only if afterwards the
  micro-batches in flight on its GPU could still end one after the other. So no rule deadlocks
  but for messages: those that wait on a GPU are room that the check does not plan for.

Bytes are those of stages and messages at the times of this schedule; a few that depend on when
a rank posts a receive are left to the exact count (`ilp.memory`). Source: ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Final, NamedTuple

import numpy as np

from pipeplan.ilp.compiled import Floats, Ints, with_attributes
from pipeplan.ilp.schedule import OpId, Schedule
from pipeplan.ilp.step.dispatch import simulate
from pipeplan.ilp.step.instance import StepInstance
from pipeplan.plan import OpKind

_KINDS: Final = (OpKind.F, OpKind.B, OpKind.W, OpKind.SEND_F, OpKind.SEND_B)
"""As `dispatch` numbers them; B stands for I where the backward is split."""


@dataclass(frozen=True, slots=True)
class DispatchingRule:
    """Which op a GPU takes: the one with the smallest rank[kind][stage] + micro-batch * spacing.

    A step begins and ends unlike it goes on: an op of one micro-batch may rank earlier or later.

    Attributes:
        ranks: Of F, of B or I, and of W, by stage, in ns: when micro-batch 0 would have its turn.
        spacing: Between micro-batches, in ns.
        in_flight: By stage: most micro-batches between the start of F and the end of B or I.
        patience: For how long a GPU waits for an op that ranks first, in ns.
        shifts: By kind, stage and micro-batch: what is added to the rank, in ns; micro-batches of
            the second half count from the end, -1 is the last.
    """

    ranks: tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]
    spacing: float
    in_flight: tuple[int, ...]
    patience: int
    shifts: Mapping[tuple[int, int, int], float] = field(default_factory=dict)


class StepTimes(NamedTuple):
    """When everything starts, and the latest end, in ns."""

    starts: Ints
    """By kind (F, B or I, W, and transfers of outputs and of gradients), stage and micro-batch;
    -1 where nothing runs."""
    end: int
    ends: list[int]
    """By GPU: the end of its last op."""


class Attempt(NamedTuple):
    """What a rule comes to."""

    times: StepTimes | None
    """None: it ends too late or does not fit."""
    events: int
    """What it cost."""


def schedule_step(instance: StepInstance, rule: DispatchingRule, horizon: float = inf) -> Attempt:
    """The step as the rule has it, if it fits and ends before `horizon`."""
    lines, gpus = instance.lines.copy(), instance.gpus.copy()
    lines["ready"][0] = instance.microbatches
    gpus["work"] *= instance.microbatches
    gpus["concerned"] = True
    rows = (len(_KINDS), len(instance.stages), instance.microbatches)
    starts, ends = np.full(rows, -1), np.zeros(len(instance.hosted), np.int64)
    fits, end, events = simulate(
        with_attributes(lines),
        with_attributes(gpus),
        instance.by_gpu,
        _ranks(instance, rule),
        np.array(rule.in_flight),
        instance.links,
        rule.patience,
        float(horizon),
        starts.reshape(-1, instance.microbatches),
        ends,
    )
    return Attempt(StepTimes(starts, int(end), ends.tolist()) if fits else None, int(events))


def _ranks(instance: StepInstance, rule: DispatchingRule) -> Floats:
    """By line and micro-batch, in ns."""
    stages, microbatches = len(instance.stages), instance.microbatches
    first = np.array(rule.ranks).reshape(-1, 1)
    ranks: Floats = first + rule.spacing * np.arange(microbatches)
    for (kind, stage, number), by in rule.shifts.items():
        ranks[kind * stages + stage, number] += by
    return ranks


def as_schedule(instance: StepInstance, found: StepTimes) -> Schedule:
    """The step plan (T6): k = m micro-batches, the period is the latest end."""
    times: dict[OpId, tuple[int, ...]] = {}
    for kind, rows in zip(_KINDS, found.starts.tolist(), strict=True):
        for stage, row in enumerate(rows):
            if row[0] >= 0:
                name = instance.stages[stage].backward if kind is OpKind.B else kind
                times[name, stage] = tuple(row)
    return Schedule(instance.stages, max(1, found.end), instance.microbatches, times)
