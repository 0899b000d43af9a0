"""Inception v3 as the offloading figures cut it: a stem of layers, then a layer per module.

C. Szegedy et al., *Rethinking the Inception Architecture for Computer Vision* (2015), as in
torchvision, without the auxiliary classifier: with it the network is no line.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.remat_layers import INDEX, Network, Work
from pipeplan.chain import Chain

Step = tuple[tuple[int, int], ...]
"""Convolutions that read the same and whose outputs are joined: (output channels, places of the
window), each with its norm and ReLU."""


def inception_v3(batch: int, image: int) -> Chain:
    """Five convolutions and two poolings, eleven modules, two layers at the end."""
    net = Network("inception_v3", batch, image)
    _stem(net)
    for index, pooled in enumerate((32, 64, 64)):
        five, double = [_one(48), _one(64, 25)], [_one(64), _one(96, 9), _one(96, 9)]
        _module(net, f"a{index + 1}", [[_one(64)], five, double, [_one(pooled)]])
    _module(net, "b", [[_one(384, 9)], [_one(64), _one(96, 9), _one(96, 9)]], halves=True)
    for index, inner in enumerate((128, 160, 160, 192)):
        seven = [_one(inner), _one(inner, 7), _one(192, 7)]
        double = [_one(inner), *[_one(inner, 7)] * 3, _one(192, 7)]
        _module(net, f"c{index + 1}", [[_one(192)], seven, double, [_one(192)]])
    seven = [_one(192), _one(192, 7), _one(192, 7), _one(192, 9)]
    _module(net, "d", [[_one(192), _one(320, 9)], seven], halves=True)
    for index in range(2):
        three = [_one(384), ((384, 3), (384, 3))]
        double = [_one(448), _one(384, 9), ((384, 3), (384, 3))]
        _module(net, f"e{index + 1}", [[_one(320)], three, double, [_one(192)]])
    return net.classify()


def _one(channels: int, taps: int = 1) -> Step:
    return ((channels, taps),)


def _stem(net: Network) -> None:
    for name, channels, kernel, stride, padded in (
        ("1a", 32, 3, 2, False),
        ("2a", 32, 3, 1, False),
        ("2b", 64, 3, 1, True),
        ("pool1", 0, 3, 2, False),
        ("3b", 80, 1, 1, True),
        ("4a", 192, 3, 1, False),
        ("pool2", 0, 3, 2, False),
    ):
        if not channels:
            net.pool(name, indices=True, padded=padded)
            continue
        net.conv(name, channels, kernel, stride, padded)
        net.norm_relu(f"{name}.norm")


def _module(
    net: Network, name: str, branches: Sequence[Sequence[Step]], *, halves: bool = False
) -> None:
    """Branches of convolutions that read the module's input, joined, as one layer.

    One branch more pools the input: on average before the last of `branches`, or, where the module
    `halves` its side with the last convolution of each branch, by the maximum and alone.
    """
    work, side = Work(), (net.side - 1) // 2 if halves else net.side
    pooled = net.size(net.channels, side)
    work.move(net.here, pooled)
    saved, outs = (INDEX * pooled, net.channels) if halves else (pooled, 0)
    most = 0
    for branch in branches:
        read, channels = net.here, net.channels
        for step in branch:
            at = side if step is branch[-1] else net.side
            for made_channels, taps in step:
                made = net.size(made_channels, at)
                work.conv(read, made, channels, made_channels, taps, first=False)
                work.norm(made, made_channels)
                work.relu(made)
                saved += 2 * made
                # In the backward the gradients before and behind a norm, then a convolution.
                most = max(most, made + max(made, read))
            channels = sum(made_channels for made_channels, _ in step)
            read = net.size(channels, at)
        outs += channels
    joined = net.size(outs, side)
    work.move(joined, joined)
    work.sum_gradients(net.here, len(branches) + halves)
    net.put(name, work, outs, side, saved=saved, forward=pooled if halves else 0, backward=most)
