"""The true optimum of tiny instances that offload, by brute force: `oracle` with the host.

Every allocation, every start of every op, every set of runs that leaves, with the stage's saved
input or without, and every time of the two transfers of a stage, judged by the verifier. k is 1
and the ways to the host are full duplex. Where one stage of a GPU offloads, its transfers leave
as early and come back as late as they can: then its bytes are away for longest, and no other one
is in the way. As in `oracle` ops wait less than a period behind the one before them: longer waits
for transfers are not among what is tried.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise, product

from pipeplan.chain import Chain
from pipeplan.cluster import Cluster
from pipeplan.plan import LayerRanges, OpKind, Plan
from pipeplan.units import ceil_div
from pipeplan.verifier import audit
from pipeplan.verifier.stage_bytes import StageBytes
from tests import oracle
from tests.offloading import offloaded
from tests.placing import Placing

Away = tuple[LayerRanges, int, bool]
"""Runs, the bytes that leave, whether the saved input is among them."""


def optimum(chain: Chain, cluster: Cluster, limit: int) -> int | None:
    """The shortest period of one micro-batch, 2bw, exact memory; None if there is none.

    Args:
        chain: at most about three layers of a few ns.
        cluster: at most two GPUs; with a host.
        limit: largest period to try.
    """
    allocations = list(oracle.every_allocation(chain, cluster))
    fields = {"semantics": "2bw", "memory_model": "exact", "microbatches": 64}
    for period in range(1, limit + 1):
        for stages in allocations:
            placing = Offloading(chain, cluster, stages, period, 1, fields)
            if max(placing.work().values()) <= period and placing.possible():
                return period
    return None


class Offloading(Placing):
    """Placement of the ops of a period, whose stages may offload."""

    def _sizes(self) -> list[StageBytes]:
        """With all that can leave away at once: what no schedule needs less than."""
        before: list[tuple[int, int, int] | None] = [None, *self.stages]
        self.ways = [
            list(_ways(self.chain, stage, ahead))
            for ahead, stage in zip(before, self.stages, strict=False)
        ]
        most = [max(size for _, size, _ in ways) for ways in self.ways]
        sizes = zip(super()._sizes(), most, strict=True)
        return [replace(size, kept=size.kept - away) for size, away in sizes]

    def _judge(self) -> bool:
        """Whether some choice of runs and times keeps every rule on the finished schedule."""
        built = self._plan()
        if self._right(built):
            return True
        lacking = {row.gpu for row in built.memory if row.peak_bytes > row.budget_bytes}
        choices = [
            ways if gpu in lacking else ways[:1]
            for ways, (_, _, gpu) in zip(self.ways, self.stages, strict=True)
        ]
        chosen = sorted(product(*choices), key=lambda each: sum(size for _, size, _ in each))
        return any(self._fits(built, each) for each in chosen if any(size for _, size, _ in each))

    def _fits(self, built: Plan, chosen: tuple[Away, ...]) -> bool:
        runs = {stage: runs for stage, (runs, size, _) in enumerate(chosen) if size}
        sizes = {stage: size for stage, (_, size, _) in enumerate(chosen) if size}
        inputs = {stage for stage, (_, _, enters) in enumerate(chosen) if enters}
        lengths = {stage: self._length(size) for stage, size in sizes.items()}
        for times in product(*(self._times(stage, lengths) for stage in lengths)):
            flat = {
                f"{stage}{kind}0": time
                for stage, pair in zip(lengths, times, strict=True)
                for kind, time in zip((OpKind.OFFLOAD, OpKind.PREFETCH), pair, strict=True)
            }
            plan = offloaded(built, runs, lengths, flat, cluster=self.cluster, inputs=inputs)
            plan = plan.model_copy(update={"memory": audit(plan).memory})
            fits = all(row.peak_bytes <= row.budget_bytes for row in plan.memory)
            if fits and not self._broken(plan):
                return True
        return False

    def _length(self, size: int) -> int:
        host = self.cluster.host
        assert host is not None
        return ceil_div(size * 10**9, host.bandwidth_bytes_per_s)

    def _times(self, stage: int, lengths: Mapping[int, int]) -> list[tuple[int, int]]:
        """Starts of OFFLOAD and PREFETCH, one behind the other."""
        forward = self.ops.index((OpKind.F, stage))
        begin = self.times[forward, 0] + self.lengths[forward]
        due = self.times[self.ops.index((OpKind.B, stage)), 0]
        length = lengths[stage]
        pairs = [
            (out, back)
            for out in range(begin, due - 2 * length + 1)
            for back in range(out + length, due - length + 1)
        ]
        beside = sum(self.stages[other][2] == self.stages[stage][2] for other in lengths)
        return (
            pairs if beside > 1 else [(a, b) for a, b in pairs if (a, b) == (begin, due - length)]
        )


def _ways(
    chain: Chain, stage: tuple[int, int, int], before: tuple[int, int, int] | None
) -> Iterator[Away]:
    """Every set of runs of a stage's layers, the empty one first, and each with the input."""
    first, last, gpu = stage
    entry = chain.layers[first].saved_input_bytes if before else 0
    if before and before[2] == gpu:
        entry = max(entry, chain.layers[first - 1].saved_output_bytes)
    for flags in product((0, 1, 2), repeat=last - first + 1):
        # 0: stays; 1: leaves, a run of its own or its first; 2: leaves with the layer before.
        if flags[0] == 2 or any(two == 2 and not one for one, two in pairwise(flags)):
            continue
        runs: list[tuple[int, int]] = []
        for layer, flag in enumerate(flags, start=first):
            if flag == 1:
                runs.append((layer, layer))
            elif flag == 2:
                runs[-1] = (runs[-1][0], layer)
        size = sum(_kept(chain, run) for run in runs)
        if size or not runs:
            yield tuple(runs), size, False
        if entry:
            yield tuple(runs), size + entry, True


def _kept(chain: Chain, run: tuple[int, int]) -> int:
    """(H1) of one run."""
    layers = chain.layers[run[0] : run[1] + 1]
    between = (max(a.saved_output_bytes, b.saved_input_bytes) for a, b in pairwise(layers))
    return sum(layer.saved_bytes for layer in layers) + sum(between)
