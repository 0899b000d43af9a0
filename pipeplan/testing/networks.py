"""Computed chains of well-known networks: layer shapes in, times and bytes out, no torch needed.

Times come from a roofline of one published GPU (a V100: fp32 peak and memory bandwidth, each with
an efficiency, plus a launch cost per kernel); bytes come from the shapes. They are not measured,
so each chain says `estimated`; what they are for is comparing planners on the same, reproducible
work. A convolutional layer is convolution + batch norm + ReLU; a skip connection rides along the
boundary while it is open, so every layer border is a legal cut.

    python -m pipeplan.testing.networks resnet50 --batch 8 --image 224 -o resnet50.json
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipeplan.chain import Chain, Layer
from pipeplan.cli import output
from pipeplan.errors import InputError

FLOPS = 15.7e12 * 0.55
"""Reached floating-point operations per second."""
BANDWIDTH = 900e9 * 0.75
"""Reached bytes per second of device memory."""
LAUNCH_NS = 10_000
"""Cost of starting one kernel."""
ELEMENT = 4
"""Bytes per number (fp32)."""


@dataclass(frozen=True, slots=True)
class Work:
    """What one layer does per micro-batch; sizes count numbers, not bytes."""

    name: str
    flops: int
    moved: int
    kernels: int
    weights: int
    output: int
    saved_input: int
    saved: int
    saved_output: int = 0

    def layer(self) -> Layer:
        """The chain layer: a backward does twice the work of its forward."""
        forward = max(self.flops / FLOPS, self.moved * ELEMENT / BANDWIDTH)
        weight = self.weights * ELEMENT
        return Layer(
            name=self.name,
            forward_ns=int(forward * 1e9) + self.kernels * LAUNCH_NS,
            backward_ns=int(2 * forward * 1e9) + 2 * self.kernels * LAUNCH_NS,
            optimizer_ns=int(4 * weight / BANDWIDTH * 1e9) + LAUNCH_NS,
            weight_bytes=weight,
            gradient_bytes=weight,
            optimizer_bytes=weight,
            output_bytes=self.output * ELEMENT,
            saved_input_bytes=self.saved_input * ELEMENT,
            saved_bytes=self.saved * ELEMENT,
            saved_output_bytes=self.saved_output * ELEMENT,
        )


def _chain(name: str, works: list[Work], batch: int, inputs: int, setting: str) -> Chain:
    return Chain(
        name=name,
        source=f"computed from layer shapes: {setting}",
        mode="estimated",
        microbatch_size=batch,
        input_bytes=inputs * ELEMENT,
        device={"name": "V100 roofline", "flops": FLOPS, "bandwidth_bytes_per_s": BANDWIDTH},
        layers=tuple(work.layer() for work in works),
    )


@dataclass(frozen=True, slots=True)
class Conv:
    """Shape of one convolution + batch norm: square kernel, square images, `batch` of them."""

    batch: int
    image: int
    stride: int
    inputs: int
    outputs: int
    kernel: int

    @property
    def out_image(self) -> int:
        """Side of the output image."""
        return -(-self.image // self.stride)

    @property
    def read(self) -> int:
        """Numbers in the input."""
        return self.batch * self.inputs * self.image**2

    @property
    def made(self) -> int:
        """Numbers in the output."""
        return self.batch * self.outputs * self.out_image**2

    @property
    def weights(self) -> int:
        """Kernel weights and the batch norm's scale and shift."""
        return self.kernel**2 * self.inputs * self.outputs + 2 * self.outputs

    @property
    def flops(self) -> int:
        """Multiply-adds counted twice, batch norm and ReLU at eight per number."""
        return 2 * self.made * self.kernel**2 * self.inputs + 8 * self.made

    def work(self, name: str, *, skip: int = 0, relu: bool = True) -> Work:
        """The layer; `skip` numbers of an open skip connection pass by it."""
        return Work(
            name=name,
            flops=self.flops,
            moved=self.read + 6 * self.made,
            kernels=3,
            weights=self.weights,
            output=self.made + skip,
            saved_input=self.read,
            saved=self.made,
            saved_output=self.made if relu else 0,
        )


def _plus(first: Work, second: Work, output: int) -> Work:
    """One layer that does both works on the same input, which is saved once."""
    return Work(
        name=first.name,
        flops=first.flops + second.flops,
        moved=first.moved + second.moved,
        kernels=first.kernels + second.kernels,
        weights=first.weights + second.weights,
        output=output,
        saved_input=first.saved_input,
        saved=first.saved + second.saved,
        saved_output=first.saved_output,
    )


RESNETS = {
    18: (False, (2, 2, 2, 2)),
    34: (False, (3, 4, 6, 3)),
    50: (True, (3, 4, 6, 3)),
    101: (True, (3, 4, 23, 3)),
    152: (True, (3, 8, 36, 3)),
}
"""Layers -> whether blocks are bottlenecks, and how many each group has."""


def _pool_classify(batch: int, image: int, channels: int) -> Work:
    """Global average pooling, the classifier, and the loss."""
    read = batch * channels * image**2
    weights = channels * 1000 + 1000
    return Work(
        name="classifier",
        flops=read + 2 * batch * weights,
        moved=read + weights,
        kernels=4,
        weights=weights,
        output=1,
        saved_input=0,
        saved=batch * (channels + 1000),
    )


def _residual(name: str, batch: int, image: int, ins: int, width: int, bottleneck: bool,
              stride: int) -> Iterator[Work]:  # fmt: skip
    """The layers of one residual block; the first also projects the skip where shapes differ."""
    outs = width * 4 if bottleneck else width
    plan = [(1, width, 1), (3, width, stride), (1, outs, 1)] if bottleneck else [
        (3, width, stride), (3, outs, 1)]  # fmt: skip
    project = ins != outs or stride != 1
    projection = Conv(batch, image, stride, ins, outs, 1)
    skip = projection.made if project else batch * ins * image**2
    side, channels = image, ins
    for index, (kernel, out, step) in enumerate(plan):
        conv = Conv(batch, side, step, channels, out, kernel)
        last = index == len(plan) - 1
        work = conv.work(f"{name}.conv{index + 1}", skip=0 if last else skip)
        if index == 0 and project:
            work = _plus(work, projection.work(name, relu=False), conv.made + skip)
        yield work
        side, channels = conv.out_image, out


def resnet(depth: int, batch: int, image: int) -> Chain:
    """ResNet-18/34/50/101/152 with one layer per convolution of the main path (He et al. 2015)."""
    bottleneck, blocks = RESNETS[depth]
    stem = Conv(batch, image, 2, 3, 64, 7)
    side = -(-stem.out_image // 2)
    works = [_with_output(stem.work("stem"), batch * 64 * side**2)]
    channels = 64
    for group, count in enumerate(blocks):
        for index in range(count):
            width, stride = 64 * 2**group, 2 if group and not index else 1
            name = f"group{group + 1}.block{index + 1}"
            works += _residual(name, batch, side, channels, width, bottleneck, stride)
            side = -(-side // stride)
            channels = width * 4 if bottleneck else width
    works.append(_pool_classify(batch, side, channels))
    setting = f"ResNet-{depth}, batch {batch}, image {image}"
    return _chain(f"resnet{depth}", works, batch, batch * 3 * image**2, setting)


def _with_output(work: Work, output: int) -> Work:
    """`work` followed by a pooling to `output` numbers: its own output becomes an inner tensor."""
    return Work(
        name=work.name,
        flops=work.flops + 9 * output,
        moved=work.moved + output,
        kernels=work.kernels + 1,
        weights=work.weights,
        output=output,
        saved_input=work.saved_input,
        saved=work.saved + work.saved_output + 2 * output,
    )


def densenet121(batch: int, image: int) -> Chain:
    """DenseNet-121 with one layer per convolution (Huang et al. 2016), growth 32.

    A dense layer's input is everything made before in its block, so the boundary grows.
    """
    stem = Conv(batch, image, 2, 3, 64, 7)
    side = -(-stem.out_image // 2)
    works = [_with_output(stem.work("stem"), batch * 64 * side**2)]
    channels = 64
    for block, count in enumerate((6, 12, 24, 16)):
        for index in range(count):
            name, carried = f"block{block + 1}.layer{index + 1}", batch * channels * side**2
            squeeze = Conv(batch, side, 1, channels, 128, 1)
            grow = Conv(batch, side, 1, 128, 32, 3)
            works.append(squeeze.work(f"{name}.conv1", skip=carried))
            tail = grow.work(f"{name}.conv2", skip=carried, relu=False)
            works.append(tail)
            channels += 32
        if block < 3:
            transition = Conv(batch, side, 1, channels, channels // 2, 1)
            side, channels = side // 2, channels // 2
            works.append(
                _with_output(transition.work(f"transition{block + 1}"), batch * channels * side**2)
            )
    works.append(_pool_classify(batch, side, channels))
    setting = f"DenseNet-121, batch {batch}, image {image}"
    return _chain("densenet121", works, batch, batch * 3 * image**2, setting)


def _block(name: str, batch: int, length: int, width: int, heads: int, gated: bool) -> Work:
    """A transformer block; attention is fused, so its scores are never kept."""
    tokens = batch * length
    inner = 3 * 8 * width // 3 if gated else 4 * width
    matrices = 4 * width**2 + (3 if gated else 2) * width * inner // (3 if gated else 1)
    return Work(
        name=name,
        flops=2 * tokens * matrices + 4 * tokens * length * width,
        moved=matrices + tokens * (30 * width + 4 * inner),
        kernels=20,
        weights=matrices + 4 * width,
        output=tokens * width,
        saved_input=tokens * width,
        saved=tokens * (9 * width + 2 * inner) + batch * heads * length,
    )


def _split_block(name: str, block: Work, batch: int, length: int, width: int) -> list[Work]:
    """`block` as two layers, attention and feed-forward, the residual stream as boundary."""
    tokens = batch * length
    stream = tokens * width
    attention = Work(
        name=f"{name}.attention",
        flops=2 * tokens * 4 * width**2 + 4 * tokens * length * width,
        moved=4 * width**2 + 14 * stream,
        kernels=9,
        weights=4 * width**2 + 2 * width,
        output=stream,
        saved_input=stream,
        saved=6 * stream,
    )
    return [
        attention,
        Work(
            name=f"{name}.mlp",
            flops=block.flops - attention.flops,
            moved=block.moved - attention.moved,
            kernels=block.kernels - attention.kernels,
            weights=block.weights - attention.weights,
            output=stream,
            saved_input=stream,
            saved=block.saved - attention.saved,
        ),
    ]


def transformer(
    family: str, blocks: int, batch: int, length: int, width: int, *, heads: int = 16,
    vocabulary: int = 50257, split: bool = False,
) -> Chain:  # fmt: skip
    """A GPT-2 or Llama shaped decoder: embedding, blocks (or their halves), head with the loss."""
    tokens, gated = batch * length, family == "llama"
    works = [
        Work("embedding", tokens * width, 3 * tokens * width, 3, vocabulary * width,
             tokens * width, 0, tokens * 2),
    ]  # fmt: skip
    for index in range(blocks):
        name = f"block{index}"
        block = _block(name, batch, length, width, heads, gated)
        works += _split_block(name, block, batch, length, width) if split else [block]
    head = vocabulary * width
    works.append(
        Work("head", 2 * tokens * head, head + 3 * tokens * vocabulary, 5, head, 1,
             tokens * width, tokens * (vocabulary + width)),
    )  # fmt: skip
    setting = f"{family}, {blocks} blocks, width {width}, batch {batch} x {length} tokens"
    parts = "halves" if split else "blocks"
    return _chain(f"{family}-{blocks}{parts}", works, batch, tokens * 2, setting)


def build(name: str, batch: int | None = None, image: int | None = None) -> Chain:
    """The chain called `name`: resnet18..152, densenet121, gpt24..gpt96, llama32, gpt96split.

    ResNet-18 defaults to batch 8 and images of 1000 pixels, ResNet-34 to batch 32, all others to
    batch 8 of images with 224 pixels a side, as the experiments of Beaumont, Eyraud-Dubois and
    Shilova (2020), section 7.

    Raises:
        InputError: if no such network is known, or a size is none.
    """
    for what, size in (("samples per micro-batch", batch), ("pixels a side", image)):
        if size is not None and size < 1:
            raise InputError(f"network {name}: got {size} {what}, need at least 1")
    match = re.fullmatch(r"([a-z]+)(\d+)(split)?", name)
    kind, number, split = (match[1], int(match[2]), bool(match[3])) if match else ("", 0, False)
    if kind == "resnet" and number in RESNETS:
        side = 1000 if number == 18 else 224
        return resnet(number, batch or (32 if number == 34 else 8), image or side)
    if name == "densenet121":
        return densenet121(batch or 8, image or 224)
    if kind in ("gpt", "llama") and number:
        width, vocabulary = (1600, 50257) if kind == "gpt" else (4096, 32000)
        return transformer(
            kind, number, batch or 4, 1024, width, vocabulary=vocabulary, split=split
        )
    raise InputError(f"network: got {name!r}, need resnet18, densenet121, gpt24, llama32, ...")


def main(argv: Sequence[str] | None = None) -> int:
    """Write one chain file; what is wrong with the arguments is one line and exit code 2."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", help="resnet18|34|50|101|152, densenet121, gpt24, gpt96split, ...")
    parser.add_argument("--batch", type=int, help="samples per micro-batch")
    parser.add_argument(
        "--image", type=int, help="side of the input image in pixels (224; resnet18: 1000)"
    )
    parser.add_argument("-o", "--output", required=True, help="chain file to write")
    parser.add_argument("--force", action="store_true", help="replace the file")
    args = parser.parse_args(argv)
    try:
        output.check_output(args.output, args.force)
        chain = build(args.name, args.batch, args.image)
    except InputError as error:
        print(f"networks: {error}", file=sys.stderr)
        return error.exit_code
    output.write(args.output, chain.to_json(), args.force)
    print(f"{args.output}: {len(chain.layers)} layers", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
