"""Random small changes of backwards that are split, and of those that could be."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from pipeplan.chain import Chain, Layer
from pipeplan.plan import OpKind, Plan, Stage
from pipeplan.testing.plans import UNSPLIT


def _split(plan: Plan, rng: Random, *, split: bool = True) -> Stage | None:
    """A stage whose backward is split, or is not; None where there is none."""
    found = [stage for stage in plan.stages if stage.split_backward == split]
    return rng.choice(found) if found else None


def _flagged(plan: Plan, stage: Stage, *, split: bool) -> Plan:
    stages = list(plan.stages)
    stages[stage.id] = stage.model_copy(update={"split_backward": split})
    return plan.model_copy(update={"stages": tuple(stages)})


def weights_moved(plan: Plan, rng: Random) -> Plan:
    """The weights' half of one backward comes a little earlier or later."""
    found = [index for index, op in enumerate(plan.ops) if op.kind is OpKind.W]
    if not found:
        return plan
    index = rng.choice(found)
    op, by = plan.ops[index], rng.choice([-2, -1, 1, 1, 2, 5])
    shift, start = divmod(max(0, op.shift * plan.period_ns + op.start_ns + by), plan.period_ns)
    op = op.model_copy(update={"shift": shift, "start_ns": start})
    return plan.model_copy(update={"ops": (*plan.ops[:index], op, *plan.ops[index + 1 :])})


def weights_lost(plan: Plan, rng: Random) -> Plan:
    """No gradients of the weights of one stage, for one or all micro-batches."""
    stage = _split(plan, rng)
    if stage is None:
        return plan
    copy = rng.choice([None, *range(plan.k)])
    ops = tuple(
        op
        for op in plan.ops
        if (op.kind, op.stage) != (OpKind.W, stage.id) or copy not in (None, op.copy_)
    )
    return plan.model_copy(update={"ops": ops})


def halves_swapped(plan: Plan, rng: Random) -> Plan:
    """I is called W and W is called I: neutral where neither lasts and nobody waits."""
    stage = _split(plan, rng)
    if stage is None:
        return plan
    other = {OpKind.I: OpKind.W, OpKind.W: OpKind.I}
    ops = tuple(
        op.model_copy(update={"kind": other.get(op.kind, op.kind)}) if op.stage == stage.id else op
        for op in plan.ops
    )
    return plan.model_copy(update={"ops": ops})


def backward_joined(plan: Plan, rng: Random) -> Plan:
    """One stage is said to have B again, with or without that op."""
    stage = _split(plan, rng)
    if stage is None:
        return plan
    plan = _flagged(plan, stage, split=False)
    if rng.random() < 0.5:
        return plan
    ops = tuple(
        op.model_copy(update={"kind": OpKind.B}) if op.kind is OpKind.I else op
        for op in plan.ops
        if op.stage == stage.id
        if op.kind is not OpKind.W
    )
    others = tuple(op for op in plan.ops if op.stage != stage.id)
    return plan.model_copy(update={"ops": (*others, *ops)})


def backward_split(plan: Plan, rng: Random) -> Plan:
    """One stage is said to have I and W, with ops where B was; right where W takes no time."""
    stage = _split(plan, rng, split=False)
    if stage is None:
        return plan
    ops = []
    for op in plan.ops:
        if (op.kind, op.stage) != (OpKind.B, stage.id):
            ops.append(op)
            continue
        after = op.shift * plan.period_ns + op.start_ns + op.duration_ns
        shift, start = divmod(after, plan.period_ns)
        ops.append(op.model_copy(update={"kind": OpKind.I}))
        fields = {"kind": OpKind.W, "start_ns": start, "shift": shift, "duration_ns": 0}
        ops.append(op.model_copy(update=fields))
    return _flagged(plan, stage, split=True).model_copy(update={"ops": tuple(ops)})


def _layer(plan: Plan, rng: Random, change: Callable[[Layer], dict[str, Any]]) -> Plan:
    """`plan` with one layer changed, if that still is a chain."""
    layers = list(plan.chain.layers)
    index = rng.randrange(len(layers))
    layers[index] = layers[index].model_copy(update=change(layers[index]))
    try:
        chain = Chain.from_data({**plan.chain.model_dump(mode="json"), "layers": _data(layers)})
    except ValueError:
        return plan
    return plan.model_copy(update={"chain": chain})


def _data(layers: list[Layer]) -> list[dict[str, Any]]:
    return [layer.model_dump(mode="json") for layer in layers]


def weights_cost_more(plan: Plan, rng: Random) -> Plan:
    """A layer whose weights' half needs more, or less, of something."""
    name, by = rng.choice(
        [
            ("backward_weight_ns", 1),
            ("backward_weight_ns", -1),
            ("backward_input_ns", 1),
            ("forward_split_ns", 1),
            ("saved_for_weight_bytes", 1),
            ("saved_input_for_weight_bytes", 1),
            ("saved_input_for_weight_bytes", -1),
            ("input_backward_workspace_bytes", 1),
            ("weight_backward_workspace_bytes", 1),
        ]
    )
    return _layer(plan, rng, lambda layer: {name: max(0, (getattr(layer, name) or 0) + by)})


def weights_unknown(plan: Plan, rng: Random) -> Plan:
    """A layer that does not tell what its weights' half takes, or needs."""
    fields: dict[str, Any] = dict(UNSPLIT)
    if rng.random() < 0.5:
        fields = {"saved_for_weight_bytes": None, "saved_input_for_weight_bytes": 0}
    return _layer(plan, rng, lambda _: fields)


CHANGES = (
    weights_moved,
    weights_lost,
    halves_swapped,
    backward_joined,
    backward_split,
    weights_cost_more,
    weights_unknown,
)
