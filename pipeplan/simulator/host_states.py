"""Stages whose states are on the host: walked layer by layer ((U1) to (U5), (U7)).

An update there is three legs, each of whole bytes through a lane of its own speed; what the legs
take is their sum, since each waits for all of the one before. Where the rank goes on behind the
first leg (U7), the other two are the host's alone.
"""

from __future__ import annotations

from fractions import Fraction
from math import ceil

from pipeplan.chain import Layer
from pipeplan.memory_terms import Key, Purpose
from pipeplan.plan import Plan


def staying_bytes(layer: Layer) -> int:
    """What of a layer's `optimizer_bytes` forwards need: buffers, parameters that rest."""
    return min(layer.optimizer_bytes, layer.buffer_bytes + layer.frozen_bytes)


def host_terms(plan: Plan, gpu: int) -> list[Key]:
    """What stages of a GPU have in the host's memory all the time."""
    found: list[Key] = []
    for stage in plan.hosted(gpu):
        if stage.states != "host":
            continue
        layers = plan.chain.layers[stage.first : stage.last + 1]
        states = sum(layer.optimizer_bytes - staying_bytes(layer) for layer in layers)
        found += [
            (Purpose.WEIGHTS, stage.id, sum(layer.weight_bytes for layer in layers)),
            (Purpose.GRADIENTS, stage.id, sum(layer.gradient_bytes for layer in layers)),
            (Purpose.OPTIMIZER, stage.id, states),
        ]
    return found


def host_update_ns(plan: Plan, index: int) -> tuple[int, int]:
    """How long a stage's update on the host holds its rank, and goes on behind that."""
    out, there, back = _legs_ns(plan, index)
    if _frees_its_rank(plan, index):
        return out, there + back
    return out + there + back, 0


def _frees_its_rank(plan: Plan, index: int) -> bool:
    """Two versions, no gradient that waits, and a way to the host that nothing else takes."""
    stage, two = plan.stages[index], plan.semantics == "2bw"
    layers = plan.chain.layers[stage.first : stage.last + 1]
    waiting = sum(layer.waiting_gradient_bytes for layer in layers)
    return two and not waiting and not any(each.offloads for each in plan.hosted(stage.gpu))


def _legs_ns(plan: Plan, index: int) -> tuple[int, ...]:
    """Of the gradients' way out, the update, and the weights' way back."""
    host, stage = plan.cluster.host, plan.stages[index]
    assert host is not None
    assert host.update_bytes_per_s is not None
    layers = plan.chain.layers[stage.first : stage.last + 1]
    legs = (
        ("gradient_bytes", host.bandwidth_bytes_per_s),
        ("weight_bytes", host.update_bytes_per_s),
        ("weight_bytes", host.bandwidth_bytes_per_s),
    )
    return tuple(
        ceil(Fraction(sum(getattr(layer, name) for layer in layers) * 10**9, rate))
        for name, rate in legs
    )
