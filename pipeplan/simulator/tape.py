"""The program as the engine reads it: flat entries, ops by number."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Literal

from pipeplan.errors import InputError
from pipeplan.plan import OpKind, Plan
from pipeplan.program import ActionKind, Program
from pipeplan.simulator import costs

KINDS = tuple(OpKind)
"""In the order of their numbers."""


class Does(IntEnum):
    """What an entry of a tape does to its op."""

    COMPUTE = 0
    SEND = 1
    RECV = 2
    FREE = 3
    OPT = 4
    OFFLOAD = 5
    PREFETCH = 6


OpTimes = Mapping[tuple[OpKind | Literal["OPT"], int], int]
"""How long ops last, in ns, by kind and stage; OPT is a stage's update."""
Entry = tuple[int, int, int]
"""(Does, op, micro-batch); an OPT has the op B (or I) of its stage and micro-batch -1."""


def number(kind: OpKind, stage: int) -> int:
    """The number of an op; `Ops.kind` and `Ops.stage` undo it."""
    return len(KINDS) * stage + KINDS.index(kind)


@dataclass(frozen=True, slots=True)
class Ops:
    """All ops of one micro-batch by number; entries of absent ones are unused.

    OFFLOAD and PREFETCH are present where the stage may do them; not every micro-batch does.
    """

    present: tuple[bool, ...]
    place: tuple[int | tuple[int, int], ...]
    """GPU, or (from, to) of a SEND."""
    duration: tuple[int, ...]
    before: tuple[int, ...]
    """The op in chain order whose end this one waits for; -1 for the very first.

    OFFLOAD waits for F (or begins with it), PREFETCH for OFFLOAD, B for PREFETCH too, W for I.
    """
    after: tuple[int, ...]
    """The op in chain order that waits for this one; -1 for the very last."""
    with_forward: frozenset[int]
    """The OFFLOADs that may begin with their F, not only behind it (H3)."""
    position: tuple[int, ...]
    """(T1), (H5), (S1)."""
    update: tuple[int, ...]
    """Per stage, the ns for which its optimizer step holds the rank."""
    behind: tuple[int, ...]
    """Per stage, the ns for which it goes on behind that, on the host (U7)."""
    step: int
    """Micro-batches between two optimizer steps."""

    @classmethod
    def of(cls, plan: Plan) -> Ops:
        """The ops that the stages of `plan` need, with the replay's own durations."""
        chain = chain_order(plan)
        size = len(KINDS) * len(plan.stages)
        present, duration = [False] * size, [0] * size
        before, after = [-1] * size, [-1] * size
        places: list[int | tuple[int, int]] = [0] * size
        for i, (kind, stage) in enumerate(chain):
            op = number(kind, stage)
            present[op] = True
            gpu = plan.stages[stage].gpu
            if kind.is_compute:
                places[op] = gpu
                duration[op] = costs.compute_ns(plan, kind, stage)
            else:
                peer = stage + 1 if kind is OpKind.SEND_F else stage - 1
                places[op] = (gpu, plan.stages[peer].gpu)
                duration[op] = costs.transfer_ns(plan, kind, stage)
            if i:
                before[op] = number(*chain[i - 1])
                after[before[op]] = op
        for stage in range(len(plan.stages)):
            if plan.stages[stage].split_backward:
                op = number(OpKind.W, stage)
                present[op], places[op] = True, plan.stages[stage].gpu
                before[op] = number(OpKind.I, stage)
                duration[op] = costs.compute_ns(plan, OpKind.W, stage)
        for stage in offloading(plan):
            previous = number(OpKind.F, stage)
            for kind in (OpKind.OFFLOAD, OpKind.PREFETCH):
                op = number(kind, stage)
                present[op], places[op] = True, plan.stages[stage].gpu
                before[op], duration[op] = previous, costs.host_ns(plan, stage)
                previous = op
        return cls(
            tuple(present),
            tuple(places),
            tuple(duration),
            tuple(before),
            tuple(after),
            frozenset(
                number(OpKind.OFFLOAD, stage)
                for stage in offloading(plan)
                if costs.leaves_with_forward(plan, stage)
            ),
            tuple(_position(op, len(plan.stages)) for op in range(size)),
            tuple(costs.update_ns(plan, stage) for stage in range(len(plan.stages))),
            tuple(costs.behind_ns(plan, stage) for stage in range(len(plan.stages))),
            plan.microbatches,
        )

    def lasting(self, times: OpTimes) -> Ops:
        """The same ops, those in `times` so long."""
        duration, update = list(self.duration), list(self.update)
        for (kind, stage), ns in times.items():
            if kind == "OPT":
                update[stage] = ns
            else:
                duration[number(kind, stage)] = ns
        return replace(self, duration=tuple(duration), update=tuple(update))

    def backward(self, stage: int) -> int:
        """B of a stage, or I where its backward is split."""
        split = number(OpKind.I, stage)
        return split if self.present[split] else number(OpKind.B, stage)

    @staticmethod
    def kind(op: int) -> OpKind:
        """What `op` does."""
        return KINDS[op % len(KINDS)]

    @staticmethod
    def stage(op: int) -> int:
        """The stage it belongs to."""
        return op // len(KINDS)

    @classmethod
    def label(cls, op: int, microbatch: int) -> str:
        """`2F0`: stage, kind, micro-batch."""
        return f"{cls.stage(op)}{cls.kind(op)}{microbatch}"


def _position(op: int, stages: int) -> int:
    """(T1): two places per stage down, two on the way back, two for the host, then one for W."""
    kind, stage = Ops.kind(op), Ops.stage(op)
    if kind is OpKind.W:
        return 6 * stages + stage
    if kind.is_host:
        return 2 * (2 * stages + stage) + (kind is OpKind.PREFETCH)
    down = kind in (OpKind.F, OpKind.SEND_F)
    base = 2 * stage if down else 2 * (2 * stages - 1 - stage) - 1
    return base + (not kind.is_compute)


def offloading(plan: Plan) -> list[int]:
    """The stages that have a host and something to send to it."""
    if plan.cluster.host is None:
        return []
    return [i for i, stage in enumerate(plan.stages) if stage.offloads]


def chain_order(plan: Plan) -> list[tuple[OpKind, int]]:
    """What happens to one micro-batch, in order; W is beside it."""
    down, up = [], []
    for stage in range(len(plan.stages)):
        crosses = stage > 0 and plan.stages[stage - 1].gpu != plan.stages[stage].gpu
        if crosses:
            down.append((OpKind.SEND_F, stage - 1))
            up.append((OpKind.SEND_B, stage))
        down.append((OpKind.F, stage))
        up.append((OpKind.I if plan.stages[stage].split_backward else OpKind.B, stage))
    return down + up[::-1]


def record(program: Program, ops: Ops) -> tuple[list[list[Entry]], int]:
    """The entries of each rank, and how many micro-batches they handle.

    Raises:
        InputError: if an action names a stage or a message that the plan does not have, or if
            micro-batches are not counted from 0.
    """
    table = _table(ops)
    tapes: list[list[Entry]] = []
    microbatches = 0
    for rank, actions in enumerate(program.ranks):
        tape: list[Entry] = []
        for action in actions:
            meaning = table.get((action.kind, action.stage))
            if meaning is None or meaning[2] != rank:
                where = "no rank" if meaning is None else f"rank {meaning[2]}"
                raise InputError(
                    f"program: rank {rank}: got {action}, which the plan has on {where}"
                )
            microbatch = -1 if action.microbatch is None else action.microbatch
            microbatches = max(microbatches, microbatch + 1)
            tape.append((meaning[0], meaning[1], microbatch))
        tapes.append(tape)
    if microbatches > sum(map(len, tapes)):
        raise InputError(
            f"program: got micro-batch {microbatches - 1}, need micro-batches counted from 0"
        )
    return tapes, microbatches


def _table(ops: Ops) -> dict[tuple[ActionKind, int], tuple[int, int, int]]:
    """(action kind, stage) -> (Does, op, rank)."""
    table: dict[tuple[ActionKind, int], tuple[int, int, int]] = {}
    for op, present in enumerate(ops.present):
        kind, stage, place = ops.kind(op), ops.stage(op), ops.place[op]
        if not present:
            continue
        if isinstance(place, tuple):
            forward = kind is OpKind.SEND_F
            receive = ActionKind.RECV_F if forward else ActionKind.RECV_B
            free = ActionKind.FREE_F if forward else ActionKind.FREE_B
            table[ActionKind(kind), stage] = (Does.SEND, op, place[0])
            table[free, stage] = (Does.FREE, op, place[0])
            table[receive, stage + 1 if forward else stage - 1] = (Does.RECV, op, place[1])
            continue
        for action, does in _AT_HOME[kind].items():
            table[action, stage] = (does, op, place)
    return table


_AT_HOME = {
    OpKind.F: {ActionKind.F: Does.COMPUTE},
    OpKind.B: {ActionKind.B: Does.COMPUTE, ActionKind.OPT: Does.OPT},
    OpKind.I: {ActionKind.I: Does.COMPUTE, ActionKind.OPT: Does.OPT},
    OpKind.W: {ActionKind.W: Does.COMPUTE},
    OpKind.OFFLOAD: {ActionKind.OFFLOAD: Does.OFFLOAD, ActionKind.FREE_O: Does.FREE},
    OpKind.PREFETCH: {ActionKind.PREFETCH: Does.PREFETCH},
}
"""Actions of the ops that concern one rank alone."""
