"""The plan as a timetable: when each op of each micro-batch is due, read with suspicion."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

from pipeplan.chain import Chain
from pipeplan.plan import LayerRanges, Op, OpKind, Plan, Remat, Stage
from pipeplan.simulator import costs
from pipeplan.simulator.result import Discrepancy
from pipeplan.simulator.tape import Ops, number


@dataclass(frozen=True, slots=True)
class Planned:
    """(T4): op `op` of micro-batch m is due at due[op][m mod k] + (m div k) * period."""

    period: int
    k: int
    due: tuple[tuple[int, ...], ...]
    steps: bool = False
    """Whether a period is a step that nothing enters or leaves (T6)."""

    @classmethod
    def of(cls, plan: Plan, ops: Ops) -> Planned:
        """The timetable of a plan in which `inspect` found nothing wrong."""
        # A pattern may have what no op of the plan is: it is late, being due before anything is.
        due = [[-1] * plan.k for _ in ops.present]
        for op in plan.ops:
            due[number(op.kind, op.stage)][op.copy_] = op.shift * plan.period_ns + op.start_ns
        within = all(
            op.shift == 0 and op.start_ns + op.duration_ns <= plan.period_ns for op in plan.ops
        )
        steps = within and plan.semantics == "flush" and plan.k == plan.microbatches
        return cls(plan.period_ns, plan.k, tuple(map(tuple, due)), steps)

    def at(self, op: int, microbatch: int) -> int:
        """When it is due, in ns."""
        return self.due[op][microbatch % self.k] + microbatch // self.k * self.period

    def depth(self, ops: Ops) -> int:
        """The last period in which one of the first k micro-batches does something.

        In a step plan what ends with the period belongs to it: no compute of another one holds
        anything up.
        """
        if self.steps:
            return 0
        return max(
            (due + duration) // self.period
            for dues, duration, present in zip(self.due, ops.duration, ops.present, strict=True)
            if present
            for due in dues
        )

    def least(self, ops: Ops) -> int:
        """Periods' worth of micro-batches after which one whole period was in steady state.

        Nothing of the first ones is left in period depth + 1; what acts there belongs to
        micro-batches up to two periods later, whose receives are posted that early at most. Of a
        step plan no receive is posted in an earlier period: one step goes before the one that
        counts, whose first events are the ends of that, and one follows, so that the distance of
        two steps can be measured.
        """
        return 3 if self.steps else self.depth(ops) + 4


def inspect(plan: Plan) -> Iterator[Discrepancy]:
    """What keeps `plan`, whose stages are sound, from being replayed: a missing or wrong op."""
    yield from _parameters(plan)
    ops = Ops.of(plan)
    present = [op for op, there in enumerate(ops.present) if there]
    count = Counter((number(op.kind, op.stage), op.copy_) for op in plan.ops)
    wanted = {
        (op, copy)
        for op in present
        for copy in range(plan.k)
        if not ops.kind(op).is_host or _offloaded(count, ops.stage(op), copy)
    }
    for op, copy in sorted(wanted | set(count)):
        got, need = count[op, copy], int((op, copy) in wanted)
        if got != need:
            label = ops.label(op, copy)
            yield Discrepancy("ops", f"op {label}", f"got it {got} times, need {need}")
    for planned in plan.ops:
        if ops.present[number(planned.kind, planned.stage)]:
            yield from _op(plan, ops, planned)
    for stage, home in enumerate(plan.stages):
        copies = any(_offloaded(count, stage, copy) for copy in range(plan.k))
        if home.offloads and not copies:
            yield Discrepancy(
                "ops", f"stages[{stage}]", "got no micro-batch that offloads, need one"
            )
    if min((planned.shift for planned in plan.ops), default=0) > 0:
        yield Discrepancy("shifts", "plan", "got nothing to do in the first period, need an op")


def _offloaded(count: Counter[tuple[int, int]], stage: int, copy: int) -> bool:
    """Whether a copy has OFFLOAD or PREFETCH: then it needs both."""
    kinds = (OpKind.OFFLOAD, OpKind.PREFETCH)
    return any(count[number(kind, stage), copy] for kind in kinds)


def _op(plan: Plan, ops: Ops, planned: Op) -> Iterator[Discrepancy]:
    """Place, duration and start of one op."""
    op, where = number(planned.kind, planned.stage), f"op {planned.label}"
    place = planned.link if planned.kind.is_send else planned.gpu
    if place != ops.place[op]:
        yield Discrepancy("ops", where, f"got place {place}, need {ops.place[op]}")
    if planned.duration_ns != ops.duration[op]:
        got, need = planned.duration_ns, ops.duration[op]
        yield Discrepancy("durations", where, f"got {got} ns, need {need} ns")
    if planned.start_ns >= plan.period_ns:
        got, need = planned.start_ns, plan.period_ns
        yield Discrepancy("shifts", where, f"got start {got} ns, need less than {need} ns")


def inspect_stages(plan: Plan) -> Iterator[Discrepancy]:
    """Micro-batches pass each layer once, in order; runs are their stage's; halves are known."""
    passed = [layer for s in plan.stages for layer in range(s.first, s.last + 1)]
    if passed != list(range(len(plan.chain.layers))):
        yield Discrepancy("stages", "plan", "got layers left out, repeated or out of order")
    for index, stage in enumerate(plan.stages):
        if stage.id != index:
            yield Discrepancy("stages", f"stages[{index}]", f"got id {stage.id}, need {index}")
        if stage.split_backward:
            yield from _split(plan, index)
        yield from _states(plan, index)
        if stage.remat is not None:
            yield from _remat(plan, index, stage.remat)


def _remat(plan: Plan, index: int, remat: Remat) -> Iterator[Discrepancy]:
    """What keeps a stage from computing again or sending away what it says."""
    stage, again, away = plan.stages[index], remat.recompute, remat.offload
    where = f"stages[{index}].remat"
    sound = _sound(stage, again, nested=True) and _sound(stage, away)
    if not sound or _layers(again) & _layers(away):
        yield Discrepancy("stages", where, f"got runs {again} again, {away} away")
    elif not _told(plan.chain, stage, _layers(again) | _layers(away)):
        got = f"got programs {remat.programs}, need options, outside of runs, no I and W"
        yield Discrepancy("stages", where, got)
    elif remat.offload_input and not _input_may_leave(plan, index, remat):
        yield Discrepancy("stages", where, "got an input away that others keep, or nobody")
    elif stage.offloads and not costs.offloaded_bytes(plan, index):
        yield Discrepancy("stages", where, f"got runs {away}, which keep nothing to send away")
    if plan.memory_model == "paper":
        yield Discrepancy("stages", where, "got it in the paper's model")


def _input_may_leave(plan: Plan, index: int, remat: Remat) -> bool:
    """Whether a run or autograd keeps the input, here and in the stage before (H1)."""
    stage = plan.stages[index]
    if stage.first in dict(remat.programs):
        return False
    if not index or plan.stages[index - 1].gpu != stage.gpu:
        return True
    before = plan.stages[index - 1]
    programs = before.remat.programs if before.remat else ()
    # What a program keeps is its own.
    return before.last not in dict(programs) or not costs.held_before(plan, index)


def _split(plan: Plan, index: int) -> Iterator[Discrepancy]:
    """Where I and W cannot stand for a backward (S1)."""
    stage, where = plan.stages[index], f"stages[{index}].split_backward"
    if (plan.semantics, plan.memory_model) != ("flush", "exact"):
        got = f"got it under {plan.semantics} in the {plan.memory_model} model"
        yield Discrepancy("stages", where, f"{got}, need flush, exact")
    if index == 0 or stage.first == 0:
        yield Discrepancy("stages", where, "got it at the start of the chain, need it behind")
    layers = plan.chain.layers[stage.first : stage.last + 1]
    told = [(layer.backward_weight_ns, layer.saved_for_weight_bytes) for layer in layers]
    if any(None in each for each in told):
        yield Discrepancy("stages", where, "got layers that do not tell what W takes and needs")


def _states(plan: Plan, index: int) -> Iterator[Discrepancy]:
    """What keeps the states of a stage from being on the host."""
    host, where = plan.cluster.host, f"stages[{index}].states"
    if plan.stages[index].states != "host":
        return
    if plan.memory_model == "paper":
        yield Discrepancy("stages", where, "got host in the paper's model")
    if host is None or host.update_bytes_per_s is None:
        yield Discrepancy("stages", where, "got host, need a host that tells how fast it updates")


def _sound(stage: Stage, runs: LayerRanges, *, nested: bool = False) -> bool:
    """Whether runs are the stage's own, in order, apart; or, `nested`, one over inside another."""
    return all(stage.first <= first <= last <= stage.last for first, last in runs) and all(
        one[1] < other[0] or (nested and one[0] <= other[0] and other[1] < one[1])
        for one, other in combinations(runs, 2)
    )


def _told(chain: Chain, stage: Stage, inside: set[int]) -> bool:
    """Whether programs are options of the stage's layers outside of runs, its backwards whole."""
    pairs = stage.remat.programs if stage.remat else ()
    layers = [layer for layer, _ in pairs]
    if layers != sorted(set(layers)) or set(layers) & inside or (layers and stage.split_backward):
        return False
    return all(
        stage.first <= layer <= stage.last and option < len(chain.layers[layer].options)
        for layer, option in pairs
    )


def _layers(runs: LayerRanges) -> set[int]:
    return {layer for first, last in runs for layer in range(first, last + 1)}


def _parameters(plan: Plan) -> Iterator[Discrepancy]:
    """A parameter that two GPUs hold has copies only where the chain says so."""
    if plan.chain.tied == "synchronize":
        return
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
