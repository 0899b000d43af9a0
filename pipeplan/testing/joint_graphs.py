"""Joint graphs of transformers by formulas, as capture would give them; roofline times.

For solvers whose tests and benchmarks need no torch. Sizes are those of a pre-norm GPT with
explicit or fused attention and dropout; one operation per kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pipeplan.operator_graph import Operation, OperatorGraph, Phase, Storage, StorageKind


@dataclass(frozen=True)
class Gpt:
    """Shapes of a GPT and the device that it runs on.

    Attributes:
        layers: transformer layers.
        width: of the residual stream.
        heads: of the attention.
        tokens: per sequence.
        batch: sequences.
        vocabulary: rows of the embedding; 0 for layers alone.
        fused: whether attention is one kernel.
        element: bytes of a number.
        flops: per second.
        bandwidth: bytes per second.
        launch_ns: of each kernel.
    """

    layers: int
    width: int = 256
    heads: int = 4
    tokens: int = 128
    batch: int = 4
    vocabulary: int = 256
    fused: bool = False
    element: int = 4
    flops: float = 60e9
    bandwidth: float = 8e9
    launch_ns: int = 4000


GPT2_LARGE = Gpt(36, 1280, 20, 1024, 8, 0, False, 2, 200e12, 1.5e12, 3000)
"""36 layers of GPT2-large in bfloat16 on an A100-like roofline."""


@dataclass
class _Builder:
    gpt: Gpt
    storages: list[Storage] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)

    def storage(
        self, name: str, elements: int, kind: StorageKind, element: int | None = None
    ) -> int:
        size = elements * (element or self.gpt.element)
        targets = (name.removeprefix("d "),) if kind is StorageKind.WEIGHT_GRADIENT else ()
        self.storages.append(Storage(name=name, bytes=size, kind=kind, targets=targets))
        return len(self.storages) - 1

    def run(
        self,
        name: str,
        phase: Phase,
        reads: Sequence[int],
        writes: Sequence[int],
        flops: float = 0,
        random: bool = False,
    ) -> None:
        moved = sum(self.storages[s].bytes for s in (*reads, *writes))
        seconds = max(flops / self.gpt.flops, moved / self.gpt.bandwidth)
        self.operations.append(
            Operation(
                name=name,
                phase=phase,
                reads=tuple(reads),
                writes=tuple(writes),
                time_ns=self.gpt.launch_ns + round(seconds * 1e9),
                random=random,
            )
        )


@dataclass(frozen=True)
class _Node:
    """A forward with its gradient: `back(gradient) -> gradients of what it reads`."""

    name: str
    kind: str
    reads: tuple[int, ...]
    out: int
    saved: tuple[int, ...] = ()
    weight: int | None = None
    flops: float = 0


class _Network:
    """A forward as it is written, and its gradient by walking back."""

    def __init__(self, gpt: Gpt) -> None:
        self.build = _Builder(gpt)
        self.gpt = gpt
        self.nodes: list[_Node] = []
        self.parts: dict[int, list[int]] = {}
        self.last: int | None = None

    def elements(self, storage: int) -> int:
        return self.build.storages[storage].bytes // self.gpt.element

    def act(self, name: str, elements: int, element: int | None = None) -> int:
        return self.build.storage(name, elements, StorageKind.ACTIVATION, element)

    def node(self, kind: str, name: str, reads: Sequence[int], out: int, **more: object) -> int:
        node = _Node(name, kind, tuple(reads), out, **more)  # type: ignore[arg-type]
        weights = () if node.weight is None else (node.weight,)
        self.build.run(
            name,
            Phase.FORWARD,
            (*reads, *weights),
            (out, *(s for s in node.saved if s not in reads)),
            node.flops,
            kind == "dropout",
        )
        self.nodes.append(node)
        return out

    def same(self, kind: str, name: str, *reads: int) -> int:
        """A kernel whose output is as large as its first input."""
        return self.node(kind, name, reads, self.act(name, self.elements(reads[0])))

    def linear(self, name: str, source: int, into: int, width: int) -> int:
        rows = self.elements(source) // width
        weight = self.build.storage(f"{name}.weight", width * into, StorageKind.PARAMETER)
        flops = 2.0 * rows * width * into
        out = self.act(name, rows * into)
        return self.node("linear", name, (source,), out, weight=weight, flops=flops)

    def norm(self, name: str, source: int) -> int:
        rows = self.elements(source) // self.gpt.width
        weight = self.build.storage(f"{name}.weight", self.gpt.width, StorageKind.PARAMETER)
        saved = (
            self.act(f"{name}.mean", rows, 4),
            self.act(f"{name}.rstd", rows, 4),
        )
        out = self.act(name, self.elements(source))
        return self.node("norm", name, (source,), out, saved=saved, weight=weight)

    def dropout(self, name: str, source: int) -> int:
        mask = self.act(f"{name}.mask", self.elements(source), 1)
        out = self.act(name, self.elements(source))
        return self.node("dropout", name, (source,), out, saved=(mask,))

    def product(self, name: str, left: int, right: int, elements: int, flops: float) -> int:
        return self.node("product", name, (left, right), self.act(name, elements), flops=flops)

    def attention(self, name: str, q: int, k: int, v: int) -> int:
        gpt = self.gpt
        scores = gpt.batch * gpt.heads * gpt.tokens**2
        flops = 2.0 * scores * gpt.width / gpt.heads
        if gpt.fused:
            rows = self.act(f"{name}.logsumexp", gpt.batch * gpt.heads * gpt.tokens, 4)
            out = self.act(f"{name}.fused", self.elements(q))
            self.node("fused", f"{name}.fused", (q, k, v), out, saved=(rows,), flops=2 * flops)
            return out
        each = self.product(f"{name}.scores", q, k, scores, flops)
        each = self.same("scale", f"{name}.scale", each)
        each = self.same("scale", f"{name}.mask", each)
        each = self.same("softmax", f"{name}.softmax", each)
        each = self.dropout(f"{name}.dropout", each)
        return self.product(f"{name}.mix", each, v, self.elements(v), flops)

    def layer(self, index: int, x: int) -> int:
        gpt, name = self.gpt, f"h{index}"
        each = self.norm(f"{name}.ln1", x)
        joined = self.linear(f"{name}.qkv", each, 3 * gpt.width, gpt.width)
        part = self.elements(joined) // 3
        q, k, v = (
            self.node("part", f"{name}.{p}", (joined,), self.act(f"{name}.{p}", part))
            for p in "qkv"
        )
        each = self.same("copy", f"{name}.merge", self.attention(name, q, k, v))
        each = self.linear(f"{name}.proj", each, gpt.width, gpt.width)
        x = self.same("add", f"{name}.add1", self.dropout(f"{name}.drop1", each), x)
        each = self.linear(f"{name}.fc1", self.norm(f"{name}.ln2", x), 4 * gpt.width, gpt.width)
        each = self.same("gelu", f"{name}.gelu", each)
        each = self.linear(f"{name}.fc2", each, gpt.width, 4 * gpt.width)
        return self.same("add", f"{name}.add2", self.dropout(f"{name}.drop2", each), x)

    def backward(self, gradient: dict[int, int], wanted: int) -> None:
        """Gradients of everything, from those of the outputs."""
        for node in reversed(self.nodes):
            if node.out in gradient:
                incoming = gradient.pop(node.out)
                for source, made in self.gradients(node, incoming):
                    self.add(node, gradient, source, made)
        self.last = gradient.get(wanted)

    def add(self, node: _Node, gradient: dict[int, int], source: int, made: int) -> None:
        """The sum with what other readers gave."""
        if source in gradient:
            both = (gradient[source], made)
            made = self.grad(f"sum at {node.name}", self.elements(source))
            self.build.run(f"sum at {node.name}", Phase.INPUT_GRADIENT, both, (made,))
        gradient[source] = made

    def grad(self, name: str, elements: int) -> int:
        return self.build.storage(f"g {name}", elements, StorageKind.GRADIENT)

    def gradients(self, node: _Node, incoming: int) -> list[tuple[int, int]]:
        if self.build.storages[node.reads[0]].kind is StorageKind.PARAMETER:
            self.weights(node, incoming, ())
            return []
        if node.kind == "add":
            return [(source, incoming) for source in node.reads]
        if node.kind == "part":
            return self.joined(node, incoming)
        if node.kind == "product":
            left, right = node.reads
            return [
                self.one(node, f"{node.name} left", left, (incoming, right)),
                self.one(node, f"{node.name} right", right, (incoming, left)),
            ]
        if node.kind == "fused":
            return self.fused(node, incoming)
        return self.simple(node, incoming)

    def one(self, node: _Node, name: str, source: int, reads: Sequence[int]) -> tuple[int, int]:
        made = self.grad(name, self.elements(source))
        self.build.run(f"{name} back", Phase.INPUT_GRADIENT, reads, (made,), node.flops)
        return source, made

    def simple(self, node: _Node, incoming: int) -> list[tuple[int, int]]:
        source = node.reads[0]
        extra: tuple[int, ...] = {
            "norm": (source, *node.saved),
            "dropout": node.saved,
            "softmax": (node.out,),
            "gelu": (source,),
        }.get(node.kind, ())
        if node.weight is None:
            return [self.one(node, node.name, source, (incoming, *extra))]
        pair = self.one(node, node.name, source, (incoming, *extra, node.weight))
        self.weights(node, incoming, (source, *node.saved))
        return [pair]

    def weights(self, node: _Node, incoming: int, reads: Sequence[int]) -> None:
        weight = self.build.storages[node.reads[0] if node.weight is None else node.weight]
        made = self.build.storage(
            f"d {weight.name}", weight.bytes // self.gpt.element, StorageKind.WEIGHT_GRADIENT
        )
        self.build.run(
            f"{node.name} weight", Phase.WEIGHT_GRADIENT, (incoming, *reads), (made,), node.flops
        )

    def fused(self, node: _Node, incoming: int) -> list[tuple[int, int]]:
        made = [self.grad(f"{node.name} {i}", self.elements(s)) for i, s in enumerate(node.reads)]
        reads = (incoming, node.out, *node.reads, *node.saved)
        self.build.run(f"{node.name} back", Phase.INPUT_GRADIENT, reads, made, 2.5 * node.flops)
        return list(zip(node.reads, made, strict=True))

    def joined(self, node: _Node, incoming: int) -> list[tuple[int, int]]:
        """q, k and v come out of one storage, and their gradients go into one."""
        waiting = self.parts.setdefault(node.reads[0], [])
        waiting.append(incoming)
        if len(waiting) < 3:
            return []
        return [self.one(node, f"{node.name} joined", node.reads[0], waiting)]


def gpt_graph(gpt: Gpt) -> OperatorGraph:
    """Forward and backward of `gpt`: embedding and loss where it has a vocabulary."""
    net = _Network(gpt)
    rows, width = gpt.batch * gpt.tokens, gpt.width
    if gpt.vocabulary:
        tokens = net.build.storage("tokens", rows, StorageKind.INPUT, 8)
        table = net.build.storage("embedding", gpt.vocabulary * width, StorageKind.PARAMETER)
        x = first = net.node("embedding", "embed", (table, tokens), net.act("embed", rows * width))
        x = net.dropout("drop", x)
    else:
        x = first = net.build.storage("x", rows * width, StorageKind.INPUT)
    for index in range(gpt.layers):
        x = net.layer(index, x)
    if gpt.vocabulary:
        x = net.linear("head", net.norm("ln", x), gpt.vocabulary, width)
    tangent = net.build.storage("tangent", net.elements(x), StorageKind.TANGENT)
    net.backward({x: tangent}, first)
    back = () if net.last is None or gpt.vocabulary else (net.last,)
    return OperatorGraph(
        name=f"gpt-{gpt.layers}",
        storages=tuple(net.build.storages),
        operations=tuple(net.build.operations),
        outputs=(x,),
        input_gradients=back,
    )
