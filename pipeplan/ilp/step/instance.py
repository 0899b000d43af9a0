"""What list scheduling of a step reads of given stages: durations, transfers and bytes."""

from __future__ import annotations

from dataclasses import dataclass

from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.runs import Runs
from pipeplan.plan import Stage

Link = tuple[int, ...]
"""What transfers exclude each other on (R4)."""


@dataclass(frozen=True, slots=True)
class Hop:
    """A message between neighbouring stages on two GPUs: link, ns, bytes at its two ends."""

    link: Link
    ns: int
    sent: int
    received: int


@dataclass(frozen=True, slots=True, eq=False)
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
        outward: Message to the next stage; None on the same GPU and for the last stage.
        homeward: Message of the gradient to the stage before; None likewise.
        saved: Bytes from F to B or I.
        kept: Bytes from I to W.
        direct: Bytes between this stage and the next, if on one GPU: (output, its gradient).
        room: By GPU: its budget without states and without what any op needs beyond `saved`.
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
    outward: list[Hop | None]
    homeward: list[Hop | None]
    saved: list[int]
    kept: list[int]
    direct: list[tuple[int, int]]
    room: list[int]

    @property
    def load_ns(self) -> int:
        """What one micro-batch keeps the busiest GPU busy."""
        return max(self.work_ns(gpu) for gpu in range(len(self.hosted))) // self.microbatches

    def work_ns(self, gpu: int) -> int:
        """What all micro-batches keep a GPU busy."""
        own = self.hosted[gpu]
        one = sum(self.forward[s] + self.backward[s] + self.weight[s] for s in own)
        return one * self.microbatches

    def least_ns(self, gpu: int) -> int:
        """No step is shorter: the GPU's work, and what comes before and after all of it.

        Micro-batch 0 must come there; where no W may follow, the last one must go home from there.
        """
        own = self.hosted[gpu]
        if not own:
            return 0
        before = sum(self.forward[: own[0]])
        before += sum(hop.ns for hop in self.outward[: own[0]] if hop)
        if not any(self.weight[stage] for stage in own):
            before += sum(self.backward[: own[0]])
            before += sum(hop.ns for hop in self.homeward[: own[0] + 1] if hop)
        return self.work_ns(gpu) + before


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
    room = []
    for gpu, own in enumerate(hosted):
        beyond = [sizes[s].most_beyond_saved(stages[s].split_backward) for s in own]
        states = sum(sizes[s].states for s in own)
        room.append(costs.budgets[gpu] - states - max(beyond, default=0))
    return StepInstance(
        costs=costs,
        stages=stages,
        origin=stages if origin is None else origin,
        runs=runs,
        microbatches=microbatches,
        hosted=hosted,
        forward=[
            (costs.split_forward_ns if s.split_backward else costs.forward_ns)(
                s.first, s.last, s.gpu
            )
            for s in stages
        ],
        backward=[
            (costs.input_backward_ns if s.split_backward else costs.backward_ns)(
                s.first, s.last, s.gpu
            )
            for s in stages
        ],
        weight=[
            costs.weight_backward_ns(s.first, s.last, s.gpu) if s.split_backward else 0
            for s in stages
        ],
        outward=[_hop(costs, stages, s.id, s.id + 1, backward=False) for s in stages],
        homeward=[_hop(costs, stages, s.id, s.id - 1, backward=True) for s in stages],
        saved=[size.saved for size in sizes],
        kept=[size.weight for size in sizes],
        direct=[_direct(costs, stages, s.id) for s in stages],
        room=room,
    )


def _hop(
    costs: CostModel, stages: tuple[Stage, ...], here: int, there: int, *, backward: bool
) -> Hop | None:
    """The message from one stage to a neighbour, if they are on two GPUs."""
    if not 0 <= there < len(stages) or stages[here].gpu == stages[there].gpu:
        return None
    source, target = stages[here].gpu, stages[there].gpu
    boundary = stages[max(here, there)].first - 1
    lasts = costs.send_backward_ns if backward else costs.send_forward_ns
    return Hop(
        costs.cluster.links.resource(source, target),
        lasts(boundary, source, target),
        costs.unsaved_bytes(boundary, backward=backward),
        costs.tensor_bytes(boundary, backward=backward),
    )


def _direct(costs: CostModel, stages: tuple[Stage, ...], here: int) -> tuple[int, int]:
    if here + 1 == len(stages) or stages[here].gpu != stages[here + 1].gpu:
        return 0, 0
    boundary = stages[here].last
    return (
        costs.unsaved_bytes(boundary, backward=False),
        costs.unsaved_bytes(boundary, backward=True),
    )
