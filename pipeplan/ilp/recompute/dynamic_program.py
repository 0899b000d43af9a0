"""Where to cut and what to recompute, decided together, for contiguous plans.

The dynamic program of `contiguous`, in which a stage also chooses an option: the one of least V
that fits. Stages in front need less memory at smaller V, so the smallest V is still a sufficient
state: over the options offered the result is the shortest period of all contiguous 1F1B plans.
Source: ours.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil

import numpy as np
from numpy.typing import NDArray

from pipeplan.ilp.contiguous.dynamic_program import (
    ContiguousDP,
    ContiguousPartition,
    Frontier,
    PeriodQuery,
    State,
    extend_span,
)
from pipeplan.ilp.offload.min_span import INFINITE, OffloadBytes, StageTiming, min_span
from pipeplan.ilp.recompute.labels import NONE
from pipeplan.ilp.recompute.options import StageOptions
from pipeplan.ilp.runs import Run
from pipeplan.ilp.segment_tables import Array
from pipeplan.plan import Stage

Places = tuple[NDArray[np.intp], ...]
"""First and last layers of segments."""


@dataclass
class RecomputeDP(ContiguousDP):
    """As `ContiguousDP`, with runs that may be recomputed.

    GPUs of other speeds than 1 take a little longer or shorter for a run than is counted here (the
    sum over its layers is rounded once, not layer by layer).
    """

    options: StageOptions = field(kw_only=True)

    def __post_init__(self) -> None:
        """Order the options such that the first that fits is the best."""
        super().__post_init__()
        self._count = int((self.options.more < NONE).sum(axis=2).max())
        order = np.argsort(self.options.more, axis=2, kind="stable")[:, :, : self._count]
        self._order = order
        self._more, self._saved, peak = (
            np.moveaxis(np.take_along_axis(table, order, axis=2), 2, 0)
            for table in (self.options.more, self.options.saved, self.options.peak)
        )
        if self.offload:
            levels = np.take_along_axis(self.options.levels, order[None], axis=3)
            self._levels = np.moveaxis(levels, 3, 0)
        if self.costs.semantics == "2bw":
            peak = np.maximum(peak, np.maximum(self.tables.optimizer, self.tables.late))
        self._need = self.tables.states + peak
        if self.messages:
            self._need = self._need + self.tables.messages

    @property
    def serial_ns(self) -> int:
        """A period at which one micro-batch at a time is processed with any of the options."""
        slowest = min(gpu.speed for gpu in self.costs.cluster.gpus)
        longest = self.costs.gpus * int(self._more[self._more < NONE].max(initial=0))
        return super().serial_ns + ceil(longest / slowest) + self.costs.layers

    def _stage(
        self,
        asked: PeriodQuery,
        kind: int,
        start: Array,
        allowed: NDArray[np.bool_],
        before: State | None,
    ) -> Frontier:
        """V of a stage i..j at its best option that fits, for all i, j, and the best j.

        Options come cheapest first, so the first that fits is the best, unless a dearer one waits
        less for bytes to leave.
        """
        reach = np.full(allowed.shape, INFINITE)
        possible = allowed & (start < INFINITE)[None, :]
        possible &= self._update <= self.costs.budgets[self.classes[kind][0]]
        for number in range(self._count):
            possible &= self._more[number] < NONE
            here = np.nonzero(possible if self.offload else possible & (reach == INFINITE))
            if not here[0].size:
                break
            spans = self._fitting(asked, kind, start, number, here)
            reach[here] = np.minimum(reach[here], spans)
        choice = np.argmin(reach, axis=1)
        return Frontier(reach[np.arange(len(choice)), choice], choice, [before] * len(choice))

    def _fitting(
        self, asked: PeriodQuery, kind: int, start: Array, number: int, here: Places
    ) -> Array:
        """V of an option of the segments `here`; `INFINITE` where it does not fit."""
        speed = self.costs.cluster.gpus[self.classes[kind][0]].speed
        more, begin = self._more[number][here], start[here[1]]
        load = self._loads[kind][here]
        load = load + (more if speed == 1 else np.ceil(more / speed).astype(np.int64))
        spans = begin + load if self.any_k else extend_span(begin, load, asked.period)
        copies = asked.copies(spans)
        room = self.costs.budgets[self.classes[kind][0]] - self._need[number][here]
        good = load <= asked.limit
        if not self.offload:
            good &= room >= 0
        if self.most is not None:
            good &= copies <= self.most
        saved = self._saved[number][here]
        if self.offload:
            stay = StageTiming(asked.period, spans, self._forwards[kind][here], load)
            levels = self._levels[number][:, here[0], here[1]]
            small = (None if each is None else each[here] for each in self._small(kind))
            size = OffloadBytes(self._free(kind)[here], room, saved, levels, *small)
            return min_span(self._host, stay, size, good)
        others = np.minimum(copies - 1, room // np.maximum(saved, 1) + 1)
        return np.where(good & (others * saved <= room), spans, INFINITE)

    def runs(self, partition: ContiguousPartition) -> tuple[Run, ...]:
        """The runs of all stages of a partition that `solve` found."""
        found: list[Run] = []
        asked = PeriodQuery(partition.period, just_below=False)
        kinds = {gpu: kind for kind, gpus in enumerate(self.classes) for gpu in gpus}
        start = 0
        for stage in reversed(partition.stages):
            kind = kinds[stage.gpu]
            here = np.full(self.costs.layers, INFINITE)
            here[stage.last] = start
            number = self._chosen(asked, kind, here, stage, partition.spans[stage.id])
            option = int(self._order[stage.first, stage.last, number])
            found = [*self.options.runs(stage.first, stage.last, option), *found]
            if stage.first:
                ahead = kinds[partition.stages[stage.id - 1].gpu]
                behind = np.full(self.costs.layers, INFINITE)
                behind[stage.first] = partition.spans[stage.id]
                start = int(self._send(asked, ahead, kind, behind)[stage.first - 1])
        return tuple(found)

    def _chosen(self, asked: PeriodQuery, kind: int, start: Array, stage: Stage, span: int) -> int:
        """The first option of a stage that fits with this V."""
        here = np.array([stage.first]), np.array([stage.last])
        for number in range(self._count):
            if self._more[number][here] == NONE:
                break
            if self._fitting(asked, kind, start, number, here)[0] == span:
                return number
        raise AssertionError(f"layers {stage.layers} have no option that fits")
