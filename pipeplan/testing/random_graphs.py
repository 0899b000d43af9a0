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
