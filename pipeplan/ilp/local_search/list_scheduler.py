"""List scheduling modulo the period, for any allocation, from the last stage to the first.

A stage's activation memory grows with the time between its forward and its backward, and all later
stages run within that time. So stages are scheduled from the last to the first: every B as early
and every F as late as the later stages and the modulo reservation table allow. With one stage per
GPU the result is the contiguous optimum (`extend_span`); with several it is a heuristic of
microseconds: a stage that waits may leave a later one of its GPU a better place, which is for
local search to find out (`waits`). Compare iterative modulo scheduling, Rau (1994), which also
backtracks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import chain, compress, pairwise
from operator import add
from typing import Final

import numpy as np

from pipeplan.ilp.compiled import Records, with_attributes
from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.local_search.peak_estimate import peaks
from pipeplan.ilp.modulo_scheduling import STAGE, place
from pipeplan.ilp.schedule import OpId, Schedule
from pipeplan.plan import OpKind, Stage

PlacedStage = tuple[int, int, int]
"""(first layer, last layer, GPU)."""

NO_GPU: Final = -1
"""Before the first stage and behind the last one."""

MOST_ROWS: Final = 50_000
"""Stages of which the bytes and times are kept, of each chain."""

Wait = tuple[int, int]
"""Between the end of a stage's F and what needs it, and between what its B needs and its B."""

_KINDS: Final = (OpKind.F, OpKind.B, OpKind.SEND_F, OpKind.SEND_B)
"""As `modulo_scheduling` numbers them."""


def overload(costs: CostModel, runs: Sequence[PlacedStage], period: int, copies: int) -> float:
    """Load of all copies beyond the period, of all GPUs, as a share of it."""
    loads = (copies * load for load in _stage_rows(costs).loads(runs))
    return sum(load - period for load in loads if load > period) / period


class ModuloListScheduler:
    """One placement of stages at a period.

    Attributes:
        costs: Durations and bytes.
        runs: The stages.
        period: Of all copies, in ns.
        copies: k.
        placed: Stages that found room, from the last one on.
    """

    def __init__(
        self,
        costs: CostModel,
        runs: Sequence[PlacedStage],
        period: int,
        centres: Sequence[int] = (0,),
        waits: Mapping[int, Wait] | None = None,
    ) -> None:
        """Nothing is placed yet.

        Args:
            costs: durations and bytes.
            runs: the stages, in chain order.
            period: of all copies, in ns.
            centres: around which instants the copies' turns from F to B lie, rising; as many as
                there are copies.
            waits: of stages that are to be placed apart from the later ones though there may be
                room beside them; ns.
        """
        self.costs, self.runs, self.period, self.copies = costs, runs, period, len(centres)
        self.placed = 0
        rows = _stage_rows(costs)
        self._centres, self._stages = np.array(centres), rows.of(runs, waits or {})
        self._tables = rows.tables
        self._times = np.zeros((len(_KINDS), len(runs), self.copies), np.int64)

    def place(self) -> bool:
        """Whether all ops find room and none overtakes the next period's (R5)."""
        self.placed = place(self._stages, self._tables, self.period, self._centres, self._times)
        if self.placed < len(self.runs):
            return False
        first, last = self._times[:, :, 0], self._times[:, :, -1]
        return self.copies == 1 or bool((last - first < self.period).all())

    def peaks(self) -> list[int]:
        """Bytes of every GPU at its peak, nearly: see `peak_estimate`."""
        found = peaks(self._stages, self.period, self._times, self.costs.gpus)
        return list(map(int, found))

    @cached_property
    def times(self) -> dict[OpId, tuple[int, ...]]:
        """Starts of all copies, by op, once all are placed."""
        found: dict[OpId, tuple[int, ...]] = {}
        sends = [before[2] != after[2] for before, after in pairwise(self.runs)]
        there = {OpKind.SEND_F: [*sends, False], OpKind.SEND_B: [False, *sends]}
        for kind, rows in zip(_KINDS, self._times.tolist(), strict=True):
            used = there.get(kind, [True] * len(rows))
            for stage in compress(range(len(rows)), used):
                found[kind, stage] = tuple(rows[stage])
        return found

    def schedule(self) -> Schedule:
        """What was placed, from time 0 on."""
        origin = min(min(row) for row in self.times.values())
        times = {op: tuple(time - origin for time in row) for op, row in self.times.items()}
        stages = tuple(
            Stage(id=index, layers=(first, last), gpu=gpu)
            for index, (first, last, gpu) in enumerate(self.runs)
        )
        return Schedule(stages, self.period, self.copies, times)


class _StageRows:
    """What `modulo_scheduling.STAGE` says of a chain's stages: most come again and again."""

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs
        self._links: dict[tuple[int, int], int] = {}
        self._known = lru_cache(maxsize=MOST_ROWS)(self._row)
        speeds = [gpu.speed for gpu in costs.cluster.gpus]
        some = {speed: gpu for gpu, speed in enumerate(speeds)}
        sums = {speed: list(map(add, *costs.compute_sums(gpu))) for speed, gpu in some.items()}
        self._loads = [sums[speed] for speed in speeds]
        """By GPU: prefix sums of the layers' forward and backward."""

    @property
    def tables(self) -> int:
        """How many the stages name that were asked for."""
        return self._costs.gpus + len(self._links)

    def loads(self, runs: Sequence[PlacedStage]) -> list[int]:
        """Ns of one micro-batch on each GPU."""
        sums, overhead = self._loads, 2 * self._costs.cluster.action_overhead_ns
        loads = [0] * len(sums)
        for first, last, gpu in runs:
            own = sums[gpu]
            loads[gpu] += own[last + 1] - own[first] + overhead
        return loads

    def of(self, runs: Sequence[PlacedStage], waits: Mapping[int, Wait]) -> Records:
        """A record of each stage."""
        homes = [NO_GPU, *(gpu for _, _, gpu in runs), NO_GPU]
        ends = zip(runs, homes, homes[2:], strict=False)
        rows = b"".join(self._known(*run, before, after) for run, before, after in ends)
        records = np.frombuffer(bytearray(rows), STAGE)
        for stage, wait in waits.items():
            records["in_wait"][stage], records["out_wait"][stage] = wait
        return with_attributes(records)

    def _row(self, first: int, last: int, gpu: int, before: int, after: int) -> bytes:
        costs = self._costs
        forward = costs.forward_ns(first, last, gpu)
        size = costs.segment(first, last, covered=before == gpu)
        messages = self._messages(last, gpu, after)
        fixed, kept_after, running = size.states, 0, size.running - size.saved
        if not costs.exact:
            # Both buffers of a cut are always there; a micro-batch's bytes count from F's end on.
            ends = *messages, *self._messages(first - 1, before, gpu)
            fixed += sum(received for _, received in ends)
            kept_after, running = forward, size.running
            messages = tuple((0 if received else sent, 0) for sent, received in messages)
        row = (
            *(gpu, forward, costs.backward_ns(first, last, gpu)),
            *self._ways(last, gpu, after),
            *(0, 0),
            *(fixed, kept_after, size.saved, running, size.backward),
            *chain.from_iterable(messages),
        )
        return np.array(row, np.int64).tobytes()

    def _ways(self, boundary: int, here: int, there: int) -> tuple[int, int, int, int]:
        """Table and ns of the output's transfer and of its gradient's, if there are any."""
        if there in (here, NO_GPU):
            return -1, 0, -1, 0
        costs, links = self._costs, self._costs.cluster.links
        ways = links.resource(here, there), links.resource(there, here)
        out, back = (self._links.setdefault(way, costs.gpus + len(self._links)) for way in ways)
        send_forward = costs.send_forward_ns(boundary, here, there)
        return out, send_forward, back, costs.send_backward_ns(boundary, there, here)

    def _messages(self, boundary: int, here: int, there: int) -> tuple[tuple[int, int], ...]:
        """(bytes with the sender, bytes with the receiver) of the output and of its gradient."""
        if NO_GPU in (here, there):
            return (0, 0), (0, 0)
        costs, apart = self._costs, here != there
        return tuple(
            (
                costs.unsaved_bytes(boundary, backward=backward),
                costs.tensor_bytes(boundary, backward=backward) if apart else 0,
            )
            for backward in (False, True)
        )


@lru_cache(maxsize=64)
def _stage_rows(costs: CostModel) -> _StageRows:
    return _StageRows(costs)
