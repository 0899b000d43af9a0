"""Which GPU a layer must sit on: what users write, as (layer, GPU)."""

from __future__ import annotations

from collections.abc import Mapping

from pipeplan.chain import Chain
from pipeplan.cluster import Cluster
from pipeplan.errors import InputError

Pins = tuple[tuple[int, int], ...]


def resolve(pins: Mapping[int | str, int], chain: Chain, cluster: Cluster) -> Pins:
    """Sorted (layer, GPU) of every pinned layer.

    Args:
        pins: GPUs by layer index, by layer name, or by "a..b": the layers from a to b, inclusive,
            each an index or a name.
        chain: Whose layers are meant.
        cluster: Whose GPUs are meant.

    Raises:
        InputError: if a layer or GPU is unknown, a name stands for several layers, or a layer gets
            two GPUs.
    """
    found: dict[int, int] = {}
    for text, gpu in pins.items():
        if not 0 <= gpu < len(cluster.gpus):
            raise InputError(
                f"pin {text}={gpu}: got GPU {gpu}, need 0..{len(cluster.gpus) - 1}:"
                f" the cluster has {len(cluster.gpus)} GPUs"
            )
        for layer in _layers(text, chain):
            if found.setdefault(layer, gpu) != gpu:
                raise InputError(
                    f"pin {text}={gpu}: got GPUs {found[layer]} and {gpu} for layer {layer}"
                    f" ({chain.layers[layer].name!r}), need one. Drop one of the pins."
                )
    return tuple(sorted(found.items()))


def _layers(text: int | str, chain: Chain) -> range:
    """The layers that a pin names."""
    names = [layer.name for layer in chain.layers]
    if isinstance(text, str) and ".." in text and text not in names:
        first, last = (_layer(end, chain, text) for end in text.split("..", 1))
        if first > last:
            raise InputError(
                f"pin {text!r}: got layer {first} to layer {last}, need a first layer that is not"
                " behind the last one"
            )
        return range(first, last + 1)
    layer = _layer(text, chain, text)
    return range(layer, layer + 1)


def _layer(end: int | str, chain: Chain, text: int | str) -> int:
    """One layer, by name or index."""
    named = [index for index, layer in enumerate(chain.layers) if layer.name == end]
    if len(named) > 1:
        raise InputError(
            f"pin {text!r}: got the name of {len(named)} layers ({named[0]}, {named[1]}, ...),"
            " need one layer. Use its index."
        )
    if named:
        return named[0]
    count = len(chain.layers)
    if str(end).isdecimal() and int(end) < count:
        return int(end)
    raise InputError(
        f"pin {text!r}: got {end!r}, need a layer of chain {chain.name!r}: an index in"
        f" 0..{count - 1}, a name, or a..b"
    )
