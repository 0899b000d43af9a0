"""What list scheduling of a step reads of given stages: durations, transfers and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from pipeplan.ilp.compiled import Ints, Records
from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.runs import Runs
from pipeplan.ilp.segment_bytes import SegmentBytes
from pipeplan.ilp.step.dispatch import GPU, LINE, B, F, W
from pipeplan.plan import Stage

Link = tuple[int, ...]
"""What transfers exclude each other on (R4)."""


@dataclass(frozen=True, eq=False)
class StepInstance:
    """Stages on GPUs; lists are by stage unless stated, times in ns, sizes in bytes.

    Attributes:
        costs: Of the chain whose layers the stages name.
        stages: In chain order, with `split_backward` where the backward is two ops.
        origin: The same stages in layers of the chain as it is, where runs of it are contracted.
        runs: What is recomputed.
        microbatches: Of the step.
        hosted: By GPU: its stages.
        forward, backward, weight: Durations of F, of B or I, and of W; W is 0 where B is whole.
        lines: Of F, B or I, and W of every stage, as `dispatch.LINE` says, before any op.
        gpus: As `dispatch.GPU` says, before any op; the room is the budget without states and
            without what any op needs beyond what is saved.
    """

    costs: CostModel
    stages: tuple[Stage, ...]
    origin: tuple[Stage, ...]
    runs: Runs
    microbatches: int
    hosted: tuple[tuple[int, ...], ...]
    forward: list[int]
    backward: list[int]
    weight: list[int]
    lines: Records
    gpus: Records

    @cached_property
    def by_gpu(self) -> Ints:
        """Stages, GPU by GPU."""
        return np.array([stage for own in self.hosted for stage in own])

    @cached_property
    def links(self) -> int:
        """How many there are."""
        return int(self.lines["link"].max()) + 1

    @cached_property
    def works_ns(self) -> list[int]:
        """By GPU: what one micro-batch keeps it busy."""
        works: list[int] = self.gpus["work"].tolist()
        return works

    @cached_property
    def load_ns(self) -> int:
        """What one micro-batch keeps the busiest GPU busy."""
        return max(self.works_ns)

    @cached_property
    def mean_ns(self) -> float:
        """What all micro-batches keep a GPU busy in the mean."""
        return self.microbatches * sum(self.works_ns) / len(self.hosted)

    @cached_property
    def least_ns(self) -> int:
        """No step is shorter: a GPU's work, and what comes before and after all of it.

        Micro-batch 0 must come there; where no W may follow, the last one must go home from there.
        """
        return max(map(self._least_ns, range(len(self.hosted))))

    @cached_property
    def hops_ns(self) -> tuple[list[int], list[int]]:
        """Of F, and of B or I, by stage: what the output takes to its neighbour."""
        stages = len(self.stages)
        hops = self.lines["hop_ns"].tolist()
        return hops[:stages], hops[stages : 2 * stages]

    def _least_ns(self, gpu: int) -> int:
        own = self.hosted[gpu]
        if not own:
            return 0
        first, (outward, homeward) = own[0], self.hops_ns
        before = sum(self.forward[:first]) + sum(outward[:first])
        if not any(self.weight[stage] for stage in own):
            before += sum(self.backward[:first]) + sum(homeward[: first + 1])
        return self.microbatches * self.works_ns[gpu] + before


def instance(
    costs: CostModel,
    stages: tuple[Stage, ...],
    microbatches: int,
    origin: tuple[Stage, ...] | None = None,
    runs: Runs = (),
) -> StepInstance:
    """The instance of given stages; neighbours on one GPU hand on directly.

    Args:
        costs: of the chain, or of the contracted one.
        stages: in its layers.
        microbatches: of the step.
        origin: the stages in layers of the chain as it is; None: `stages`.
        runs: that are contracted.
    """
    hosted = tuple(
        tuple(stage.id for stage in stages if stage.gpu == gpu) for gpu in range(costs.gpus)
    )
    sizes = [
        costs.segment(s.first, s.last, s.id > 0 and stages[s.id - 1].gpu == s.gpu) for s in stages
    ]
    forward = [
        (costs.split_forward_ns if s.split_backward else costs.forward_ns)(s.first, s.last, s.gpu)
        for s in stages
    ]
    backward = [
        (costs.input_backward_ns if s.split_backward else costs.backward_ns)(
            s.first, s.last, s.gpu
        )
        for s in stages
    ]
    weight = [
        costs.weight_backward_ns(s.first, s.last, s.gpu) if s.split_backward else 0 for s in stages
    ]
    lines = _lines(costs, stages, (forward, backward, weight), sizes)
    return StepInstance(
        costs=costs,
        stages=stages,
        origin=stages if origin is None else origin,
        runs=runs,
        microbatches=microbatches,
        hosted=hosted,
        forward=forward,
        backward=backward,
        weight=weight,
        lines=lines,
        gpus=_gpus(costs, stages, hosted, lines["ns"], sizes),
    )


class _Hop(NamedTuple):
    """An output that is handed on: as in `dispatch.LINE`."""

    to: int = -1
    link: int = -1
    ns: int = 0
    sent: int = 0
    received: int = 0


def _lines(
    costs: CostModel,
    stages: tuple[Stage, ...],
    durations: Sequence[Sequence[int]],
    sizes: Sequence[SegmentBytes],
) -> Records:
    """Lines before any op."""
    links: dict[Link, int] = {}
    hops = [_hop(costs, stages, kind, s.id, links) for kind in (F, B) for s in stages]
    hops += [_Hop()] * len(stages)
    received = {hop.to: hop.received for hop in hops}
    rows = []
    for kind in (F, B, W):
        for stage, size, ns in zip(stages, sizes, durations[kind], strict=True):
            number = kind * len(stages) + stage.id
            kept = size.weight if durations[W][stage.id] else 0
            saved, left = ((size.saved, 0), (0, kept - size.saved), (0, -kept))[kind]
            own = stage.gpu, ns, received.get(number, 0), saved, left
            rows.append((*own, *hops[number], 0, 0, 0))
    return np.array(rows, LINE)


def _hop(
    costs: CostModel, stages: tuple[Stage, ...], kind: int, here: int, links: dict[Link, int]
) -> _Hop:
    """What becomes of the output of a stage's F, or of its B or I; a new link gets a number."""
    there = here + 1 if kind == F else here - 1
    if there == len(stages):
        return _Hop(to=B * len(stages) + here)
    if there < 0:
        return _Hop()
    boundary = stages[max(here, there)].first - 1
    source, target = stages[here].gpu, stages[there].gpu
    unsaved = costs.unsaved_bytes(boundary, backward=kind == B)
    if source == target:
        return _Hop(to=kind * len(stages) + there, received=unsaved)
    lasts = costs.send_forward_ns if kind == F else costs.send_backward_ns
    return _Hop(
        to=kind * len(stages) + there,
        link=links.setdefault(costs.cluster.links.resource(source, target), len(links)),
        ns=lasts(boundary, source, target),
        sent=unsaved,
        received=costs.tensor_bytes(boundary, backward=kind == B),
    )


def _gpus(
    costs: CostModel,
    stages: tuple[Stage, ...],
    hosted: Sequence[Sequence[int]],
    durations: Ints,
    sizes: Sequence[SegmentBytes],
) -> Records:
    """GPUs before any op."""
    rows, first = [], 0
    works = durations.reshape(-1, len(stages)).sum(axis=0)
    for gpu, own in enumerate(hosted):
        beyond = [sizes[s].most_beyond_saved(stages[s].split_backward) for s in own]
        states = sum(sizes[s].states for s in own)
        room = costs.budgets[gpu] - states - max(beyond, default=0)
        whole = sum(sizes[s].saved for s in own)
        work = sum(works[s] for s in own)
        rows.append((first, first + len(own), room, whole, work, 0, False, False))
        first += len(own)
    return np.array(rows, GPU)
