"""How long ops last, from chain and cluster: (T2), (T3), (H2), (S2)."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from pipeplan.chain import Layer
from pipeplan.plan import OpKind, Plan
from pipeplan.verifier.stage_bytes import offloaded
from pipeplan.verifier.structure import place
from pipeplan.verifier.timetable import Timetable
from pipeplan.verifier.violation import Rule, Violation


def scaled(time_ns: int, speed: float) -> int:
    """ceil(time / speed), with `speed` read as the decimal that the file shows."""
    ratio = Fraction(repr(float(speed)))
    return -(-time_ns * ratio.denominator // ratio.numerator)


def compute_ns(plan: Plan, kind: OpKind, stage: int) -> int:
    """(T2), (S2): a stage's forward, backward, or one half of it, on its GPU."""
    where = plan.stages[stage]
    speed = plan.cluster.gpus[where.gpu].speed
    layers = plan.chain.layers[where.first : where.last + 1]
    split = where.split_backward
    total = sum(scaled(_part_ns(layer, kind, split=split), speed) for layer in layers)
    return total + plan.cluster.action_overhead_ns


def _part_ns(layer: Layer, kind: OpKind, *, split: bool) -> int:
    weight, inputs = layer.backward_weight_ns or 0, layer.backward_input_ns
    forward = layer.forward_split_ns if split else None
    return {
        OpKind.F: layer.forward_ns if forward is None else forward,
        OpKind.B: layer.backward_ns,
        OpKind.I: layer.backward_ns - weight if inputs is None else inputs,
        OpKind.W: weight,
    }[kind]


def transfer_ns(plan: Plan, kind: OpKind, stage: int) -> int:
    """(T3): the transfer of a stage's output, or of the gradient of its input."""
    source, target = link(plan, kind, stage)
    latency, bandwidth = plan.cluster.links.between(source, target)
    if bandwidth is None:
        return latency
    return latency - (-message_bytes(plan, kind, stage) * 10**9 // bandwidth)


def host_ns(plan: Plan, stage: int) -> int:
    """(H2): what a stage offloads on its way to the cluster's host, or back."""
    host = plan.cluster.host
    assert host is not None
    return -(-offloaded(plan, plan.stages[stage]) * 10**9 // host.bandwidth_bytes_per_s)


def lasts(plan: Plan, kind: OpKind, stage: int) -> int:
    """What an op of a plan with sound stages and ops lasts, in ns."""
    if kind.is_host:
        return host_ns(plan, stage)
    return (compute_ns if kind.is_compute else transfer_ns)(plan, kind, stage)


def link(plan: Plan, kind: OpKind, stage: int) -> tuple[int, int]:
    """The directed link (from, to) of a transfer."""
    where = place(plan, kind, stage)
    assert isinstance(where, tuple)
    return where


def message_bytes(plan: Plan, kind: OpKind, stage: int) -> int:
    """Bytes of the tensor that a transfer carries."""
    where = plan.stages[stage]
    if kind is OpKind.SEND_F:
        return plan.chain.layers[where.last].output_bytes
    return plan.chain.gradient_of_input(where.first)


def durations(table: Timetable) -> Iterator[Violation]:
    """Every op lasts what (T2), (T3), (H2) and (S2) say."""
    for kind, stage, copies in table.kinds:
        need = lasts(table.plan, kind, stage)
        for copy in copies:
            op = table[kind, stage, copy]
            if op.duration != need:
                yield Violation(
                    Rule.DURATIONS, f"op {op.label}", f"got {op.duration} ns, need {need} ns"
                )
