"""What a cluster may do, and what the level above sees of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pipeplan.operator_graph import StorageKind
from pipeplan.remat.graph.ledger import END_F, Ledger, Order
from pipeplan.remat.graph.orders import frees, time_of


@dataclass(frozen=True)
class ClusterWay:
    """One way to run a cluster forward and backward: an option of H-ILP.

    What its inputs, its outputs behind the forward, and the gradients that come in take is told
    by the level above, and not counted here.

    Attributes:
        order: of the cluster's own operations.
        saved: bytes kept inside from the forward to the backward: the phantom.
        forward_peak: bytes inside and of outputs, while the forward runs.
        backward_peak: bytes inside and of gradients that it hands on, while the backward runs.
        forward_ns: time of the forward.
        backward_ns: time of the backward.
        reads: storages of the interface that the backward reads (3.14).
    """

    order: Order
    saved: int
    forward_peak: int
    backward_peak: int
    forward_ns: int
    backward_ns: int
    reads: frozenset[int]

    @classmethod
    def of(cls, ledger: Ledger, order: Order) -> ClusterWay:
        """The figures of an order of a cluster's operations."""
        end = order.index(END_F)
        forward, saved = _forward(ledger, order, end)
        backward, reads = _backward(ledger, order, end, saved)
        return cls(
            order,
            saved,
            forward,
            backward,
            time_of(ledger, order[:end]),
            time_of(ledger, order[end:]),
            reads,
        )

    @property
    def backward(self) -> Order:
        """Runs behind the end of the forward."""
        return self.order[self.order.index(END_F) + 1 :]

    def beats(self, other: ClusterWay) -> bool:
        """Whether it is as good in everything."""
        return (
            self.forward_ns + self.backward_ns <= other.forward_ns + other.backward_ns
            and self.saved <= other.saved
            and self.forward_peak <= other.forward_peak
            and self.backward_peak <= other.backward_peak
            and self.reads <= other.reads
        )


def _forward(ledger: Ledger, order: Order, end: int) -> tuple[int, int]:
    """Most bytes, and bytes left at the end that are no outputs."""
    going, size = frees(ledger, order), ledger.size
    held = peak = 0
    for position, at in enumerate(order[:end]):
        peak = max(peak, held + ledger.comes(at))
        held += sum(size[s] for s in ledger.made(at))
        held -= sum(size[s] for s in (*going.read[position], *going.made[position]))
    return peak, held - sum(size[s] for s in ledger.outputs)


def _backward(ledger: Ledger, order: Order, end: int, saved: int) -> tuple[int, frozenset[int]]:
    """Most bytes behind the end, and what is read of the interface."""
    going, size = frees(ledger, order), ledger.size
    outside = {*ledger.outputs, *ledger.tangents}
    outside |= {
        i for i, each in enumerate(ledger.graph.storages) if each.kind is StorageKind.INPUT
    }
    held, peak, reads = saved, 0, set[int]()
    for position, at in enumerate(order[end + 1 :], end + 1):
        peak = max(peak, held + ledger.comes(at))
        reads.update(outside.intersection(ledger.graph.operations[at].reads))
        outside.difference_update(ledger.made(at))
        held += sum(size[s] for s in ledger.made(at))
        gone = (*going.read[position], *going.made[position])
        held -= sum(size[s] for s in gone if s not in outside)
    return peak, frozenset(reads)


def best_ways(ledger: Ledger, orders: Iterable[Order], most: int) -> tuple[ClusterWay, ...]:
    """Of the ways that no other one beats at most `most`, fastest first."""
    found = [ClusterWay.of(ledger, order) for order in sorted(set(orders))]
    found.sort(key=lambda each: (each.backward_ns, each.saved, each.backward_peak))
    left: list[ClusterWay] = []
    for each in found:
        if not any(other.beats(each) for other in left):
            left.append(each)
    return selected(left, most)


def selected(ways: Sequence[ClusterWay], most: int) -> tuple[ClusterWay, ...]:
    """Ways whose saved bytes are far apart, fastest first (section 3.4.5).

    The thesis takes peaks; what is saved decides what fits beside other clusters.
    """
    if len(ways) <= most:
        return tuple(ways)
    by_bytes = sorted(ways, key=lambda each: (each.saved, each.backward_ns))
    chosen = [ways[0]]
    while len(chosen) < most:
        chosen.append(
            max(
                (each for each in by_bytes if each not in chosen),
                key=lambda each: min(abs(each.saved - other.saved) for other in chosen),
            )
        )
    return tuple(each for each in ways if each in chosen)
