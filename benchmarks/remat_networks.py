"""The chains of the offloading figures: ResNet and DenseNet as their source cuts them.

O. Beaumont, L. Eyraud-Dubois, A. Shilova (2020), §6.1, take the networks of torchvision and group
each part that is not a line (a residual block, a dense layer) into one virtual layer; all other
modules stay layers. They measured times and bytes on a V100-PCIE. Here both are computed from
shapes: docs/reference/remat-rules.md §9 says what comes from the source and what is assumed. The
chains of `pipeplan/testing/networks.py` are cut finer inside of blocks and keep the whole stem in
one layer, so they are not what that source plans for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from pipeplan.chain import Chain, Layer
from pipeplan.testing.networks import RESNETS

FLOPS = 14e12 * 0.87
"""Reached operations per second: the fp32 peak of a V100-PCIE, and a share of it with which
ResNet-50 trains at 318 images per second: 14 / 15.7 of an eighth of the 2858 that NVIDIA published
for eight V100-SXM2 (DeepLearningExamples, ResNet50 v1.5 for PyTorch, fp32, 2019)."""
BANDWIDTH = 900e9 * 0.75
"""Reached bytes per second of its memory; efficiency assumed."""
LAUNCH_NS = 10_000
"""Cost of starting one kernel (assumed)."""
ELEMENT = 4
"""Bytes per number (fp32)."""
INDEX = 2
"""Size of what a max pooling keeps per output, in numbers: a 64-bit index."""

_DENSENETS = {
    121: (32, 64, (6, 12, 24, 16)),
    161: (48, 96, (6, 12, 36, 24)),
    169: (32, 64, (6, 12, 32, 32)),
    201: (32, 64, (6, 12, 48, 32)),
}


def _kernel(flops: int, moved: int) -> int:
    """Time of one kernel: it computes or moves, whichever takes longer."""
    return int(max(flops / FLOPS, moved * ELEMENT / BANDWIDTH) * 1e9) + LAUNCH_NS


@dataclass
class _Work:
    """Kernels of one layer, added up; sizes count numbers, not bytes."""

    forward: int = 0
    backward: int = 0
    weights: int = 0

    def conv(self, read: int, made: int, ins: int, outs: int, kernel: int, first: bool) -> None:
        """A convolution; its backward makes two of the same size, the network's first one."""
        weights = kernel**2 * ins * outs
        time = _kernel(2 * made * kernel**2 * ins, read + made + weights)
        self.forward += time
        self.backward += time if first else 2 * time
        self.weights += weights

    def norm(self, size: int, channels: int) -> None:
        """Batch norm: statistics, then the values; backward the same on two tensors."""
        self.forward += _kernel(8 * size, 3 * size)
        self.backward += _kernel(8 * size, 5 * size)
        self.weights += 2 * channels

    def relu(self, size: int) -> None:
        """In place, as in torchvision."""
        self.forward += _kernel(size, 2 * size)
        self.backward += _kernel(size, 3 * size)

    def add(self, size: int) -> None:
        """Two tensors into one; backward the two gradients of what was used twice."""
        self.forward += _kernel(size, 3 * size)
        self.backward += _kernel(size, 3 * size)

    def move(self, read: int, made: int) -> None:
        """A pooling or a concatenation."""
        self.forward += _kernel(read, read + made)
        self.backward += _kernel(read, read + made)


class _Network:
    """Layers so far, and the boundary behind them: `channels` of `side` x `side`, a batch."""

    def __init__(self, name: str, batch: int, image: int) -> None:
        self.name, self.batch, self.image = name, batch, image
        self.channels, self.side = 3, image
        self.layers: list[Layer] = []

    def size(self, channels: int, side: int | None = None) -> int:
        """Numbers of a tensor."""
        return self.batch * channels * (side or self.side) ** 2

    @property
    def here(self) -> int:
        """Numbers of the boundary."""
        return self.size(self.channels)

    def put(self, name: str, work: _Work, channels: int, side: int, *, saved: int = 0,
            keeps: bool = False, forward: int = 0, backward: int = 0) -> None:  # fmt: skip
        """A layer that keeps its input and `saved` besides, and its output where it `keeps` it."""
        before, self.channels, self.side = self.here, channels, side
        self.layers.append(
            Layer(
                name=name,
                forward_ns=work.forward,
                backward_ns=work.backward,
                weight_bytes=work.weights * ELEMENT,
                gradient_bytes=work.weights * ELEMENT,
                output_bytes=self.here * ELEMENT,
                saved_input_bytes=before * ELEMENT,
                saved_bytes=saved * ELEMENT,
                saved_output_bytes=self.here * ELEMENT if keeps else 0,
                forward_workspace_bytes=forward * ELEMENT,
                backward_workspace_bytes=backward * ELEMENT,
            )
        )

    def conv(self, name: str, channels: int, kernel: int, stride: int = 1) -> None:
        """A convolution alone."""
        work, side = _Work(), -(-self.side // stride)
        made = self.size(channels, side)
        work.conv(self.here, made, self.channels, channels, kernel, first=not self.layers)
        self.put(name, work, channels, side)

    def norm_relu(self, name: str) -> None:
        """Batch norm, and the ReLU that works in place on its output."""
        work = _Work()
        work.norm(self.here, self.channels)
        work.relu(self.here)
        self.put(name, work, self.channels, self.side, keeps=True)

    def pool(self, name: str, indices: bool) -> None:
        """Half the side; a max pooling keeps where each maximum was."""
        # The max pooling pads, the average pooling of a transition does not.
        work, side = _Work(), (self.side + indices) // 2
        made = self.size(self.channels, side)
        saved = INDEX * made if indices else 0
        work.move(self.here, made + saved)
        self.put(name, work, self.channels, side, saved=saved)

    def stem(self, channels: int) -> None:
        """Four modules, three layers: the ReLU goes with the batch norm that it overwrites."""
        self.conv("conv", channels, 7, 2)
        self.norm_relu("norm")
        self.pool("pool", indices=True)

    def classify(self) -> Chain:
        """Average over the image, then the classifier with the loss."""
        work = _Work()
        work.move(self.here, self.size(self.channels, 1))
        self.put("average", work, self.channels, 1)
        last, scores = _Work(), self.size(1000)
        last.conv(self.here, scores, self.channels, 1000, 1, first=False)
        last.move(scores, scores)
        self.put("classifier", last, 1, 1, saved=scores)
        return Chain(
            name=self.name,
            source=f"computed from layer shapes: batch {self.batch}, image {self.image}",
            mode="estimated",
            microbatch_size=self.batch,
            input_bytes=self.size(3, self.image) * ELEMENT,
            device={"name": "V100-PCIE roofline", "flops": FLOPS, "bandwidth": BANDWIDTH},
            layers=tuple(self.layers),
        )


def _residual(net: _Network, name: str, width: int, bottleneck: bool, stride: int) -> None:
    """A residual block as one layer: (convolution, norm, ReLU) two or three times, and the sum."""
    outs, side = width * (4 if bottleneck else 1), -(-net.side // stride)
    plan = [(1, width, 1), (3, width, stride), (1, outs, 1)] if bottleneck else [
        (3, width, stride), (3, outs, 1)]  # fmt: skip
    entry, made, work = net.here, net.size(outs, side), _Work()
    at, channels, saved = net.side, net.channels, 0
    # Gradients in the order of the backward: of each norm's input, then of its convolution's.
    gradients = [entry]
    for index, (kernel, out, step) in enumerate(plan):
        read, at = net.size(channels, at), -(-at // step)
        size = net.size(out, at)
        work.conv(read, size, channels, out, kernel, first=False)
        work.norm(size, out)
        work.relu(size)
        last = index == len(plan) - 1
        saved += size if last else 2 * size
        gradients = ([size] if last else [size, size]) + gradients
        channels = out
    work.add(made)
    project = channels != net.channels or stride != 1
    if project:
        work.conv(entry, made, net.channels, outs, 1, first=False)
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
    net = _Network(f"resnet{depth}", batch, image)
    net.stem(64)
    for group, count in enumerate(blocks):
        for index in range(count):
            stride = 2 if group and not index else 1
            name = f"group{group + 1}.block{index + 1}"
            _residual(net, name, 64 * 2**group, bottleneck, stride)
    return net.classify()


def _dense(net: _Network, name: str, growth: int) -> None:
    """A dense layer as one layer: norm, ReLU, 1 x 1, norm, ReLU, 3 x 3, and the concatenation."""
    entry, middle, new = net.here, net.size(4 * growth), net.size(growth)
    work = _Work()
    work.norm(entry, net.channels)
    work.relu(entry)
    work.conv(entry, middle, net.channels, 4 * growth, 1, first=False)
    work.norm(middle, 4 * growth)
    work.relu(middle)
    work.conv(middle, new, 4 * growth, growth, 3, first=False)
    work.move(entry + new, entry + new)
    # Beside the gradients of output and input: that of the norm's input, or of the two inner ones.
    net.put(name, work, net.channels + growth, net.side, saved=entry + 2 * middle, forward=new,
            backward=max(entry, 2 * middle - entry))  # fmt: skip


def densenet(depth: int, batch: int, image: int) -> Chain:
    """DenseNet (Huang et al. 2016): three layers, one per dense layer, three per transition."""
    growth, channels, blocks = _DENSENETS[depth]
    net = _Network(f"densenet{depth}", batch, image)
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
    """resnet18, 34, 50, 101, 152 or densenet121, 161, 169, 201.

    Raises:
        ValueError: for any other name.
    """
    kind = name.rstrip("0123456789")
    depth = int(name[len(kind) :] or 0)
    if kind == "resnet" and depth in RESNETS:
        return resnet(depth, batch, image)
    if kind == "densenet" and depth in _DENSENETS:
        return densenet(depth, batch, image)
    raise ValueError(f"network: got {name!r}, need resnet18 to 152 or densenet121 to 201")
