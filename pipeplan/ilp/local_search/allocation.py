"""What local search changes: where layers sit, and what their schedule leaves open."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import compress, pairwise
from operator import ne

from pipeplan.ilp.local_search.list_scheduler import PlacedStage, Wait
from pipeplan.ilp.runs import Runs
from pipeplan.ilp.schedule import Schedule

Waits = Mapping[int, tuple[float, float]]
"""By first layer of a stage: its `list_scheduler.Wait` in periods."""


@dataclass(frozen=True)
class Allocation:
    """Where layers sit, where stages are split, when copies turn, what waits and is recomputed.

    homes: GPU of each layer.
    splits: first layers of stages that follow a stage on the same GPU.
    turns: instants at which the copies' forwards end and backwards begin, in periods; rising from
        0 to less than 1.
    recompute: runs of layers that are recomputed, which stages may cut; only where a search with
        recomputation asks for them.
    waits: of stages that begin with these layers; without meaning for layers that begin none.
    """

    homes: tuple[int, ...]
    splits: frozenset[int]
    turns: tuple[float, ...] = (0.0,)
    recompute: Runs = ()
    waits: Waits = field(default_factory=dict)

    @classmethod
    def of(cls, schedule: Schedule, k: int) -> Allocation:
        """The stages of a schedule, k copies evenly spread."""
        homes = [
            stage.gpu for stage in schedule.stages for _ in range(stage.first, stage.last + 1)
        ]
        splits = {two.first for one, two in pairwise(schedule.stages) if one.gpu == two.gpu}
        return cls(tuple(homes), frozenset(splits), tuple(copy / k for copy in range(k)))

    @cached_property
    def runs(self) -> tuple[PlacedStage, ...]:
        """Runs of layers on one GPU, cut at splits."""
        homes = self.homes
        cuts = set(compress(range(1, len(homes)), map(ne, homes, homes[1:])))
        edges = pairwise([0, *sorted(cuts | self.splits), len(homes)])
        return tuple((first, behind - 1, homes[first]) for first, behind in edges)

    def segments(self) -> list[tuple[int, int]]:
        """First and last layer of each stage."""
        return [(first, last) for first, last, _ in self.runs]

    def waits_by_stage(self, period: int) -> dict[int, Wait]:
        """Nanoseconds that stages wait, by their number."""
        shares = (
            (stage, self.waits.get(first)) for stage, (first, _) in enumerate(self.segments())
        )
        return {
            stage: (int(share[0] * period), int(share[1] * period))
            for stage, share in shares
            if share
        }
