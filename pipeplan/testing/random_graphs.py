"""Small operator graphs by chance, for comparisons with brute force."""

from __future__ import annotations

from random import Random

from pipeplan.operator_graph import Operation, OperatorGraph, Phase, Storage, StorageKind


def random_graph(
    seed: int, forwards: int, backwards: int, most: int = 9, plain: bool = False
) -> OperatorGraph:
    """A small graph with storages of 1 to `most` bytes, for comparisons with brute force.

    With `plain`, operations make one storage each and take no workspace.
    """
    draw = Random(seed)
    storages = [Storage(name="x", bytes=draw.randint(1, most), kind=StorageKind.INPUT)]
    storages.append(Storage(name="t", bytes=draw.randint(1, most), kind=StorageKind.TANGENT))
    operations: list[Operation] = []
    for index in range(forwards + backwards):
        forward = index < forwards
        kind = StorageKind.ACTIVATION if forward else StorageKind.GRADIENT
        known = [i for i in range(len(storages)) if i != 1]
        reads = set(draw.sample(known, min(len(known), draw.randint(1, 2))))
        reads.add(1 if index == forwards else known[-1])
        count = 2 if draw.random() < 0.3 and not plain else 1
        writes = tuple(range(len(storages), len(storages) + count))
        for each in writes:
            storages.append(Storage(name=f"s{each}", bytes=draw.randint(1, most), kind=kind))
        operations.append(
            Operation(
                name=f"o{index}",
                phase=Phase.FORWARD if forward else Phase.INPUT_GRADIENT,
                reads=tuple(sorted(reads)),
                writes=writes,
                time_ns=draw.randint(1, 9),
                workspace_bytes=0 if plain else draw.randint(0, 3),
            )
        )
    return OperatorGraph(
        name=f"random {seed}",
        storages=tuple(storages),
        operations=tuple(operations),
        outputs=(operations[forwards - 1].writes[0],),
        input_gradients=(operations[-1].writes[0],),
    )


def paired_graph(seed: int, count: int) -> OperatorGraph:
    """`count` forwards that read each other by chance, and a backward of each, in reverse."""
    pairs = _Pairs(Random(seed), count)
    for index in range(count):
        pairs.forward(index)
    for index in reversed(range(count)):
        pairs.backward(index)
    return OperatorGraph(
        name=f"paired {seed}",
        storages=tuple(pairs.storages),
        operations=tuple(pairs.operations),
        outputs=(pairs.made[-1],),
        input_gradients=(pairs.gradient,),
    )


class _Pairs:
    """Weights say which forward a backward belongs to."""

    def __init__(self, draw: Random, count: int) -> None:
        self.draw = draw
        self.storages = [Storage(name="x", bytes=3, kind=StorageKind.INPUT)]
        self.made = [0]
        self.gradient = self.new(StorageKind.TANGENT)
        self.weights = [self.new(StorageKind.PARAMETER) for _ in range(count)]
        self.operations: list[Operation] = []
        self.reads: list[tuple[int, ...]] = []
        self.masks: list[tuple[int, ...]] = []

    def new(self, kind: StorageKind) -> int:
        name, size = str(len(self.storages)), self.draw.randint(1, 9)
        self.storages.append(Storage(name=name, bytes=size, kind=kind))
        return len(self.storages) - 1

    def forward(self, index: int) -> None:
        """Reads the latest value and perhaps another one; half of them make a mask, too."""
        self.reads.append(tuple({self.made[-1], self.draw.choice(self.made)}))
        masked = self.draw.random() < 0.5
        self.masks.append((self.new(StorageKind.ACTIVATION),) if masked else ())
        self.made.append(self.new(StorageKind.ACTIVATION))
        reads = (*self.reads[index], self.weights[index])
        self.run(Phase.FORWARD, reads, (*self.masks[index], self.made[-1]))

    def backward(self, index: int) -> None:
        """Reads what its forward read, and its mask."""
        reads = (self.gradient, *self.reads[index], *self.masks[index], self.weights[index])
        self.gradient = self.new(StorageKind.GRADIENT)
        self.run(Phase.INPUT_GRADIENT, reads, (self.gradient,))

    def run(self, phase: Phase, reads: tuple[int, ...], writes: tuple[int, ...]) -> None:
        self.operations.append(
            Operation(
                name="operation",
                phase=phase,
                reads=reads,
                writes=writes,
                time_ns=self.draw.randint(1, 9),
                workspace_bytes=self.draw.randint(0, 3),
            )
        )
