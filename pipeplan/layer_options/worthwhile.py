"""Which options of a layer are worth a planner's time: those that nothing else beats."""

from __future__ import annotations

from collections.abc import Iterable

from pipeplan.chain import Chain, Layer, LayerOption

Figures = tuple[int, ...]
"""Times, what is kept part by part, peaks of a stage of the layer alone; less is better."""


def worthwhile(chain: Chain, index: int, options: Iterable[LayerOption]) -> list[LayerOption]:
    """`options` of a layer without those that are no better in anything than another choice.

    Other choices are another option, the layer itself, and computing the layer again, (V1)-(V4).

    Args:
        chain: whose layer.
        index: of the layer, 0-based.
        options: all that were found.
    """
    layer, given = chain.layers[index], chain.input_of(index)
    before = chain.layers[index - 1].saved_output_bytes if index else 0
    others = [_figures(layer, chain, index), _again(layer, chain, index, before)]
    left: list[LayerOption] = []
    for each in sorted(options, key=lambda one: one.forward_ns + one.backward_ns):
        mine = _figures(layer.under(each), chain, index)
        if each.saved_input_bytes <= given and not any(_beats(other, mine) for other in others):
            left.append(each)
            others.append(mine)
    return left


def _beats(one: Figures, other: Figures) -> bool:
    return all(mine <= its for mine, its in zip(one, other, strict=True))


def _figures(layer: Layer, chain: Chain, index: int) -> Figures:
    kept = (layer.saved_input_bytes, layer.saved_bytes, layer.saved_output_bytes)
    return (
        layer.forward_ns + layer.backward_ns,
        *kept,
        _forward_peak(layer, chain, index),
        _backward_peak(layer, chain, index, layer.saved_input_bytes),
    )


def _forward_peak(layer: Layer, chain: Chain, index: int) -> int:
    """The formula pF of (M3) for a stage of this layer."""
    given = max(layer.saved_input_bytes, chain.input_of(index))
    return given + layer.saved_bytes + layer.forward_workspace_bytes + layer.output_bytes


def _backward_peak(layer: Layer, chain: Chain, index: int, kept: int) -> int:
    """The formula pB of (M3), where `kept` of the input is."""
    saved = kept + layer.saved_bytes + layer.saved_output_bytes
    return saved + layer.backward_workspace_bytes + _gradients(layer, chain, index)


def _gradients(layer: Layer, chain: Chain, index: int) -> int:
    return layer.gradient_of_output_bytes + chain.gradient_of_input(index)


def _again(layer: Layer, chain: Chain, index: int, before: int) -> Figures:
    """A run of this layer alone, which is computed again in the backward."""
    given = chain.input_of(index)
    second = _forward_peak(layer, chain, index) + layer.buffer_bytes
    backward = max(
        given + _gradients(layer, chain, index),
        layer.gradient_of_output_bytes + second,
        _backward_peak(layer, chain, index, max(layer.saved_input_bytes, before)),
    )
    time = 2 * layer.forward_ns + layer.backward_ns
    return (time, given, 0, 0, _forward_peak(layer, chain, index), backward)
