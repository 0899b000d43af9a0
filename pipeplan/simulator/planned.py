"""The plan as a timetable: when each op of each micro-batch is due, read with suspicion."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from pipeplan.plan import Plan
from pipeplan.simulator.result import Discrepancy
from pipeplan.simulator.tape import Ops, number


@dataclass(frozen=True, slots=True)
class Planned:
    """(T4): op `op` of micro-batch m is due at due[op][m mod k] + (m div k) * period."""

    period: int
    k: int
    due: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, plan: Plan, ops: Ops) -> Planned:
        """The timetable of a plan in which `inspect` found nothing wrong."""
        due = [[0] * plan.k for _ in ops.present]
        for op in plan.ops:
            due[number(op.kind, op.stage)][op.copy_] = op.shift * plan.period_ns + op.start_ns
        return cls(plan.period_ns, plan.k, tuple(map(tuple, due)))

    def at(self, op: int, microbatch: int) -> int:
        """When it is due, in ns."""
        return self.due[op][microbatch % self.k] + microbatch // self.k * self.period

    def depth(self, ops: Ops) -> int:
        """The last period in which one of the first k micro-batches does something."""
        return max(
            (due + duration) // self.period
            for dues, duration, present in zip(self.due, ops.duration, ops.present, strict=True)
            if present
            for due in dues
        )

    def least(self, ops: Ops) -> int:
        """Periods' worth of micro-batches after which one whole period was in steady state.

        Nothing of the first ones is left in period depth + 1; what acts there belongs to
        micro-batches up to two periods later, whose receives are posted that early at most.
        """
        return self.depth(ops) + 4


def inspect(plan: Plan) -> Iterator[Discrepancy]:
    """What keeps `plan` from being replayed at all: a hole in the model, a missing or wrong op."""
    yield from _stages(plan)
    yield from _parameters(plan)
    ops = Ops.of(plan)
    wanted = {
        (op, copy) for op in range(len(ops.present)) if ops.present[op] for copy in range(plan.k)
    }
    count = Counter((number(op.kind, op.stage), op.copy_) for op in plan.ops)
    for op, copy in sorted(wanted | set(count)):
        needed = int((op, copy) in wanted)
        if count[op, copy] != needed:
            yield Discrepancy(
                "ops",
                f"op {ops.label(op, copy)}",
                f"got it {count[op, copy]} times, need {needed}",
            )
    for planned in plan.ops:
        op = number(planned.kind, planned.stage)
        place = planned.gpu if planned.kind.is_compute else planned.link
        where = f"op {planned.label}"
        if ops.present[op] and place != ops.place[op]:
            yield Discrepancy("ops", where, f"got place {place}, need {ops.place[op]}")
        if ops.present[op] and planned.duration_ns != ops.duration[op]:
            yield Discrepancy(
                "durations", where, f"got {planned.duration_ns} ns, need {ops.duration[op]} ns"
            )
        if planned.start_ns >= plan.period_ns:
            yield Discrepancy(
                "shifts", where, f"got start {planned.start_ns}, need less than {plan.period_ns}"
            )
    if plan.ops and min(each.shift for each in plan.ops):
        yield Discrepancy("shifts", "plan", "got nothing to do in the first period, need an op")


def _stages(plan: Plan) -> Iterator[Discrepancy]:
    """Micro-batches must pass every layer once, in order."""
    passed = [layer for s in plan.stages for layer in range(s.first, s.last + 1)]
    if passed != list(range(len(plan.chain.layers))):
        yield Discrepancy("stages", "plan", "got layers left out, repeated or out of order")
    for index, stage in enumerate(plan.stages):
        if stage.id != index:
            yield Discrepancy("stages", f"stages[{index}]", f"got id {stage.id}, need {index}")
        if stage.remat is not None:
            yield Discrepancy("stages", f"stages[{index}]", "got remat, need null")


def _parameters(plan: Plan) -> Iterator[Discrepancy]:
    """No program exchanges the gradients of a parameter that two GPUs hold."""
    holders: dict[str, int] = {}
    for stage in plan.stages:
        for layer in plan.chain.layers[stage.first : stage.last + 1]:
            for name in layer.parameters:
                if holders.setdefault(name, stage.gpu) != stage.gpu:
                    yield Discrepancy(
                        "tied",
                        f"parameter {name!r}",
                        f"got it on GPUs {holders[name]} and {stage.gpu}, need one GPU",
                    )
