"""The chains of the offloading figures: ResNet, DenseNet and Inception as their source cuts them.

O. Beaumont, L. Eyraud-Dubois, A. Shilova (2020), §6.1, take the networks of torchvision and group
each part that is not a line (a residual block, a dense layer, an Inception module) into one
virtual layer; all other modules stay layers. They measured times and bytes on a V100-PCIE. Here
both are computed from shapes: docs/reference/remat-rules.md §9 says what comes from the source and
what is assumed. The chains of `pipeplan/testing/networks.py` are cut finer inside of blocks and
keep the whole stem in one layer, so they are not what that source plans for.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from benchmarks.remat_inception import inception_v3
from benchmarks.remat_layers import Network, Work
from pipeplan.chain import Chain
from pipeplan.testing.networks import RESNETS

_DENSENETS = {
    121: (32, 64, (6, 12, 24, 16)),
    161: (48, 96, (6, 12, 36, 24)),
    169: (32, 64, (6, 12, 32, 32)),
    201: (32, 64, (6, 12, 48, 32)),
}


def _residual(net: Network, name: str, width: int, bottleneck: bool, stride: int) -> None:
    """A residual block as one layer: (convolution, norm, ReLU) two or three times, and the sum."""
    outs, side = width * (4 if bottleneck else 1), -(-net.side // stride)
    plan = [(1, width, 1), (3, width, stride), (1, outs, 1)] if bottleneck else [
        (3, width, stride), (3, outs, 1)]  # fmt: skip
    entry, made, work = net.here, net.size(outs, side), Work()
    at, channels, saved = net.side, net.channels, 0
    # Gradients in the order of the backward: of each norm's input, then of its convolution's.
    gradients = [entry]
    for index, (kernel, out, step) in enumerate(plan):
        read, at = net.size(channels, at), -(-at // step)
        size = net.size(out, at)
        work.conv(read, size, channels, out, kernel**2, first=False)
        work.norm(size, out)
        work.relu(size)
        last = index == len(plan) - 1
        saved += size if last else 2 * size
        gradients = ([size] if last else [size, size]) + gradients
        channels = out
    work.add(made)
    project = channels != net.channels or stride != 1
    if project:
        work.conv(entry, made, net.channels, outs, taps=1, first=False)
        work.norm(made, outs)
        saved += made
    live = _live(gradients, made, entry if project else 0)
    net.put(name, work, outs, side, saved=saved, keeps=True, forward=made if project else 0,
            backward=max(0, live - made - entry))  # fmt: skip


def _live(gradients: Sequence[int], passing: int, projected: int) -> int:
    """The most numbers of gradients alive at once in a block's backward.

    Args:
        gradients: sizes, in the order in which they are made.
        passing: size of the sum's gradient, which waits for the skip connection.
        projected: size of the input's second gradient, where the skip projects.
    """
    most = 2 * passing
    for one, two in pairwise(gradients):
        most = max(most, passing + one + two)
    return max(most, gradients[-1] + passing + max(passing, projected))


def resnet(depth: int, batch: int, image: int) -> Chain:
    """ResNet (He et al. 2015): three layers, one per residual block, two."""
    bottleneck, blocks = RESNETS[depth]
    net = Network(f"resnet{depth}", batch, image)
    net.stem(64)
    for group, count in enumerate(blocks):
        for index in range(count):
            stride = 2 if group and not index else 1
            name = f"group{group + 1}.block{index + 1}"
            _residual(net, name, 64 * 2**group, bottleneck, stride)
    return net.classify()


def _dense(net: Network, name: str, growth: int) -> None:
    """A dense layer as one layer: norm, ReLU, 1 x 1, norm, ReLU, 3 x 3, and the concatenation."""
    entry, middle, new = net.here, net.size(4 * growth), net.size(growth)
    work = Work()
    work.norm(entry, net.channels)
    work.relu(entry)
    work.conv(entry, middle, net.channels, 4 * growth, taps=1, first=False)
    work.norm(middle, 4 * growth)
    work.relu(middle)
    work.conv(middle, new, 4 * growth, growth, taps=9, first=False)
    work.move(entry + new, entry + new)
    # Beside the gradients of output and input: that of the norm's input, or of the two inner ones.
    net.put(name, work, net.channels + growth, net.side, saved=entry + 2 * middle, forward=new,
            backward=max(entry, 2 * middle - entry))  # fmt: skip


def densenet(depth: int, batch: int, image: int) -> Chain:
    """DenseNet (Huang et al. 2016): three layers, one per dense layer, three per transition."""
    growth, channels, blocks = _DENSENETS[depth]
    net = Network(f"densenet{depth}", batch, image)
    net.stem(channels)
    for block, count in enumerate(blocks):
        for index in range(count):
            _dense(net, f"block{block + 1}.layer{index + 1}", growth)
        net.norm_relu(f"norm{block + 1}")
        if block < len(blocks) - 1:
            net.conv(f"transition{block + 1}", net.channels // 2, 1)
            net.pool(f"pool{block + 1}", indices=False)
    return net.classify()


def network(name: str, batch: int, image: int) -> Chain:
    """resnet18, 34, 50, 101, 152, densenet121, 161, 169, 201 or inception_v3.

    Raises:
        ValueError: for any other name.
    """
    kind = name.rstrip("0123456789")
    depth = int(name[len(kind) :] or 0)
    if kind == "resnet" and depth in RESNETS:
        return resnet(depth, batch, image)
    if kind == "densenet" and depth in _DENSENETS:
        return densenet(depth, batch, image)
    if name == "inception_v3":
        return inception_v3(batch, image)
    raise ValueError(
        f"network: got {name!r}, need resnet18 to 152, densenet121 to 201 or inception_v3"
    )
