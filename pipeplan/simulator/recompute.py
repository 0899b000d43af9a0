"""Runs of layers that a stage computes again, walked through byte by byte; layers under programs.

The replay then charges a run like one layer: what it keeps, and what it needs beside that while
it goes forward and back ((V1) to (V4) and (S6) of docs/reference/model.md, found without their
closed forms).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeplan.chain import Chain, Layer
from pipeplan.plan import LayerRanges, Plan, Remat
from pipeplan.simulator.costs import forward_ns, input_ns
from pipeplan.simulator.host_states import staying_bytes

_NO_PROGRAMS: Mapping[int, int] = {}
Light = Callable[[int, int], int]
"""First and last layer of a run -> the most bytes in its first forward, its input included."""


def condensed(plan: Plan) -> Plan:
    """`plan` with one layer in place of each run, and layers as their programs make them.

    Its stages must be sound. Runs that wait in the host's memory have no layer in common with
    these: they are counted anew.
    """
    if not plan.recomputes:
        return plan
    layers: list[Layer] = []
    stages = []
    for stage in plan.stages:
        begin = len(layers)
        programs = dict(stage.remat.programs) if stage.remat else {}
        again = stage.remat.recompute if stage.remat else ()
        held = layers[-1].saved_output_bytes if layers else 0
        number: dict[int, int] = {}
        for position, layer in walked(
            plan.chain, stage.layers, again, held=held, programs=programs
        ):
            number[position] = len(layers)
            layers.append(layer)
        away = stage.remat if stage.remat and stage.remat.offloads else None
        remat = away and Remat(
            offload=tuple((number[a], number[b]) for a, b in away.offload),
            offload_input=away.offload_input,
        )
        ends_at = len(layers) - 1
        stages.append(stage.model_copy(update={"layers": (begin, ends_at), "remat": remat}))
    chain = plan.chain.model_copy(update={"layers": tuple(layers)})
    return plan.model_copy(update={"chain": chain, "stages": tuple(stages)})


def walked(
    chain: Chain,
    span: tuple[int, int],
    again: LayerRanges,
    *,
    held: int,
    programs: Mapping[int, int] = _NO_PROGRAMS,
    light: Light | None = None,
) -> Iterator[tuple[int, Layer]]:
    """The layers of `span` from the front, each run with all that is in it as one of them.

    `held` is what the layer before keeps of its output; `light` says what first forwards of runs
    need where `chain` does not.
    """
    waiting, position = list(again), span[0]
    while position <= span[1]:
        layer, end = chain.layers[position], position
        if position in programs:
            layer = layer.under(layer.options[programs[position]])
        if waiting and waiting[0][0] == position:
            end, within = waiting.pop(0)[1], list[tuple[int, int]]()
            while waiting and waiting[0][0] <= end:
                within.append(waiting.pop(0))
            layer = _run(chain, position, end, tuple(within), held, light)
        yield position, layer
        position, held = end + 1, layer.saved_output_bytes


def _run(
    chain: Chain, first: int, last: int, within: LayerRanges, held: int, light: Light | None
) -> Layer:
    """Layers first..last as the one layer that they look like from outside.

    Its first forward keeps nothing of `within`, the runs in it; a second one meets them as layers.
    """
    ahead = light(first, last) if light else _most_light(chain, first, last)
    own = chain.layers[first : last + 1]
    copies = sum(layer.buffer_bytes for layer in own)
    layers = [layer for _, layer in walked(chain, (first, last), within, held=held, light=light)]
    parts_of = (*chain.layers[:first], *layers, *chain.layers[last + 1 :])
    chain, last = chain.model_copy(update={"layers": parts_of}), first + len(layers) - 1
    entry, exit_ = chain.input_of(first), layers[-1].output_bytes
    sums = {
        name: sum(getattr(layer, name) for layer in layers)
        for name in (
            "forward_ns", "backward_ns", "optimizer_ns",
            "weight_bytes", "gradient_bytes", "waiting_gradient_bytes", "optimizer_bytes",
        )
    }  # fmt: skip
    sums["backward_ns"] += sums["forward_ns"]
    sums["frozen_bytes"] = sum(staying_bytes(layer) for layer in own)
    outside = entry + layers[-1].gradient_of_output_bytes + chain.gradient_of_input(first)
    second, there = _second_forward(chain, first, last, held, copies)
    most = max(outside, second, _most_back(chain, first, last, there))
    parts: dict[str, Any] = {}
    if all(_tells(layer) for layer in layers):
        inputs = max(outside, second, _most_inputs(chain, first, last, there))
        parts = {
            "backward_input_ns": sum(forward_ns(layer) + input_ns(layer) for layer in layers),
            "input_backward_workspace_bytes": inputs - outside,
            **_weights(layers),
        }
    return Layer.model_construct(  # its sums may be more than a file may hold
        name=f"{layers[0].name}..{layers[-1].name}",
        output_bytes=exit_,
        output_gradient_bytes=layers[-1].output_gradient_bytes,
        saved_input_bytes=entry,
        forward_workspace_bytes=ahead - entry - exit_,
        backward_workspace_bytes=most - outside,
        optimizer_workspace_bytes=max(layer.optimizer_workspace_bytes for layer in layers),
        parameters=tuple({name: None for layer in layers for name in layer.parameters}),
        **sums,
        **parts,
    )


def _most_light(chain: Chain, first: int, last: int) -> int:
    """The most bytes while the run goes forward, keeping only its own input."""
    live = most = chain.input_of(first)
    for index in range(first, last + 1):
        layer = chain.layers[index]
        live += layer.output_bytes
        most = max(most, live + layer.light_workspace_bytes)
        if index > first:
            live -= chain.input_of(index)
    return most


def _tells(layer: Layer) -> bool:
    return layer.backward_weight_ns is not None and layer.saved_for_weight_bytes is not None


def _weights(layers: Sequence[Layer]) -> dict[str, int]:
    """What the gradients of a run's weights take, the last layer's first."""
    live = kept = sum(layer.saved_for_weight_bytes or 0 for layer in layers)
    most = 0
    for layer in reversed(layers):
        most = max(most, live + layer.weight_backward_workspace_bytes)
        live -= layer.saved_for_weight_bytes or 0
    return {
        "backward_weight_ns": sum(layer.backward_weight_ns or 0 for layer in layers),
        "saved_for_weight_bytes": kept,
        "saved_input_for_weight_bytes": layers[0].saved_input_for_weight_bytes,
        "weight_backward_workspace_bytes": most - kept,
    }


@dataclass(frozen=True, slots=True)
class _There:
    """What lies on the GPU when the second forward of a run is over."""

    live: int
    kept: list[int]
    """Of it, the storages before each layer."""


def _second_forward(
    chain: Chain, first: int, last: int, held: int, copies: int
) -> tuple[int, _There]:
    """The most bytes while a run is computed again, and what it leaves.

    `held` is what the layer before keeps of the run's input, for longer than the run needs it.
    """
    live = most = chain.input_of(first) + chain.layers[last].gradient_of_output_bytes
    live += copies
    kept: list[int] = []
    for index in range(first, last + 1):
        layer = chain.layers[index]
        live += layer.saved_bytes + layer.output_bytes
        most = max(most, live + layer.forward_workspace_bytes)
        behind = chain.layers[index - 1].saved_output_bytes if index > first else held
        kept.append(max(behind, layer.saved_input_bytes))
        live -= chain.input_of(index) - kept[-1]
    live -= chain.layers[last].output_bytes - chain.layers[last].saved_output_bytes + copies
    return most, _There(live, kept)


def _most_back(chain: Chain, first: int, last: int, there: _There) -> int:
    """The most bytes while a run goes back in one piece."""
    live, most = there.live, 0
    for index in range(last, first - 1, -1):
        layer, gradient = chain.layers[index], chain.gradient_of_input(index)
        most = max(most, live + layer.backward_workspace_bytes + gradient)
        live += gradient - layer.gradient_of_output_bytes
        # What this layer keeps of its output goes with it, the rest of that storage went before.
        live -= layer.saved_bytes + layer.saved_output_bytes
        if index > first:
            live -= there.kept[index - first] - chain.layers[index - 1].saved_output_bytes
    return most


def _most_inputs(chain: Chain, first: int, last: int, there: _There) -> int:
    """The most bytes while a run goes back without the gradients of its weights."""
    live, most, behind = there.live, 0, 0
    for index in range(last, first - 1, -1):
        layer, gradient = chain.layers[index], chain.gradient_of_input(index)
        most = max(most, live + layer.input_backward_workspace_bytes + gradient)
        entry, needed = layer.saved_input_for_weight_bytes, layer.saved_for_weight_bytes or 0
        live += gradient - layer.gradient_of_output_bytes
        live += needed - entry - layer.saved_bytes
        # The storage behind shrinks to what the next layer's weights need of it, the one before
        # to what its own layer or these weights need.
        live -= max(layer.saved_output_bytes, behind) - behind
        if index > first:
            output = chain.layers[index - 1].saved_output_bytes
            live -= there.kept[index - first] - max(output, entry)
        behind = entry
    return most
