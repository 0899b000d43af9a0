"""A level as a graph: clusters with ways to run, and the values that pass between them.

The H-Graph of X. Zhao's thesis, Definition 3.2.2: two computations per cluster, one per pass, and
between them a phantom, which is what the chosen way saves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from pipeplan.operator_graph import Operation, OperatorGraph, Phase, Storage, StorageKind
from pipeplan.remat.graph.hierarchy.ways import ClusterWay
from pipeplan.remat.graph.ledger import END_F, START, Ledger, Order
from pipeplan.remat.graph.orders import tidy


@dataclass(frozen=True)
class ClusterPart:
    """A cluster in the graph of the level above, the parent.

    Attributes:
        operations: the parent's index of each of its operations.
        storages: the parent's index of each of its storages.
        forwards: how many of its operations are forwards.
        ways: to run it; the first is the fastest.
        once: whether its forward may not run again.
    """

    operations: tuple[int, ...]
    storages: tuple[int, ...]
    forwards: int
    ways: tuple[ClusterWay, ...]
    once: bool = False

    @property
    def forward_peak(self) -> int:
        """Bytes of a forward of which nothing is kept."""
        return min(each.forward_peak for each in self.ways)

    @property
    def backward_peak(self) -> int:
        """Least bytes of a backward."""
        return min(each.backward_peak for each in self.ways)

    def backward(self, way: int) -> tuple[int, ...]:
        """The parent's operations of a way's backward."""
        return tuple(self.operations[at] for at in self.ways[way].backward)

    def reads(self, way: int) -> frozenset[int]:
        """The parent's storages that a way's backward reads."""
        return frozenset(self.storages[s] for s in self.ways[way].reads)


@dataclass(frozen=True)
class ClusterLevel:
    """The parts of a parent: operation j is the forward of part j, 2 n - 1 - j its backward.

    Attributes:
        parent: the graph whose operations the parts hold.
        parts: in an order in which their forwards may run.
    """

    parent: Ledger
    parts: tuple[ClusterPart, ...]

    def backward_of(self, part: int) -> int:
        """The operation that is a part's backward."""
        return 2 * len(self.parts) - 1 - part

    @cached_property
    def _makers(self) -> dict[int, int]:
        """By storage of the parent: the operation of the level, `START` or `END_F`."""
        found = dict.fromkeys(self.parent.received, START)
        found |= dict.fromkeys(self.parent.tangents, END_F)
        for index, part in enumerate(self.parts):
            for local, at in enumerate(part.operations):
                mine = index if local < part.forwards else self.backward_of(index)
                found.update(dict.fromkeys(self.parent.writes[at], mine))
        return found

    @cached_property
    def _always(self) -> dict[int, set[int]]:
        """By storage what reads it whatever is chosen."""
        found: dict[int, set[int]] = {s: set() for s in self._makers}
        for index, part in enumerate(self.parts):
            for at in part.operations[: part.forwards]:
                for storage in self.parent.reads[at]:
                    if self._makers[storage] != index:
                        found[storage].add(index)
            ways = (part.reads(way) for way in range(len(part.ways)))
            for storage in frozenset.intersection(*ways) & found.keys():
                found[storage].add(self.backward_of(index))
        for storage in self.parent.outputs:
            found[storage].add(END_F)
        return found

    @cached_property
    def _sometimes(self) -> dict[int, set[tuple[int, int]]]:
        """By storage pairs of part and way whose backward reads it while others do not."""
        found: dict[int, set[tuple[int, int]]] = {s: set() for s in self._makers}
        for index, part in enumerate(self.parts):
            for way in range(len(part.ways)):
                for storage in part.reads(way) & found.keys():
                    if self.backward_of(index) not in self._always[storage]:
                        found[storage].add((index, way))
        return found

    @cached_property
    def _values(self) -> list[tuple[int, ...]]:
        """Storages that pass between parts, those with the same ends together."""
        outputs, back = set(self.parent.graph.outputs), set(self.parent.handed_back)
        alike: dict[object, list[int]] = {}
        for storage, maker in self._makers.items():
            readers, maybe = self._always[storage], self._sometimes[storage]
            part = min(maker, self.backward_of(maker)) if maker >= 0 else None
            mine = set() if part is None else {part, self.backward_of(part)}
            if (
                readers <= mine
                and all(each == part for each, _ in maybe)
                and storage not in back
                and storage not in self.parent.outputs
            ):
                continue
            ends = (maker, frozenset(readers), frozenset(maybe))
            key = (*ends, storage in outputs, storage in back)
            alike.setdefault(key, []).append(storage)
        return [tuple(each) for each in alike.values()]

    @cached_property
    def graph(self) -> OperatorGraph:
        """Values, a phantom without bytes per part, and the operations, backwards reversed."""
        values, parts = self._values, self.parts
        size = self.parent.size
        storages = [
            Storage(name=str(index), bytes=sum(size[s] for s in each), kind=self._kind(each[0]))
            for index, each in enumerate(values)
        ]
        phantom = Storage(name="phantom", bytes=0, kind=StorageKind.ACTIVATION)
        operations = [self._operation(index) for index in range(2 * len(parts))]
        outputs, back = set(self.parent.outputs), set(self.parent.handed_back)
        return OperatorGraph(
            name="level",
            storages=(*storages, *([phantom] * len(parts))),
            operations=tuple(operations),
            outputs=tuple(i for i, each in enumerate(values) if each[0] in outputs),
            input_gradients=tuple(i for i, each in enumerate(values) if each[0] in back),
        )

    def _kind(self, storage: int) -> StorageKind:
        maker = self._makers[storage]
        if maker == START:
            return StorageKind.RECEIVED
        if maker == END_F:
            return StorageKind.TANGENT
        return StorageKind.ACTIVATION if maker < len(self.parts) else StorageKind.GRADIENT

    def _operation(self, at: int) -> Operation:
        forward = at < len(self.parts)
        part = self.parts[at if forward else self.backward_of(at)]
        phantom = len(self._values) + (at if forward else self.backward_of(at))
        reads = [i for i, each in enumerate(self._values) if at in self._always[each[0]]]
        writes = [i for i, each in enumerate(self._values) if self._makers[each[0]] == at]
        made = sum(self.parent.size[s] for i in writes for s in self._values[i])
        peak = part.forward_peak if forward else part.backward_peak
        fastest = part.ways[0]
        return Operation(
            name="",
            phase=Phase.FORWARD if forward else Phase.INPUT_GRADIENT,
            reads=tuple(reads if forward else (*reads, phantom)),
            writes=tuple((*writes, phantom) if forward else writes),
            time_ns=fastest.forward_ns if forward else fastest.backward_ns,
            workspace_bytes=max(0, peak - made),
            once=part.once or not forward,
        )

    @cached_property
    def maybe(self) -> dict[int, dict[int, tuple[int, ...]]]:
        """By backward the values that it reads in some of its ways, and these (3.14)."""
        found: dict[int, dict[int, tuple[int, ...]]] = {}
        for index, each in enumerate(self._values):
            for part, way in sorted(self._sometimes[each[0]]):
                mine = found.setdefault(self.backward_of(part), {})
                mine[index] = (*mine.get(index, ()), way)
        return found

    def order(self, runs: Order, ways: Sequence[int]) -> Order:
        """The parent's order of an order of the level, each part run by its way (Lemma 3.2.1).

        A run of which nothing is used is left out.
        """
        count, found = len(self.parts), list[int]()
        for at in runs:
            if at < 0:
                found.append(at)
            elif at < count:
                found.extend(self.parts[at].operations[: self.parts[at].forwards])
            else:
                part = self.backward_of(at)
                found.extend(self.parts[part].backward(ways[part]))
        return tidy(self.parent, tuple(found))
