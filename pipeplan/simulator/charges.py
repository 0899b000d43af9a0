"""What each kind of event adds to or takes from a rank's bytes, in the plan's memory model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pipeplan.plan import OpKind, Plan
from pipeplan.simulator import costs
from pipeplan.simulator.tape import Does, Ops, number, offloading

SAVED, WORKING, DIRECT, MESSAGE, HOST = range(5)
"""What is charged; HOST is not the rank's own memory."""
_NOTHING = (SAVED, 0)


@dataclass(frozen=True, slots=True)
class Charges:
    """By op number. A change is [saved, working, direct, message, host] bytes."""

    start: list[list[int]]
    end: list[list[int]]
    passing: dict[tuple[int, int], tuple[int, int]]
    """(Does, op) -> (term, bytes more or fewer) of what a rank does beside its computes."""
    back: list[int]
    """By B (or I): the host's bytes that its start gives back, if that was offloaded."""
    update: list[int]
    """Working bytes of an OPT, by the B (or I) of its stage."""
    shared: list[int]
    """By I: what W needs of the stage before, which has it anyway until its backward starts."""
    starts_only: bool
    """Whether the model looks only at starts of computes (the paper's instants)."""

    @classmethod
    def of(cls, plan: Plan, ops: Ops) -> Charges:
        """The charges of the plan's memory model, for every op of its stages."""
        size = len(ops.present)
        paper = plan.memory_model == "paper"
        charges = cls(
            [[0] * 5 for _ in range(size)],
            [[0] * 5 for _ in range(size)],
            {},
            [0] * size,
            [0] * size,
            [0] * size,
            paper,
        )
        for stage in range(len(plan.stages)):
            charges._charge_stage(plan, ops, stage)
            if plan.stages[stage].split_backward:
                charges._charge_weights(plan, stage)
        for stage in offloading(plan):
            charges._charge_host(plan, ops, stage)
        for producer, transfer, consumer in handovers(ops):
            charges._charge_handover(plan, producer, transfer, consumer)
        return charges

    def _charge_stage(self, plan: Plan, ops: Ops, stage: int) -> None:
        """(M2) and (M3), or (P2) and (P3), and the workspace of the optimizer."""
        paper = plan.memory_model == "paper"
        size = (costs.paper_bytes if paper else costs.live_stage_bytes)(plan, stage)
        forward, backward = number(OpKind.F, stage), ops.backward(stage)
        # The paper counts what is kept from the end of F on, the exact model from its start.
        (self.end if paper else self.start)[forward][SAVED] += size.kept
        self.end[backward][SAVED] -= size.kept
        for op, running in ((forward, size.forward), (backward, size.backward)):
            working = running if paper else running - size.kept
            self.start[op][WORKING] += working
            self.end[op][WORKING] -= working
        self.update[backward] = costs.update_bytes(plan, stage)

    def _charge_weights(self, plan: Plan, stage: int) -> None:
        """(S3) and (S5): what I leaves for W, and what W needs beside it."""
        size = costs.live_weight_bytes(plan, stage)
        inputs, weights = number(OpKind.I, stage), number(OpKind.W, stage)
        self.end[inputs][SAVED] += size.kept - size.shared
        self.shared[inputs] = size.shared
        self.end[weights][SAVED] -= size.kept
        self.start[weights][WORKING] += size.running - size.kept
        self.end[weights][WORKING] -= size.running - size.kept

    def _charge_host(self, plan: Plan, ops: Ops, stage: int) -> None:
        """(H6) and (H7)."""
        size = costs.offloaded_bytes(plan, stage)
        there, back = number(OpKind.OFFLOAD, stage), number(OpKind.PREFETCH, stage)
        self.passing[Does.OFFLOAD, there] = HOST, size
        self.passing[Does.FREE, there] = SAVED, -size
        self.passing[Does.PREFETCH, back] = SAVED, size
        self.back[ops.backward(stage)] = size

    def _charge_handover(
        self, plan: Plan, producer: int, transfer: int | None, consumer: int
    ) -> None:
        """(M4) and (M5), or (P4); the paper's message buffers are permanent, see `ledger`."""
        result = result_bytes(plan, producer)
        if transfer is None:
            self.end[producer][DIRECT] += result
            self.start[consumer][DIRECT] -= result
        elif plan.memory_model == "exact":
            whole = costs.message_bytes(plan, Ops.kind(transfer), Ops.stage(transfer))
            self.end[producer][MESSAGE] += result
            self.passing[Does.FREE, transfer] = MESSAGE, -result
            self.passing[Does.RECV, transfer] = MESSAGE, whole
            self.start[consumer][MESSAGE] -= whole

    def beside(self, does: int, op: int) -> tuple[int, int]:
        """(term, change in bytes) as a rank passes an entry that is no compute."""
        return self.passing.get((does, op), _NOTHING)


def handovers(ops: Ops) -> Iterator[tuple[int, int | None, int]]:
    """(producer, transfer or None, consumer) for each tensor that passes between two stages."""
    for op, present in enumerate(ops.present):
        if not present or not ops.kind(op).is_compute:
            continue
        after = ops.after[op]
        if after >= 0 and not ops.kind(after).is_compute:
            yield op, after, ops.after[after]
        elif after >= 0 and ops.stage(after) != ops.stage(op):
            yield op, None, after


def tensor_bytes(plan: Plan, producer: int) -> int:
    """The paper's size of what a compute hands over: a gradient is as large as its boundary."""
    home = plan.stages[Ops.stage(producer)]
    if Ops.kind(producer) is OpKind.F:
        return plan.chain.layers[home.last].output_bytes
    return plan.chain.input_of(home.first)


def result_bytes(plan: Plan, producer: int) -> int:
    """What a compute hands over beside what its stage keeps anyway."""
    if plan.memory_model == "paper":
        return tensor_bytes(plan, producer)
    home = plan.stages[Ops.stage(producer)]
    if Ops.kind(producer) is not OpKind.F:
        return plan.chain.gradient_of_input(home.first)
    last = plan.chain.layers[home.last]
    kept = last.saved_output_bytes
    if plan.cluster.host is None:  # else what passes may have left for it
        kept += last.saved_passing_bytes
    return last.output_bytes - kept
