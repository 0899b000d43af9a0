"""PipeDream's partition: contiguous stages by dynamic programming, with its own objective.

    A[s][e] = min over i of max(A[s - 1][i], 2 * activation(i) / bandwidth, work(i..e))

is the slowest stage or cut when everything before e fills stages 0..s and i is where the last of
them begins. The memory rule asks `(stages - 1 - s) * (activations + parameters) <= target` of
stage s: one micro-batch less than is in flight, no gradients, optimizer states or buffers, and
nothing at all for the last stage. It is kept as it is published; what a partition really needs is
judged by our own model.

Source: D. Narayanan et al., "PipeDream" (SOSP 2019), section 3.1 and its optimizer; rederived.
Replication is off: a stage has one GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from pipeplan.chain import Chain, Layer
from pipeplan.cluster import Cluster
from pipeplan.units import ceil_div

Table = NDArray[np.int64]
NEVER = 2**61


@dataclass(frozen=True, slots=True)
class Partition:
    """A stage ends behind each of `ends` (exclusive)."""

    ends: tuple[int, ...]
    period_ns: int
    """PipeDream's own estimate per micro-batch: the slowest stage or cut."""
    memory_bytes: int
    """What its memory rule counts for the largest stage."""


@dataclass(frozen=True)
class PartitionTables:
    """What is partitioned, as tables over cuts 0 (before everything) to N (behind everything).

    works: per stage, ns from one cut to another; `NEVER` where the second is not behind the first.
    cuts: per stage but the last, ns of both transfers of the cut behind it; `NEVER` at the ends.
    counted: bytes that the memory rule counts for one micro-batch from one cut to another.
    """

    works: tuple[Table, ...]
    cuts: tuple[Table, ...]
    counted: Table

    def solve(
        self,
        target_bytes: int | None = None,
        *,
        in_flight: int | None = None,
        least_traffic: bool = False,
    ) -> Partition | None:
        """The best partition; None if none keeps the memory rule.

        Args:
            target_bytes: limit of the memory rule per GPU; None switches the rule off.
            in_flight: micro-batches that the memory rule supposes in front of stage 1 (NOAM);
                None takes one per stage, as published.
            least_traffic: among equal partitions the one with the least sum of cuts, instead of
                the earliest cuts as the published tool takes them.
        """
        depth = len(self.works) if in_flight is None else in_flight
        works = [self._stage(stage, depth, target_bytes) for stage in range(len(self.works))]
        found = _least(works, self.cuts, np.maximum)
        if found is None:
            return None
        period, ends = found
        if least_traffic:
            free = [np.where(work <= period, 0, NEVER) for work in works]
            paid = [np.where(cut <= period, cut, NEVER) for cut in self.cuts]
            found = _least(free, paid, lambda one, other: np.minimum(one + other, NEVER))
            ends = found[1] if found else ends
        counts = [
            max(0, depth - 1 - stage) * int(self.counted[begin, end])
            for stage, (begin, end) in enumerate(pairwise([0, *ends]))
        ]
        return Partition(tuple(ends), period, max(counts))

    def _stage(self, stage: int, depth: int, target_bytes: int | None) -> Table:
        work = self.works[stage]
        if target_bytes is None:
            return work
        counted = max(0, depth - 1 - stage) * self.counted
        return np.where(counted > target_bytes, NEVER, work)


def _least(
    works: Sequence[Table], cuts: Sequence[Table], join: Callable[[Table, Table], Table]
) -> tuple[int, list[int]] | None:
    """The ends of the stages with the least joined value, the earliest among equal ones."""
    reach = works[0][0]
    choices: list[NDArray[np.intp]] = []
    for work, cut in zip(works[1:], cuts, strict=True):
        value = join(join(reach, cut)[:, None], work)
        choices.append(np.argmin(value, axis=0))
        reach = value.min(axis=0)
    if reach[-1] >= NEVER:
        return None
    ends = [len(reach) - 1]
    for choice in reversed(choices):
        ends.append(int(choice[ends[-1]]))
    return int(reach[-1]), ends[::-1]


def problem(
    chain: Chain, cluster: Cluster, stages: int, *, communication: bool = True
) -> PartitionTables:
    """The partition of `chain` into `stages` stages, stage s on GPU s; cut i is before layer i.

    PipeDream takes GPUs as equal; where they are not, stage s has the speed of GPU s and the link
    to GPU s + 1. It knows no latency.

    Args:
        chain: what is cut.
        cluster: where the stages run.
        stages: at most the number of layers.
        communication: whether cuts count in the objective; without, only stages do.
    """
    speeds = [Fraction(repr(gpu.speed)) for gpu in cluster.gpus[:stages]]
    tables = {speed: _works(chain, speed) for speed in set(speeds)}
    cuts = []
    for stage in range(stages - 1):
        bandwidth = cluster.links.between(stage, stage + 1)[1] if communication else None
        sizes = [layer.output_bytes for layer in chain.layers[:-1]]
        cuts.append(np.array([NEVER, *(cut_ns(size, bandwidth) for size in sizes), NEVER]))
    return PartitionTables(
        works=tuple(tables[speed] for speed in speeds),
        cuts=tuple(cuts),
        counted=_runs([counted_bytes(layer) for layer in chain.layers]),
    )


def counted_bytes(layer: Layer) -> int:
    """What PipeDream counts of a layer: its parameters and what its operations read and write."""
    kept = layer.saved_input_bytes + layer.saved_bytes + layer.output_bytes
    return layer.weight_bytes + kept


def cut_ns(size: int, bandwidth: int | None) -> int:
    """Ns of an activation and its gradient, each of `size` bytes, on one link."""
    return 0 if bandwidth is None else ceil_div(2 * size * 10**9, bandwidth)


def noam(stages: int) -> int:
    """NOAM, the micro-batches that PipeDream admits: ceil(GPUs / GPUs of the first stage)."""
    return stages


def _works(chain: Chain, speed: Fraction) -> Table:
    over, under = speed.denominator, speed.numerator
    loads = [
        ceil_div(layer.forward_ns * over, under) + ceil_div(layer.backward_ns * over, under)
        for layer in chain.layers
    ]
    work = _runs(loads)
    return np.where(np.tri(len(work), dtype=np.bool_), NEVER, work)


def _runs(sizes: list[int]) -> Table:
    """Sums of `sizes[begin:end]` as a table; negative where end < begin."""
    sums = np.array([0, *accumulate(sizes)], dtype=np.int64)
    return sums[None, :] - sums[:, None]
