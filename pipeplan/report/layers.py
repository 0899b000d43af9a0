"""A chain as a table: what `--pin` may name, and what weighs most."""

from __future__ import annotations

from rich.table import Table

from pipeplan.chain import Chain, Layer
from pipeplan.units import counted, format_bytes, format_ns

_LEGEND = (
    "per micro-batch of {size}, on a GPU of speed 1\n"
    "states: weights (one version), gradients, optimizer\n"
    "kept: from forward to backward, besides the layer's input\n"
    "output: what a cut behind the layer sends"
)


def weights_bytes(layer: Layer) -> int:
    """What one version of a layer's weights holds, with gradients and optimizer (M1, V = 1)."""
    return layer.weight_bytes + layer.gradient_bytes + layer.optimizer_bytes


def kept_bytes(layer: Layer) -> int:
    """What a micro-batch keeps of a layer besides its input."""
    return layer.saved_bytes + layer.saved_output_bytes


_HALVES = "\nof weights: the second half of a backward, where a plan splits it"


def _of_weights(layer: Layer) -> str:
    known = layer.backward_weight_ns
    return "" if known is None else format_ns(known)


def layer_table(chain: Chain) -> Table:
    """One row per layer and a sum; `chain.mode` says whether times were measured."""
    times = {"measured": "", "estimated": ", times estimated", "imported": ", imported"}[
        chain.mode
    ]
    samples = counted(chain.microbatch_size, "sample")
    halves = [x.backward_weight_ns for x in chain.layers if x.backward_weight_ns is not None]
    table = Table(
        title=f"{chain.name}{times}",
        title_justify="left",
        caption=_LEGEND.format(size=samples) + (_HALVES if halves else ""),
        caption_justify="left",
        show_footer=True,
    )
    layers = chain.layers
    table.add_column("layer", justify="right")
    table.add_column("name", "sum", overflow="fold")
    for name, values, show in (
        ("forward", [layer.forward_ns for layer in layers], format_ns),
        ("backward", [layer.backward_ns for layer in layers], format_ns),
        ("states", [weights_bytes(layer) for layer in layers], format_bytes),
        ("kept", [kept_bytes(layer) for layer in layers], format_bytes),
    ):
        table.add_column(name, show(sum(values)), justify="right")
        if name == "backward" and halves:
            table.add_column("of weights", format_ns(sum(halves)), justify="right")
    table.add_column("output", justify="right")
    for index, layer in enumerate(layers):
        table.add_row(
            str(index),
            layer.name,
            format_ns(layer.forward_ns),
            format_ns(layer.backward_ns),
            *([_of_weights(layer)] if halves else []),
            format_bytes(weights_bytes(layer)),
            format_bytes(kept_bytes(layer)),
            format_bytes(layer.output_bytes),
        )
    return table
