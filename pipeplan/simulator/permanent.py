"""What a GPU holds all the time, term by term: states by version, the paper's message buffers."""

from __future__ import annotations

from collections.abc import Sequence

from pipeplan.layer import Layer
from pipeplan.memory_terms import Key, Purpose
from pipeplan.plan import OpKind, Plan, Stage
from pipeplan.simulator.engine import Times
from pipeplan.simulator.host_states import staying_bytes
from pipeplan.simulator.measure import message_slots
from pipeplan.simulator.tape import Ops

P = Purpose


def permanent(plan: Plan, gpu: int, times: Times) -> list[Key]:
    """(M1) by version, or (P1) with the message buffers of (P5)."""
    found: list[Key] = []
    paper, doubled = plan.memory_model == "paper", plan.semantics == "2bw"
    for stage in plan.hosted(gpu):
        layers = plan.chain.layers[stage.first : stage.last + 1]
        weights = sum(layer.weight_bytes for layer in layers)
        found.append((P.WEIGHTS, stage.id, weights))
        if paper or doubled:
            found.append((P.OLDER_WEIGHTS, stage.id, weights))
        if paper:
            found.append((P.GRADIENTS, stage.id, weights))
            continue
        found.append((P.GRADIENTS, stage.id, sum(layer.gradient_bytes for layer in layers)))
        found.append((P.OPTIMIZER, stage.id, _optimizer(stage, layers)))
        if doubled:
            waiting = sum(layer.waiting_gradient_bytes for layer in layers)
            found.append((P.WAITING_GRADIENTS, stage.id, waiting))
    for slot in message_slots(plan, times):
        if slot.gpu == gpu:
            forward = Ops.kind(slot.producer) is OpKind.F
            ways = (P.SENT_F, P.RECEIVED_F) if forward else (P.SENT_B, P.RECEIVED_B)
            stage_of = Ops.stage(slot.consumer if slot.received else slot.producer)
            found += [(ways[slot.received], stage_of, slot.size)] * slot.count
    return found


def _optimizer(stage: Stage, layers: Sequence[Layer]) -> int:
    """What of the optimizer's bytes the GPU has."""
    if stage.states == "host":
        return sum(staying_bytes(layer) for layer in layers)
    return sum(layer.optimizer_bytes for layer in layers)
