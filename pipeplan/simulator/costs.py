"""What the replay charges for each op: time and bytes, from chain and cluster alone.

Bytes of a stage are found by walking through its layers and keeping a running sum of live bytes,
as the stage itself does, not by the closed forms of docs/reference/model.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from math import ceil

from pipeplan.chain import Chain, Layer
from pipeplan.plan import OpKind, Plan, Stage
from pipeplan.simulator.host_states import host_update_ns, staying_bytes


@dataclass(frozen=True, slots=True)
class StageBytes:
    """Bytes of one micro-batch in one stage."""

    kept: int
    """Between F and B."""
    forward: int
    """The most while F runs, counted beside `kept` of the other micro-batches."""
    backward: int
    """The most while B (or I) runs; in the paper model beside its own `kept` too."""


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """Bytes of one micro-batch in one stage whose backward is split, once I is over."""

    kept: int
    """Between I and W."""
    running: int
    """The most while W runs."""
    shared: int
    """Of `kept`, what the stage before on the same GPU has until its own backward."""


def compute_ns(plan: Plan, kind: OpKind, stage: int) -> int:
    """(T2), (S2), in ns."""
    home = plan.stages[stage]
    speed = _speed(plan, home.gpu)
    total = plan.cluster.action_overhead_ns
    for layer in plan.chain.layers[home.first : home.last + 1]:
        if kind is OpKind.F:
            time = forward_ns(layer) if home.split_backward else layer.forward_ns
        elif kind is OpKind.I:
            time = input_ns(layer)
        elif kind is OpKind.W:
            time = layer.backward_weight_ns or 0
        else:
            time = layer.backward_ns
        total += ceil(time / speed)
    return total


def forward_ns(layer: Layer) -> int:
    """A layer's forward that keeps apart what the gradients of its weights need."""
    return layer.forward_ns if layer.forward_split_ns is None else layer.forward_split_ns


def input_ns(layer: Layer) -> int:
    """A layer's backward that leaves the gradients of its weights for later."""
    if layer.backward_input_ns is not None:
        return layer.backward_input_ns
    return layer.backward_ns - (layer.backward_weight_ns or 0)


def update_ns(plan: Plan, stage: int) -> int:
    """How long a stage's optimizer step holds its rank, in ns."""
    home = plan.stages[stage]
    if home.states == "host":
        return host_update_ns(plan, stage)[0]
    speed = _speed(plan, home.gpu)
    layers = plan.chain.layers[home.first : home.last + 1]
    return sum(ceil(layer.optimizer_ns / speed) for layer in layers)


def behind_ns(plan: Plan, stage: int) -> int:
    """How long a stage's optimizer step goes on while its rank does something else, in ns."""
    return host_update_ns(plan, stage)[1] if plan.stages[stage].states == "host" else 0


def transfer_ns(plan: Plan, kind: OpKind, stage: int) -> int:
    """(T3), in ns."""
    home = plan.stages[stage]
    peer = plan.stages[stage + 1 if kind is OpKind.SEND_F else stage - 1]
    latency, bandwidth = plan.cluster.links.between(home.gpu, peer.gpu)
    if bandwidth is None:
        return latency
    return latency + ceil(Fraction(message_bytes(plan, kind, stage) * 10**9, bandwidth))


def host_ns(plan: Plan, stage: int) -> int:
    """How long what a stage offloads takes to the host, and back (H2), in ns."""
    assert plan.cluster.host is not None
    return ceil(
        Fraction(offloaded_bytes(plan, stage) * 10**9, plan.cluster.host.bandwidth_bytes_per_s)
    )


def offloaded_bytes(plan: Plan, stage: int) -> int:
    """What one micro-batch's forward leaves between the ends of the stage's runs (H1).

    Where the input goes as well, what the first layer, or the stage before, keeps of it.
    """
    home, total = plan.stages[stage], 0
    remat = home.remat
    if remat and remat.offload_input:
        kept = plan.chain.layers[home.first].saved_input_bytes
        if home.first in dict(remat.recompute):
            kept = plan.chain.input_of(home.first)  # all of it, to compute again from (V2)
        total += max(kept, held_before(plan, stage))
    for first, last in remat.offload if remat else ():
        layers = plan.chain.layers[first : last + 1]
        total += sum(layer.saved_bytes for layer in layers)
        for before, after in pairwise(layers):
            total += max(before.saved_output_bytes, after.saved_input_bytes)
    return total


def leaves_with_forward(plan: Plan, stage: int) -> bool:
    """Whether what leaves is there before the stage's forward: all its input, alone (H3)."""
    home = plan.stages[stage]
    if home.remat is None or not home.remat.offload_input or home.remat.offload:
        return False
    return offloaded_bytes(plan, stage) == plan.chain.input_of(home.first)


def offloaded_output_bytes(plan: Plan, stage: int) -> int:
    """What of that is counted for the stage before, which saves it as its output."""
    remat = plan.stages[stage].remat
    return held_before(plan, stage) if remat and remat.offload_input else 0


def message_bytes(plan: Plan, kind: OpKind, stage: int) -> int:
    """Bytes of the tensor that a stage sends on (SEND_F) or back (SEND_B)."""
    home = plan.stages[stage]
    if kind is OpKind.SEND_F:
        return plan.chain.layers[home.last].output_bytes
    return plan.chain.gradient_of_input(home.first)


def live_stage_bytes(plan: Plan, stage: int) -> StageBytes:
    """Live bytes of a stage, layer by layer forward and back ((M2), (M3), (M7), (S4))."""
    home = plan.stages[stage]
    layers = plan.chain.layers[home.first : home.last + 1]
    shared = held_before(plan, stage)
    live = max(0, plan.chain.input_of(home.first) - shared)
    kept_of_input = max(0, layers[0].saved_input_bytes - shared)
    live = max(live, kept_of_input)
    most_forward, surplus = 0, live - kept_of_input
    for index, layer in enumerate(layers):
        live += layer.saved_bytes + layer.output_bytes
        most_forward = max(most_forward, live + layer.forward_workspace_bytes)
        live -= surplus
        surplus = layer.output_bytes - _kept_behind(layers, index)
    kept = live = live - surplus
    back = _most_in_inputs if home.split_backward else _most_backward
    before = _before_forward(plan, stage, shared)
    return StageBytes(kept, max(most_forward, before), back(plan.chain, home, live))


def held_before(plan: Plan, stage: int) -> int:
    """What the stage before keeps of its output, if it is on the same GPU.

    Nothing, if it computes that again (V2); what the option keeps, if it runs a program (V5).
    """
    home = plan.stages[stage]
    if not stage or plan.stages[stage - 1].gpu != home.gpu:
        return 0
    last, remat = home.first - 1, plan.stages[stage - 1].remat
    layer = plan.chain.layers[last]
    if remat is None:
        return layer.saved_output_bytes
    if any(first <= last <= end for first, end in remat.recompute):
        return 0
    for place, option in remat.programs:
        if place == last and option < len(layer.options):  # that stage may be broken
            return layer.options[option].saved_output_bytes
    return layer.saved_output_bytes


def _kept_behind(layers: Sequence[Layer], index: int) -> int:
    """What the storage behind layer `index` of a stage keeps until the backwards."""
    saved = layers[index].saved_output_bytes
    return saved if index + 1 == len(layers) else max(saved, layers[index + 1].saved_input_bytes)


def _most_backward(chain: Chain, home: Stage, live: int) -> int:
    """The most at once while B runs, from `live` bytes at its start."""
    layers = chain.layers[home.first : home.last + 1]
    most_backward = 0
    for index in reversed(range(len(layers))):
        layer = layers[index]
        gradients = layer.gradient_of_output_bytes + chain.gradient_of_input(home.first + index)
        most_backward = max(most_backward, live + layer.backward_workspace_bytes + gradients)
        live -= layer.saved_bytes + layer.saved_output_bytes
        if index:
            live -= _kept_behind(layers, index - 1) - layers[index - 1].saved_output_bytes
    return most_backward


def _most_in_inputs(chain: Chain, home: Stage, live: int) -> int:
    """The most at once while I runs: each layer gives back what its weights do not need."""
    layers = chain.layers[home.first : home.last + 1]
    most, needed_behind = 0, 0
    for index in reversed(range(len(layers))):
        layer = layers[index]
        gradients = layer.gradient_of_output_bytes + chain.gradient_of_input(home.first + index)
        most = max(most, live + layer.input_backward_workspace_bytes + gradients)
        live += _of_weights_alone(layer) - layer.saved_bytes
        # The storage behind the layer stays for the weights of the next one, if they need it.
        live -= max(0, layer.saved_output_bytes - needed_behind)
        needed_behind = layer.saved_input_for_weight_bytes
        if index:
            left = max(layers[index - 1].saved_output_bytes, needed_behind)
            live -= _kept_behind(layers, index - 1) - left
    return most


def live_weight_bytes(plan: Plan, stage: int) -> WeightBytes:
    """Live bytes of a stage between I and W and while W runs, last layer first ((S3), (S5))."""
    home = plan.stages[stage]
    layers = plan.chain.layers[home.first : home.last + 1]
    live = kept = sum(
        _of_weights_alone(layer) + layer.saved_input_for_weight_bytes for layer in layers
    )
    most = 0
    for layer in reversed(layers):
        most = max(most, live + layer.weight_backward_workspace_bytes)
        live -= layer.saved_for_weight_bytes or 0
    shared = min(held_before(plan, stage), layers[0].saved_input_for_weight_bytes)
    return WeightBytes(kept, most, shared)


def _of_weights_alone(layer: Layer) -> int:
    """What the gradients of a layer's weights need that is not its input."""
    return (layer.saved_for_weight_bytes or 0) - layer.saved_input_for_weight_bytes


def _before_forward(plan: Plan, stage: int, held_before: int) -> int:
    """A late update's bytes, beside the input that lies there for the forward behind it (M7)."""
    if plan.semantics == "flush" or not _gradients(plan, stage)[1]:
        return 0
    first = plan.stages[stage].first
    arrived = plan.chain.layers[first - 1].output_bytes - held_before if stage else 0
    return arrived + update_workspace_bytes(plan, stage)


def _gradients(plan: Plan, stage: int) -> tuple[int, int]:
    """Bytes of a stage's gradients that are used in its OPT, and of those used later."""
    home = plan.stages[stage]
    layers = plan.chain.layers[home.first : home.last + 1]
    late = sum(layer.waiting_gradient_bytes for layer in layers)
    return sum(layer.gradient_bytes for layer in layers) - late, late


def paper_bytes(plan: Plan, stage: int) -> StageBytes:
    """The paper's count of a stage, layer by layer ((P2), (P3))."""
    home = plan.stages[stage]
    kept = most_forward = 0
    for index in range(home.first, home.last + 1):
        layer, size = plan.chain.layers[index], plan.chain.input_of(index)
        stored = layer.saved_input_bytes + layer.saved_bytes + layer.saved_output_bytes
        most_forward = max(most_forward, kept + max(stored, size) + layer.output_bytes)
        kept += stored
    most_backward = given_back = 0
    for index in range(home.last, home.first - 1, -1):
        layer, size = plan.chain.layers[index], plan.chain.input_of(index)
        most_backward = max(most_backward, layer.output_bytes + size - given_back)
        given_back += layer.saved_input_bytes + layer.saved_bytes + layer.saved_output_bytes
    return StageBytes(kept, most_forward, most_backward)


def states_bytes(plan: Plan, gpu: int) -> int:
    """(M1), or (P1) in the paper model."""
    total = 0
    for stage in plan.hosted(gpu):
        for layer in plan.chain.layers[stage.first : stage.last + 1]:
            if plan.memory_model == "paper":
                total += 3 * layer.weight_bytes
                continue
            away = stage.states == "host"
            kept = staying_bytes(layer) if away else layer.optimizer_bytes
            total += layer.weight_bytes + layer.gradient_bytes + kept
            if plan.semantics == "2bw":
                total += layer.weight_bytes + layer.waiting_gradient_bytes
    return total


def update_workspace_bytes(plan: Plan, stage: int) -> int:
    """The most that one layer's optimizer step of a stage needs at once on the GPU.

    None in the paper's model, and where the host makes the step.
    """
    home = plan.stages[stage]
    if plan.memory_model == "paper" or home.states == "host":
        return 0
    layers = plan.chain.layers[home.first : home.last + 1]
    return max(layer.optimizer_workspace_bytes for layer in layers)


def update_bytes(plan: Plan, stage: int) -> int:
    """Working bytes of an OPT: under 2bw none where every update is late (M7)."""
    at_once, late = _gradients(plan, stage)
    elsewhere = plan.semantics == "2bw" and late and not at_once
    return 0 if elsewhere else update_workspace_bytes(plan, stage)


def _speed(plan: Plan, gpu: int) -> Fraction:
    """The GPU's speed as the decimal that the file shows."""
    return Fraction(str(plan.cluster.gpus[gpu].speed))
