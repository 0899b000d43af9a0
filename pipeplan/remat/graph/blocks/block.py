"""A block as a graph of its own, and which blocks are identical."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from pipeplan.operator_graph import Operation, OperatorGraph, Storage, StorageKind
from pipeplan.remat.graph.blocks.cuts import BlockCut, parts
from pipeplan.remat.graph.ledger import Ledger


@dataclass(frozen=True)
class GraphBlock:
    """Consecutive forwards and their backwards.

    Attributes:
        graph: with names that say what an operation is and not which one, so that identical
            blocks have equal graphs; what comes in is an input, or received where the whole graph
            receives it.
        operations: index in the whole graph of each of its operations.
        storages: index in the whole graph of each of its storages.
        value_bytes: of what goes on to the next block.
        gradient_bytes: of what comes back from it.
    """

    graph: OperatorGraph
    operations: tuple[int, ...]
    storages: tuple[int, ...]
    value_bytes: int
    gradient_bytes: int

    @cached_property
    def key(self) -> str:
        """What identical blocks share: kinds of operations, structure and sizes.

        Times are left out, as measured ones differ from layer to layer.
        """
        timeless = [each.model_copy(update={"time_ns": 0}) for each in self.graph.operations]
        return self.graph.model_copy(update={"operations": tuple(timeless)}).digest()


def average(alike: Sequence[OperatorGraph]) -> OperatorGraph:
    """Identical blocks' graph with the means of their operations' times."""
    times = zip(*([each.time_ns for each in graph.operations] for graph in alike), strict=True)
    operations = [
        each.model_copy(update={"time_ns": sum(column) // len(column)})
        for each, column in zip(alike[0].operations, times, strict=True)
    ]
    return alike[0].model_copy(update={"operations": tuple(operations)})


def blocks(ledger: Ledger, chosen: Sequence[BlockCut]) -> list[GraphBlock]:
    """The blocks between cuts."""
    found = []
    bounds = [None, *chosen, None]
    for index, (forward, backward) in enumerate(parts(ledger, list(chosen))):
        found.append(_block(ledger, (*forward, *backward), bounds[index], bounds[index + 1]))
    return found


def _block(
    ledger: Ledger, operations: tuple[int, ...], before: BlockCut | None, behind: BlockCut | None
) -> GraphBlock:
    return extract(
        ledger,
        operations,
        inputs=before.values if before else (),
        gradients=behind.gradients if behind else ledger.tangents,
        outputs=behind.values if behind else ledger.outputs,
        returned=(*(before.gradients if before else ()), *ledger.handed_back),
    )


def extract(
    ledger: Ledger,
    operations: Sequence[int],
    inputs: Collection[int],
    gradients: Collection[int],
    outputs: Collection[int],
    returned: Iterable[int],
) -> GraphBlock:
    """Operations of the whole graph, in the order given, as a graph of their own.

    Args:
        ledger: the whole graph.
        operations: forwards first.
        inputs: storages that are there when its forward begins.
        gradients: storages that come before its backward.
        outputs: storages that are there at the end of its forward.
        returned: gradients that it hands on, with others that it does not make.
    """
    names = _Names(ledger, frozenset(inputs), frozenset(gradients))
    whole = ledger.graph.operations
    inside = [
        Operation(
            name=re.sub(r"\d+", "", whole[at].name),
            phase=whole[at].phase,
            reads=tuple(names.of(s) for s in ledger.reads[at]),
            writes=tuple(names.of(s) for s in ledger.writes[at]),
            time_ns=ledger.time[at],
            workspace_bytes=whole[at].workspace_bytes,
            random=whole[at].random,
            once=whole[at].once,
        )
        for at in operations
    ]
    made = {s for at in operations for s in ledger.writes[at]}
    for storage in (*gradients, *outputs):
        names.of(storage)
    graph = OperatorGraph(
        name="block",
        storages=tuple(names.storages),
        operations=tuple(inside),
        outputs=tuple(names.of(s) for s in outputs),
        input_gradients=tuple(names.of(s) for s in returned if s in made),
    )
    return GraphBlock(
        graph,
        tuple(operations),
        tuple(names.index),
        sum(ledger.size[s] for s in outputs),
        sum(ledger.size[s] for s in gradients),
    )


class _Names:
    """Storages of a block, numbered as they are met."""

    def __init__(self, ledger: Ledger, inputs: frozenset[int], gradients: frozenset[int]) -> None:
        self.ledger, self.inputs, self.gradients = ledger, inputs, gradients
        self.index: dict[int, int] = {}
        self.storages: list[Storage] = []

    def of(self, storage: int) -> int:
        """The number of a storage of the whole graph."""
        if storage not in self.index:
            self.index[storage] = len(self.storages)
            self.storages.append(
                Storage(
                    name=str(len(self.storages)),
                    bytes=self.ledger.size[storage],
                    kind=self._kind(storage),
                )
            )
        return self.index[storage]

    def _kind(self, storage: int) -> StorageKind:
        if storage in self.inputs:
            return StorageKind.INPUT
        if storage in self.gradients:
            return StorageKind.TANGENT
        kind = self.ledger.graph.storages[storage].kind
        return StorageKind.ACTIVATION if kind is StorageKind.NEW_BUFFER else kind
