"""Where to cut and what to compute again, decided together, for contiguous plans.

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

from pipeplan.ilp.again.merge import Run
from pipeplan.ilp.again.options import NONE, Options
from pipeplan.ilp.away.waiting import INFINITE, Bytes, Stay, waited
from pipeplan.ilp.contiguous import (
    Asked,
    ContiguousSolver,
    Front,
    Partition,
    State,
    push,
)
from pipeplan.ilp.tables import Array
from pipeplan.plan import Stage


@dataclass
class RunSolver(ContiguousSolver):
    """As `ContiguousSolver`, with runs that may be computed again.

    GPUs of other speeds than 1 take a little longer or shorter for a run than is counted here (the
    sum over its layers is rounded once, not layer by layer).
    """

    options: Options = field(kw_only=True)

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
        """A period at which one micro-batch at a time is processed with all forwards run twice."""
        slowest = min(gpu.speed for gpu in self.costs.cluster.gpus)
        forward = sum(layer.forward_ns for layer in self.costs.chain.layers)
        return super().serial_ns + ceil(forward / slowest) + self.costs.layers

    def _stage(
        self,
        asked: Asked,
        kind: int,
        start: Array,
        allowed: NDArray[np.bool_],
        before: State | None,
    ) -> Front:
        """V of a stage i..j at its cheapest option that fits, for all i, j, and the best j."""
        reach = np.full(allowed.shape, INFINITE)
        possible = allowed & (start < INFINITE)[None, :]
        for number in range(self._count):
            open_ = possible & (reach == INFINITE)
            if not self.offload and not open_.any():
                break
            spans = self._spans(asked, kind, start, number)
            if self.offload:
                better = possible & (spans < reach)
                reach = np.minimum(reach, self._fitting(asked, kind, spans, number, better))
            else:
                reach = np.where(open_ & self._fits(asked, kind, spans, number), spans, reach)
        choice = np.argmin(reach, axis=1)
        return Front(reach[np.arange(len(choice)), choice], choice, [before] * len(choice))

    def _load(self, kind: int, number: int) -> Array:
        """Ns of an option on a class of GPUs, `INFINITE` where the segment has none."""
        speed = self.costs.cluster.gpus[self.classes[kind][0]].speed
        more = self._more[number]
        slower = more if speed == 1 else np.ceil(more / speed).astype(np.int64)
        return np.where(more < NONE, self._loads[kind] + slower, INFINITE)

    def _spans(self, asked: Asked, kind: int, start: Array, number: int) -> Array:
        load = self._load(kind, number)
        good = (load <= asked.limit) & (start < INFINITE)[None, :]
        begin, work = np.where(start < INFINITE, start, 0)[None, :], np.where(good, load, 0)
        spans = begin + work if self.any_k else push(begin, work, asked.period)
        return np.where(good, spans, INFINITE)

    def _fitting(
        self, asked: Asked, kind: int, spans: Array, number: int, open_: NDArray[np.bool_]
    ) -> Array:
        """V of an option that fits, with what it waits to send bytes away; else `INFINITE`."""
        good = (spans < INFINITE) & self._allowed(
            asked, kind, np.where(spans < INFINITE, spans, 0)
        )
        room = self.costs.budgets[self.classes[kind][0]] - self._need[number]
        size = Bytes(self._free(kind), room, self._saved[number], self._levels[number])
        stay = Stay(asked.period, spans, self._forwards[kind], self._load(kind, number))
        return waited(self._host, stay, size, good & open_)

    def _fits(self, asked: Asked, kind: int, spans: Array, number: int) -> NDArray[np.bool_]:
        good = spans < INFINITE
        copies = asked.copies(np.where(good, spans, 0))
        good &= self._allowed(asked, kind, np.where(good, spans, 0))
        budget = self.costs.budgets[self.classes[kind][0]]
        room, saved = budget - self._need[number], self._saved[number]
        others = np.minimum(copies - 1, room // np.maximum(saved, 1) + 1)
        fits: NDArray[np.bool_] = good & (room >= 0) & (others * saved <= room)
        return fits

    def _allowed(self, asked: Asked, kind: int, spans: Array) -> NDArray[np.bool_]:
        """(R6), and room for the update."""
        good: NDArray[np.bool_] = self._update <= self.costs.budgets[self.classes[kind][0]]
        return good if self.most is None else good & (asked.copies(spans) <= self.most)

    def runs(self, partition: Partition) -> tuple[Run, ...]:
        """The runs of all stages of a partition that `solve` found."""
        found: list[Run] = []
        asked = Asked(partition.period, just_below=False)
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

    def _chosen(self, asked: Asked, kind: int, start: Array, stage: Stage, span: int) -> int:
        """The first option of a stage that has this V and fits."""
        place = stage.first, stage.last
        for number in range(self._count):
            spans = self._spans(asked, kind, start, number)
            if self.offload:
                only = np.zeros(spans.shape, dtype=bool)
                only[place] = True
                if self._fitting(asked, kind, spans, number, only)[place] == span:
                    return number
            elif self._fits(asked, kind, spans, number)[place]:
                return number
        raise AssertionError(f"layers {place} have no option that fits")
