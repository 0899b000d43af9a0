"""A plan that recomputes as one that does not: what runs and programs count as, (V1)-(V5)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

from pipeplan.chain import Chain, Layer
from pipeplan.plan import LayerRanges, Plan, Remat, Stage
from pipeplan.verifier.host_states import movable_states
from pipeplan.verifier.split import most_in_inputs, most_in_weights


def without_runs(plan: Plan) -> Plan:
    """`plan` on the chain in which every run is one layer, and layers with programs as told.

    What is offloaded stays: no layer of it is in such a run, so only their numbers change.

    Args:
        plan: a plan with sound stages; returned as it is where nothing is recomputed.
    """
    if not plan.recomputes:
        return plan
    plan = _with_programs(plan)
    layers: list[Layer] = []
    stages: list[Stage] = []
    for stage in plan.stages:
        first = len(layers)
        runs = stage.remat.recompute if stage.remat else ()
        before = layers[-1].saved_output_bytes if layers else 0
        pieces = _pieces(plan.chain, stage.layers, runs, before)
        place = {begin: first + number for number, begin in enumerate(pieces)}
        layers += pieces.values()
        remat = None
        if stage.remat is not None and stage.remat.offloads:
            moved = tuple((place[a], place[b]) for a, b in stage.remat.offload)
            remat = Remat(offload=moved, offload_input=stage.remat.offload_input)
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


def _pieces(
    chain: Chain, span: tuple[int, int], runs: LayerRanges, saved_before: int
) -> dict[int, Layer]:
    """First layer -> what stands for it: an outermost run of `span`, or the layer itself.

    Args:
        chain: as it is.
        span: first and last layer.
        runs: inside it, an outer run before those that it holds.
        saved_before: what the layer before `span` keeps of its output.
    """
    pieces: dict[int, Layer] = {}
    position = span[0]
    while position <= span[1]:
        runs = tuple(run for run in runs if run[0] >= position)
        if runs and runs[0][0] == position:
            whole, *others = runs
            inner = tuple(run for run in others if run[1] <= whole[1])
            pieces[position] = _run(chain, whole, inner, saved_before)
            position = whole[1] + 1
        else:
            pieces[position] = chain.layers[position]
            position += 1
        saved_before = next(reversed(pieces.values())).saved_output_bytes
    return pieces


def _run(chain: Chain, span: tuple[int, int], inner: LayerRanges, saved_before: int) -> Layer:
    """The run `span` as one layer; by (V4) the runs in it are layers when it runs again."""
    first, last = span
    light = _light(chain, first, last)
    copied = sum(layer.buffer_bytes for layer in chain.layers[first : last + 1])
    stays = sum(x.optimizer_bytes - movable_states(x) for x in chain.layers[first : last + 1])
    pieces = _pieces(chain, span, inner, saved_before)
    layers = tuple(pieces.values())
    everything = (*chain.layers[:first], *layers, *chain.layers[last + 1 :])
    chain, last = chain.model_copy(update={"layers": everything}), first + len(layers) - 1
    entry = chain.input_of(first)
    ends = entry + layers[-1].gradient_of_output_bytes + chain.gradient_of_input(first)
    forward = sum(layer.forward_ns for layer in layers)
    return Layer.model_construct(  # its sums may be more than a file may hold
        name=f"{layers[0].name}..{layers[-1].name}" if last > first else layers[0].name,
        forward_ns=forward,
        backward_ns=forward + sum(layer.backward_ns for layer in layers),
        optimizer_ns=sum(layer.optimizer_ns for layer in layers),
        weight_bytes=sum(layer.weight_bytes for layer in layers),
        gradient_bytes=sum(layer.gradient_bytes for layer in layers),
        waiting_gradient_bytes=sum(layer.waiting_gradient_bytes for layer in layers),
        optimizer_bytes=sum(layer.optimizer_bytes for layer in layers),
        frozen_bytes=stays,
        output_bytes=layers[-1].output_bytes,
        output_gradient_bytes=layers[-1].output_gradient_bytes,
        saved_input_bytes=entry,
        forward_workspace_bytes=light - entry - layers[-1].output_bytes,
        backward_workspace_bytes=max(ends, _again(chain, first, last, saved_before, copied))
        - ends,
        optimizer_workspace_bytes=max(layer.optimizer_workspace_bytes for layer in layers),
        parameters=tuple(dict.fromkeys(name for layer in layers for name in layer.parameters)),
        **_halves(chain, first, last, saved_before, copied),
    )


def _halves(chain: Chain, first: int, last: int, saved_before: int, copied: int) -> dict[str, Any]:
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
    again = _forward_again(chain, first, last, saved_before, copied)
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
        + _beside(chain.layers[index])
        + chain.layers[index].output_bytes
        for index in range(first, last + 1)
    )


def _beside(layer: Layer) -> int:
    """What (V3) calls lw: the chain tells it, or it is as if the layer kept all."""
    told = layer.forward_light_workspace_bytes
    return layer.forward_workspace_bytes + layer.saved_bytes if told is None else told


def _again(chain: Chain, first: int, last: int, saved_before: int, copied: int) -> int:
    """(V4): the most at once while the run is computed again and goes back."""
    layers = chain.layers[first : last + 1]
    entry, rest, through = _kept(layers, saved_before)
    most = _forward_again(chain, first, last, saved_before, copied)
    for i, layer in enumerate(layers):
        kept = entry + rest[i] + through[i] + layer.saved_output_bytes
        gradients = layer.gradient_of_output_bytes + chain.gradient_of_input(first + i)
        most = max(most, kept + layer.backward_workspace_bytes + gradients)
    return most


def _forward_again(chain: Chain, first: int, last: int, saved_before: int, copied: int) -> int:
    """Gy + pF + buffer of (V4): the second forward, beside the gradient that has come."""
    layers = chain.layers[first : last + 1]
    entry, rest, through = _kept(layers, saved_before)
    most = 0
    for i, layer in enumerate(layers):
        held = chain.input_of(first + i) + (entry + through[i - 1] if i else 0)
        most = max(most, held + rest[i] + layer.forward_workspace_bytes + layer.output_bytes)
    return layers[-1].gradient_of_output_bytes + most + copied


def _kept(layers: Sequence[Layer], saved_before: int) -> tuple[int, list[int], list[int]]:
    """Of the input, of the rest up to each layer, of the boundaries before each layer."""
    inner = [max(one.saved_output_bytes, two.saved_input_bytes) for one, two in pairwise(layers)]
    return (
        max(layers[0].saved_input_bytes, saved_before),
        list(accumulate(layer.saved_bytes for layer in layers)),
        [0, *accumulate(inner)],
    )
