"""Which stages and ops a plan must have, and where: rules `stages`, `ops` and `tied`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from pipeplan.plan import Op, OpKind, Plan
from pipeplan.verifier import host_states
from pipeplan.verifier.remat import host_ops, runs
from pipeplan.verifier.split import allowed
from pipeplan.verifier.violation import Rule, Violation

Place = int | tuple[int, int]
"""A GPU, or a directed link as (from, to)."""


def stages(plan: Plan) -> Iterator[Violation]:
    """Stage ids are 0..S-1 in order, their layers 0..L-1 once each in order, runs are sound."""
    expected = 0
    for index, stage in enumerate(plan.stages):
        where = f"stages[{index}]"
        if stage.id != index:
            yield Violation(Rule.STAGES, where, f"got id {stage.id}, need {index}")
        if stage.first != expected:
            yield Violation(
                Rule.STAGES, where, f"got first layer {stage.first}, need layer {expected}"
            )
        yield from runs(plan, stage)
        yield from allowed(plan, stage)
        yield from host_states.allowed(plan, stage)
        expected = stage.last + 1
    if expected != len(plan.chain.layers):
        yield Violation(
            Rule.STAGES,
            f"stages[{len(plan.stages) - 1}]",
            f"got last layer {expected - 1}, need {len(plan.chain.layers) - 1}: the chain's last",
        )


def chain_order(plan: Plan) -> tuple[tuple[OpKind, int], ...]:
    """The ops of one micro-batch as (kind, stage), first to last, absent transfers left out.

    `SEND_F_s` and `SEND_B_{s+1}` exist exactly where stages s and s+1 sit on different GPUs. I
    stands for B where the backward is split; its W is no part of this order (S1).
    """
    last = len(plan.stages) - 1
    cut = [plan.stages[s].gpu != plan.stages[s + 1].gpu for s in range(last)]
    order: list[tuple[OpKind, int]] = []
    for s in range(last + 1):
        order.append((OpKind.F, s))
        if s < last and cut[s]:
            order.append((OpKind.SEND_F, s))
    for s in range(last, -1, -1):
        order.append((plan.stages[s].backward, s))
        if s > 0 and cut[s - 1]:
            order.append((OpKind.SEND_B, s))
    return tuple(order)


def place(plan: Plan, kind: OpKind, stage: int) -> Place:
    """The GPU an op runs on or whose way to the host it takes, or its link (from, to)."""
    here = plan.stages[stage].gpu
    if not kind.is_send:
        return here
    other = stage + 1 if kind is OpKind.SEND_F else stage - 1
    return here, plan.stages[other].gpu


def ops(plan: Plan) -> Iterator[Violation]:
    """Exactly the ops of (T1) and (S1) for every copy and those of (H2), each once, at its place.

    Needs sound stages.
    """
    found: dict[tuple[OpKind, int, int], list[int]] = defaultdict(list)
    for index, op in enumerate(plan.ops):
        found[op.kind, op.stage, op.copy_].append(index)
    halves = ((OpKind.W, stage.id) for stage in plan.stages if stage.split_backward)
    wanted = {(kind, s, c) for kind, s in (*chain_order(plan), *halves) for c in range(plan.k)}
    for kind, s, c in sorted(wanted - found.keys(), key=str):
        yield Violation(Rule.OPS, f"op {s}{kind}{c}", "got 0 of it, need 1")
    yield from host_ops(plan, found.keys())
    for (kind, s, c), indices in found.items():
        where = f"op {s}{kind}{c} (ops[{indices[0]}])"
        if not kind.is_host and (kind, s, c) not in wanted:
            why = "no such transfer" if kind.is_send else _how(plan, s)
            yield Violation(Rule.OPS, where, f"got {len(indices)} of it, need 0: {why}")
            continue
        if len(indices) > 1:
            yield Violation(Rule.OPS, where, f"got {len(indices)} of it, need 1: {indices}")
        for index in indices:
            yield from _misplaced(plan, plan.ops[index], f"op {s}{kind}{c} (ops[{index}])")


def _how(plan: Plan, stage: int) -> str:
    split = plan.stages[stage].split_backward
    return f"the backward of stage {stage} is {'split' if split else 'not split'}"


def _misplaced(plan: Plan, op: Op, where: str) -> Iterator[Violation]:
    got, need = op.link if op.kind.is_send else op.gpu, place(plan, op.kind, op.stage)
    if got != need:
        what = "link" if op.kind.is_send else "GPU"
        yield Violation(Rule.OPS, where, f"got {what} {got}, need {need}, where its stages are")


def tied(plan: Plan) -> Iterator[Violation]:
    """Layers that share a parameter name sit on one GPU, unless their copies are synchronized.

    Needs sound stages.
    """
    if plan.chain.tied == "synchronize":
        return
    home: dict[str, tuple[int, int]] = {}
    for stage in plan.stages:
        for index in range(stage.first, stage.last + 1):
            for name in dict.fromkeys(plan.chain.layers[index].parameters):
                layer, gpu = home.setdefault(name, (index, stage.gpu))
                if gpu != stage.gpu:
                    yield Violation(
                        Rule.TIED,
                        f"parameter {name!r}",
                        f"layer {index} is on GPU {stage.gpu}, need GPU {gpu},"
                        f" where layer {layer} has it too",
                    )
