"""Layers of the chains of the offloading figures: bytes and times from shapes.

A V100-PCIE, as O. Beaumont, L. Eyraud-Dubois, A. Shilova (2020), §6.1, measured on;
docs/reference/remat-rules.md §9 says what comes from the source and what is assumed.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeplan.chain import Chain, Layer

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


def _kernel(flops: int, moved: int) -> int:
    """Time of one kernel: it computes or moves, whichever takes longer."""
    return int(max(flops / FLOPS, moved * ELEMENT / BANDWIDTH) * 1e9) + LAUNCH_NS


@dataclass
class Work:
    """Kernels of one layer, added up; sizes count numbers, not bytes."""

    forward: int = 0
    backward: int = 0
    weights: int = 0

    def conv(self, read: int, made: int, ins: int, outs: int, taps: int, first: bool) -> None:
        """A convolution of `taps` places of a window; its backward makes two of the same size.

        The backward of the network's first one makes one.
        """
        weights = taps * ins * outs
        time = _kernel(2 * made * taps * ins, read + made + weights)
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

    def sum_gradients(self, size: int, uses: int) -> None:
        """The gradients of what was used so often, one after the other."""
        self.backward += (uses - 1) * _kernel(size, 3 * size)

    def move(self, read: int, made: int) -> None:
        """A pooling or a concatenation."""
        self.forward += _kernel(read, read + made)
        self.backward += _kernel(read, read + made)


class Network:
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

    def put(self, name: str, work: Work, channels: int, side: int, *, saved: int = 0,
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

    def conv(
        self, name: str, channels: int, kernel: int, stride: int = 1, padded: bool = True
    ) -> None:
        """A convolution alone; where it is not padded it loses the border."""
        work, side = Work(), -(-(self.side if padded else self.side - kernel + 1) // stride)
        made = self.size(channels, side)
        work.conv(self.here, made, self.channels, channels, kernel**2, first=not self.layers)
        self.put(name, work, channels, side)

    def norm_relu(self, name: str) -> None:
        """Batch norm, and the ReLU that works in place on its output."""
        work = Work()
        work.norm(self.here, self.channels)
        work.relu(self.here)
        self.put(name, work, self.channels, self.side, keeps=True)

    def pool(self, name: str, indices: bool, padded: bool = True) -> None:
        """Half the side; a max pooling of three keeps where each maximum was."""
        # The average pooling of a transition takes two and never pads.
        work, side = Work(), (self.side + (1 if padded else -1) * indices) // 2
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
        work = Work()
        work.move(self.here, self.size(self.channels, 1))
        self.put("average", work, self.channels, 1)
        last, scores = Work(), self.size(1000)
        last.conv(self.here, scores, self.channels, 1000, taps=1, first=False)
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
