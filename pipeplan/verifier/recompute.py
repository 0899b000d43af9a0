"""A plan that recomputes as one that does not: what runs and programs count as, (V1)-(V5)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

from pipeplan.chain import Chain, Layer
from pipeplan.plan import Plan, Remat, Stage
from pipeplan.verifier.host_states import movable_states
from pipeplan.verifier.split import most_in_inputs, most_in_weights


def without_runs(plan: Plan) -> Plan:
    """`plan` on the chain in which every run is one layer, and layers with programs as told.

    Offloaded runs stay: no layer of theirs is in such a run, so only their numbers change.

    Args:
        plan: a plan with sound stages; returned as it is where nothing is recomputed.
    """
    if not plan.recomputes:
        return plan
    plan = _with_programs(plan)
    layers: list[Layer] = []
    stages: list[Stage] = []
    for stage in plan.stages:
        first, place = len(layers), dict[int, int]()
        for run in _pieces(stage):
            place[run[0]] = len(layers)
            layers.append(_piece(plan.chain, *run, layers[-1] if layers else None))
        sent = stage.remat.offload if stage.remat else ()
        moved = tuple((place[a], place[b]) for a, b in sent)
        remat = Remat(offload=moved) if moved else None
        fields = {"layers": (first, len(layers) - 1), "remat": remat}
        stages.append(stage.model_copy(update=fields))
    chain = plan.chain.model_copy(update={"layers": tuple(layers)})
    return plan.model_copy(update={"chain": chain, "stages": tuple(stages)})


def _with_programs(plan: Plan) -> Plan:
    """`plan` on the chain whose layers are what their programs make of them, (V5)."""
    layers = list(plan.chain.layers)
    for stage in plan.stages:
        for layer, option in stage.remat.programs if stage.remat else ():
            layers[layer] = layers[layer].under(layers[layer].options[option])
    chain = plan.chain.model_copy(update={"layers": tuple(layers)})
    return plan.model_copy(update={"chain": chain})


def _pieces(stage: Stage) -> list[tuple[int, int, bool]]:
    """(first, last, whether recomputed) of the stage's runs and of each layer outside them."""
    runs = stage.remat.recompute if stage.remat else ()
    inside = {layer for first, last in runs for layer in range(first, last + 1)}
    alone = (layer for layer in range(stage.first, stage.last + 1) if layer not in inside)
    return sorted([(*run, True) for run in runs] + [(layer, layer, False) for layer in alone])


def _piece(chain: Chain, first: int, last: int, recomputed: bool, before: Layer | None) -> Layer:
    layers = chain.layers[first : last + 1]
    if not recomputed:
        return layers[0]
    entry = chain.input_of(first)
    ends = entry + layers[-1].gradient_of_output_bytes + chain.gradient_of_input(first)
    forward = sum(layer.forward_ns for layer in layers)
    saved_before = before.saved_output_bytes if before else 0
    return Layer(
        name=f"{layers[0].name}..{layers[-1].name}" if last > first else layers[0].name,
        forward_ns=forward,
        backward_ns=forward + sum(layer.backward_ns for layer in layers),
        optimizer_ns=sum(layer.optimizer_ns for layer in layers),
        weight_bytes=sum(layer.weight_bytes for layer in layers),
        gradient_bytes=sum(layer.gradient_bytes for layer in layers),
        waiting_gradient_bytes=sum(layer.waiting_gradient_bytes for layer in layers),
        optimizer_bytes=sum(layer.optimizer_bytes for layer in layers),
        frozen_bytes=sum(layer.optimizer_bytes - movable_states(layer) for layer in layers),
        output_bytes=layers[-1].output_bytes,
        output_gradient_bytes=layers[-1].output_gradient_bytes,
        saved_input_bytes=entry,
        forward_workspace_bytes=_light(chain, first, last) - entry - layers[-1].output_bytes,
        backward_workspace_bytes=max(ends, _again(chain, first, last, saved_before)) - ends,
        optimizer_workspace_bytes=max(layer.optimizer_workspace_bytes for layer in layers),
        parameters=tuple(dict.fromkeys(name for layer in layers for name in layer.parameters)),
        **_halves(chain, first, last, saved_before),
    )


def _halves(chain: Chain, first: int, last: int, saved_before: int) -> dict[str, Any]:
    """(S6): what the two halves of the run's backward are; nothing where a layer does not tell."""
    layers = chain.layers[first : last + 1]
    times = [layer.backward_weight_ns for layer in layers]
    sizes = [layer.saved_for_weight_bytes for layer in layers]
    if None in times or None in sizes:
        return {}
    entry = max(layers[0].saved_input_bytes, saved_before)
    ends = (
        chain.input_of(first)
        + layers[-1].gradient_of_output_bytes
        + chain.gradient_of_input(first)
    )
    again = _forward_again(chain, first, last, saved_before)
    inputs = 0
    for layer in layers:
        weight, told = layer.backward_weight_ns or 0, layer.backward_input_ns
        inputs += layer.backward_ns - weight if told is None else told
        forward = layer.forward_split_ns
        inputs += layer.forward_ns if forward is None else forward
    kept = sum(size or 0 for size in sizes)
    return {
        "backward_weight_ns": sum(time or 0 for time in times),
        "backward_input_ns": inputs,
        "saved_for_weight_bytes": kept,
        "saved_input_for_weight_bytes": layers[0].saved_input_for_weight_bytes,
        "input_backward_workspace_bytes": max(
            0, again - ends, most_in_inputs(chain, first, last, entry) - ends
        ),
        "weight_backward_workspace_bytes": most_in_weights(layers) - kept,
    }


def _light(chain: Chain, first: int, last: int) -> int:
    """(V3): the most at once in a forward that keeps nothing but the input of the run."""
    entry = chain.input_of(first)
    return max(
        (entry if index > first else 0)
        + chain.input_of(index)
        + chain.layers[index].forward_workspace_bytes
        + chain.layers[index].saved_bytes
        + chain.layers[index].output_bytes
        for index in range(first, last + 1)
    )


def _again(chain: Chain, first: int, last: int, saved_before: int) -> int:
    """(V4): the most at once while the run is computed again and goes back."""
    layers = chain.layers[first : last + 1]
    entry, rest, through = _kept(layers, saved_before)
    most = _forward_again(chain, first, last, saved_before)
    for i, layer in enumerate(layers):
        kept = entry + rest[i] + through[i] + layer.saved_output_bytes
        gradients = layer.gradient_of_output_bytes + chain.gradient_of_input(first + i)
        most = max(most, kept + layer.backward_workspace_bytes + gradients)
    return most


def _forward_again(chain: Chain, first: int, last: int, saved_before: int) -> int:
    """Gy + pF + buffer of (V4): the second forward, beside the gradient that has come."""
    layers = chain.layers[first : last + 1]
    entry, rest, through = _kept(layers, saved_before)
    most = 0
    for i, layer in enumerate(layers):
        held = chain.input_of(first + i) + (entry + through[i - 1] if i else 0)
        most = max(most, held + rest[i] + layer.forward_workspace_bytes + layer.output_bytes)
    copied = sum(layer.buffer_bytes for layer in layers)
    return layers[-1].gradient_of_output_bytes + most + copied


def _kept(layers: Sequence[Layer], saved_before: int) -> tuple[int, list[int], list[int]]:
    """Of the input, of the rest up to each layer, of the boundaries before each layer."""
    inner = [max(one.saved_output_bytes, two.saved_input_bytes) for one, two in pairwise(layers)]
    return (
        max(layers[0].saved_input_bytes, saved_before),
        list(accumulate(layer.saved_bytes for layer in layers)),
        [0, *accumulate(inner)],
    )
