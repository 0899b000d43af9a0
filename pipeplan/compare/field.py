"""Everyone else on clusters that differ in memory only: computed once, chosen per memory."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from fractions import Fraction
from types import MappingProxyType

from pipeplan.baselines.exhaustive import PartitionCloud, partitions
from pipeplan.baselines.listed import ListedSchedule
from pipeplan.baselines.timed import Setting
from pipeplan.cluster import Cluster
from pipeplan.compare.families import FAMILIES, listed, pipedream
from pipeplan.compare.rows import Absent, Row, best, non_dominated, row_of
from pipeplan.errors import InputError
from pipeplan.sums import check_sums
from pipeplan.units import format_bytes

EXHAUSTIVE = "PipeDream, exhaustive"
UNLIMITED = "PipeDream, no memory rule"
LIMITED = "PipeDream, its memory rule"

More = Mapping[str, tuple[ListedSchedule, ...]]
"""Schedules that are compared beside the known ones, by the name of their row."""


class Field:
    """All baselines for one number of GPUs.

    Attributes:
        cloud: the points of PipeDream's exhaustive search.
        left_out: partitions that it had no time for.
    """

    def __init__(
        self,
        setting: Setting,
        microbatches: int,
        than: Fraction | None = None,
        more: More = MappingProxyType({}),
    ) -> None:
        """`setting` has the cluster of the most memory; `microbatches` are per flush step.

        With `than`, ns per micro-batch, PipeDream's search looks for faster points only. `more`
        are further schedules, by the name of their row.
        """
        self.cloud = PartitionCloud(setting, than)
        self.left_out = 0
        self._setting = setting
        self._microbatches = microbatches
        self._more = dict(more)
        self._ways: dict[str, list[Row] | str] = {}

    @property
    def gpus(self) -> int:
        """How many GPUs there are."""
        return self._setting.gpus

    def search(self, seconds: float) -> None:
        """PipeDream's exhaustive search, into `cloud`; `left_out` counts what had no time.

        The seconds are of work, so that a busy machine does not make the baseline weak.
        """
        end = time.process_time() + seconds
        asked = partitions(self._setting)
        for index, ends in enumerate(asked):
            if time.process_time() > end:
                self.left_out = len(asked) - index
                break
            self.cloud.explore(ends)
        self.cloud.finish()

    def execute(self) -> None:
        """Every way of all other baselines, as far as it may be the best one somewhere."""
        more = {name: listed(*schedules) for name, schedules in self._more.items()}
        for name, ways in (FAMILIES | more).items():
            try:
                rows = map(self._limited, ways(self._setting, name, self._microbatches))
                found = non_dominated(list(rows))
                self._ways[name] = found or "the chain has too few layers or tied ones"
            except InputError as error:
                self._ways[name] = str(error)

    def rows(self, cluster: Cluster) -> Iterator[Row | Absent]:
        """Every baseline on one of the clusters: its fastest way that fits, or the nearest one."""
        yield self._exhaustive(cluster)
        setting = self._setting.on(cluster)
        memory = min(gpu.budget_bytes for gpu in cluster.gpus)
        for name, target in ((UNLIMITED, None), (LIMITED, memory)):
            try:
                yield from map(self._limited, pipedream(setting, name, target))
            except InputError as error:
                yield Absent(name, str(error))
        for name, ways in self._ways.items():
            if isinstance(ways, str):
                yield Absent(name, ways)
            else:
                yield best([row.on(cluster) for row in ways])

    def _exhaustive(self, cluster: Cluster) -> Row | Absent:
        budgets = tuple(gpu.budget_bytes for gpu in cluster.gpus)
        point = self.cloud.best(budgets)
        if point is None:
            least = min((point.peak for point in self.cloud.points), default=None)
            nearest = "" if least is None else f"; the smallest needs {format_bytes(least)}"
            return Absent(EXHAUSTIVE, f"none of its plans fits{nearest}")
        detail = f"stages end at {', '.join(map(str, point.ends))}; caps {point.policy.caps}"
        plan = point.plan(self._setting.on(cluster), EXHAUSTIVE)
        return self._limited(row_of(EXHAUSTIVE, plan, detail))

    def _limited(self, row: Row) -> Row:
        return replace(row, most_microbatches=self._setting.most_microbatches)


def prepared(setting: Setting, microbatches: int, more: More, seconds: float) -> Field:
    """All that the memories of one number of GPUs share; `seconds` are of the search.

    Raises:
        InputError: if the chain's numbers add up to too much.
    """
    check_sums(setting.chain, setting.cluster, microbatches)
    field = Field(setting, microbatches, more=more)
    field.search(seconds)
    field.execute()
    return field
