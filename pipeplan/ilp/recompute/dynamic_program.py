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

from pipeplan.ilp.contiguous.dynamic_program import ContiguousDP, ContiguousPartition
from pipeplan.ilp.contiguous.recurrence import PeriodQuery
from pipeplan.ilp.contiguous.stage_choice import INFINITE, Options
from pipeplan.ilp.recompute.options import UNUSED, StageOptions
from pipeplan.ilp.runs import Run
from pipeplan.ilp.segment_tables import Array
from pipeplan.plan import Stage


@dataclass
class RecomputeDP(ContiguousDP):
    """As `ContiguousDP`, with runs that may be recomputed.

    GPUs of other speeds than 1 take a little longer or shorter for a run than is counted here (the
    sum over its layers is rounded once, not layer by layer).
    """

    options: StageOptions = field(kw_only=True)

    def _stage_options(self) -> Options:
        """Cheapest first: the first that fits is the best."""
        offered, tables = self.options.cheapest_first, self.tables
        peak = offered.peak
        if self.costs.semantics == "2bw":
            peak = np.maximum(peak, np.maximum(tables.optimizer, tables.late)[..., None])
        beside = tables.states + (tables.messages if self.messages else 0)
        return offered.counts, offered.more, offered.saved, peak + beside[..., None]

    def _byte_levels(self) -> Array:
        return self.options.cheapest_first.levels

    @property
    def serial_ns(self) -> int:
        """A period at which one micro-batch at a time is processed with any of the options."""
        slowest = min(gpu.speed for gpu in self.costs.cluster.gpus)
        more = self._options[1]
        longest = self.costs.gpus * int(more[more < UNUSED].max(initial=0))
        return super().serial_ns + ceil(longest / slowest) + self.costs.layers

    def runs(self, partition: ContiguousPartition) -> tuple[Run, ...]:
        """The runs of all stages of a partition that `solve` found."""
        found: list[Run] = []
        asked = PeriodQuery(partition.period, just_below=False)
        kinds = {gpu: kind for kind, gpus in enumerate(self.classes) for gpu in gpus}
        start = 0
        for stage in reversed(partition.stages):
            kind = kinds[stage.gpu]
            number = self._chosen(asked, kind, start, stage)
            runs = self.options.cheapest_first.runs(stage.first, stage.last, number)
            found = [*runs, *found]
            if stage.first:
                ahead = kinds[partition.stages[stage.id - 1].gpu]
                behind = np.full(self.costs.layers, INFINITE)
                behind[stage.first] = partition.spans[stage.id]
                start = int(self.send(asked, ahead, kind, behind)[stage.first - 1])
        return tuple(found)

    def _chosen(self, asked: PeriodQuery, kind: int, start: int, stage: Stage) -> int:
        """The option of a stage in front of what has V `start`."""
        behind = np.full(self.costs.layers, INFINITE)
        behind[stage.last] = start
        return int(self.best_stages(asked, kind, behind)[2][stage.first])
