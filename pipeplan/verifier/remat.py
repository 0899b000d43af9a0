"""What a stage's `remat` may say, and which ops it asks for: its part of `stages` and `ops`."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from pipeplan.plan import LayerRanges, OpKind, Plan, Stage
from pipeplan.verifier.stage_bytes import offloaded, saved_output, stage_before
from pipeplan.verifier.violation import Rule, Violation


def runs(plan: Plan, stage: Stage) -> Iterator[Violation]:
    """Runs and programs lie in their stage, in order, apart; exact model only; bytes leave."""
    remat, where = stage.remat, f"stages[{stage.id}].remat"
    if remat is None:
        return
    if plan.memory_model != "exact":
        got = f"got it in the {plan.memory_model} memory model, need the exact one"
        yield Violation(Rule.STAGES, where, got)
    broken = [
        *_nested(stage, remat.recompute, f"{where}.recompute"),
        *_in_order(stage, remat.offload, f"{where}.offload"),
    ]
    yield from broken or _apart(remat.recompute, remat.offload, f"{where}.offload")
    yield from _programs(plan, stage, f"{where}.programs")
    if remat.offload_input:
        yield from _input(plan, stage, f"{where}.offload_input")
    if not broken and remat.offloads and not offloaded(plan, stage):
        got = "got runs that keep 0 bytes, need more: (H1), saved_bytes and boundaries inside them"
        yield Violation(Rule.STAGES, f"{where}.offload", got)


def _in_order(stage: Stage, given: LayerRanges, where: str) -> Iterator[Violation]:
    """The first run that is not behind the one before it, or not in the stage."""
    free = stage.first
    for first, last in given:
        if not free <= first <= last <= stage.last:
            need = f"got run [{first}, {last}], need one within [{free}, {stage.last}]"
            yield Violation(Rule.STAGES, where, need)
            return
        free = last + 1


def _nested(stage: Stage, given: LayerRanges, where: str) -> Iterator[Violation]:
    """The first run that is not behind the one before it, nor in it and over before its end."""
    around: list[tuple[int, int]] = []
    for first, last in given:
        while around and around[-1][1] < first:
            around.pop()
        low, high = (around[-1][0], around[-1][1] - 1) if around else stage.layers
        if not low <= first <= last <= high:
            behind = f", or behind layer {around[-1][1]}" if around else ""
            got = f"got run [{first}, {last}], need one within [{low}, {high}]{behind}"
            yield Violation(Rule.STAGES, where, got)
            return
        around.append((first, last))


def _apart(recomputed: LayerRanges, sent: LayerRanges, where: str) -> Iterator[Violation]:
    """No layer is in a run of both kinds."""
    for first, last in sent:
        for a, b in recomputed:
            if a <= last and first <= b:
                need = f"need one apart from [{a}, {b}], which is computed again"
                yield Violation(Rule.STAGES, where, f"got run [{first}, {last}], {need}")


def _programs(plan: Plan, stage: Stage, where: str) -> Iterator[Violation]:
    """(V5): options that there are, in order, outside all runs; the backward is whole."""
    assert stage.remat is not None
    if stage.remat.programs and stage.split_backward:
        got = "got programs in a stage whose backward is split, need whole backwards"
        yield Violation(Rule.STAGES, where, got)
    runs = (*stage.remat.recompute, *stage.remat.offload)
    free = stage.first
    for layer, option in stage.remat.programs:
        if not free <= layer <= stage.last:
            need = f"got layer {layer}, need one within [{free}, {stage.last}]"
            yield Violation(Rule.STAGES, where, need)
            return
        free = layer + 1
        count = len(plan.chain.layers[layer].options)
        if option >= count:
            need = f"got option {option} of layer {layer}, need an index below {count}"
            yield Violation(Rule.STAGES, where, need)
        for first, last in runs:
            if first <= layer <= last:
                need = f"need one outside run [{first}, {last}]"
                yield Violation(Rule.STAGES, where, f"got layer {layer}, {need}")


def _input(plan: Plan, stage: Stage, where: str) -> Iterator[Violation]:
    """(H1): no program keeps the stage's input, in this stage and in the one before on its GPU."""
    assert stage.remat is not None
    if stage.first in dict(stage.remat.programs):
        got = f"got true, need no program of layer {stage.first}"
        yield Violation(Rule.STAGES, where, got)
        return
    before = stage_before(plan, stage)
    if before is None or not before.remat or before.last not in dict(before.remat.programs):
        return
    if kept := saved_output(plan, before):
        need = f"need 0 bytes that a program keeps of the output of stage {before.id}"
        yield Violation(Rule.STAGES, where, f"got true and {kept} bytes, {need}")


def host_ops(plan: Plan, present: Collection[tuple[OpKind, int, int]]) -> Iterator[Violation]:
    """(H2): which of the OFFLOADs and PREFETCHes that a plan has are wrong, or missing.

    Args:
        plan: a plan with sound stages.
        present: (kind, stage, copy) of all its ops.
    """
    given = {stage.id: stage.offloads for stage in plan.stages}
    pair = {OpKind.OFFLOAD: OpKind.PREFETCH, OpKind.PREFETCH: OpKind.OFFLOAD}
    having = set()
    for kind, s, c in present:
        if not kind.is_host:
            continue
        having.add(s)
        if plan.cluster.host is None or not given[s]:
            why = f"stage {s} offloads nothing" if not given[s] else "the cluster has no host"
            yield Violation(Rule.OPS, f"op {s}{kind}{c}", f"got 1 of it, need 0: {why}")
        elif (pair[kind], s, c) not in present:
            why = f"op {s}{kind}{c} is there"
            yield Violation(Rule.OPS, f"op {s}{pair[kind]}{c}", f"got 0 of it, need 1: {why}")
    for s in (s for s, offloads in given.items() if offloads and s not in having):
        why = "got no copy with OFFLOAD and PREFETCH, need 1 or more: it offloads"
        yield Violation(Rule.OPS, f"stage {s}", why)
