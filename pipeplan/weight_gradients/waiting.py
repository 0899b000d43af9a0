"""What waits for the second half of a backward, and the second half itself."""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from pipeplan.weight_gradients.small_graph import (
    DeferredOperation,
    Gradients,
    Sum,
    Use,
    accumulate,
    cut_off,
    edge_of,
)

_MARK = "pipeplan: made of weights alone"
"""In the metadata of a node of autograd: the layer that made it, and the sums of its outputs."""


class InnerBackwardError(RuntimeError):
    """A layer calls for gradients in its own forward: its backward cannot be split."""

    def __init__(self) -> None:
        super().__init__(
            "a layer computes gradients in its own forward, which a split backward cannot tell"
            " from the stage's. Plan without split backwards."
        )


def _metadata(tensor: Tensor) -> dict[Any, Any]:
    """What torch keeps with the node that made `tensor`, for as long as that lives."""
    kept: Any = tensor.grad_fn.metadata if tensor.grad_fn else {}
    found: dict[Any, Any] = kept
    return found


class Waiting:
    """The operations of one micro-batch whose weights' gradients wait."""

    def __init__(self) -> None:
        self.collecting = False
        """Whether the layers' backward runs now."""
        self._waiting: deque[DeferredOperation] = deque()
        self._leaves: dict[int, tuple[Tensor, Use]] = {}
        self._casts: dict[Node, Sum] = {}
        self._operations = 0
        self._marks = False
        """Whether the present layer has made a tensor of weights alone."""
        self._layer = 0

    def next_layer(self) -> None:
        """What other layers have made is an activation to the next one, whatever it is made of."""
        self._layer += 1
        self._marks = False

    def take(self) -> deque[DeferredOperation]:
        """Those on activations, in the order in which their gradients arrived; none waits then."""
        waiting, self._waiting = self._waiting, deque()
        self._leaves.clear()
        self._casts.clear()
        return waiting

    def arrive(self, operation: DeferredOperation, arrived: Gradients) -> Gradients:
        """Gradients of what `operation` was called with, but for weights, which wait.

        Raises:
            InnerBackwardError: if this is not the layers' backward.
        """
        if not self.collecting:
            raise InnerBackwardError
        if not operation.activations:
            return operation.gradients([edge for edge, _ in operation.uses], arrived, last=False)
        self._waiting.append(operation)
        if operation.deferred:
            operation.arrived = arrived
            return operation.of_activations(arrived)
        count = len(operation.activations)
        wanted = (*operation.activations, *(edge for edge, _ in operation.uses))
        found = operation.gradients(wanted, arrived, last=True)
        operation.found = found[count:]
        return found[:count]

    def next_order(self) -> int:
        """The number of an operation."""
        self._operations += 1
        return self._operations

    def is_weight(self, tensor: Tensor) -> bool:
        """Whether a tensor that requires a gradient is a leaf, or one layer's, made of leaves."""
        return tensor.is_leaf or (self._marks and self._mark_of(tensor) is not None)

    def _mark_of(self, tensor: Tensor) -> list[Sum] | None:
        """The sums of what made `tensor`, if the present layer has made it of weights alone."""
        layer, sums = _metadata(tensor).get(_MARK, (self._layer, None))
        return sums if layer == self._layer else None

    def mark(self, made: Tensor, maker: DeferredOperation) -> None:
        """`made`, and what else `maker` gives, is made of leaves alone."""
        sums = [Sum(maker=maker, index=index) for index in range(len(maker.outputs))]
        _metadata(made)[_MARK] = self._layer, sums
        self._marks = True

    def stand_in(self, weight: Tensor) -> tuple[Tensor, Use]:
        """What an operation uses in place of `weight`, and where that one's gradients add up."""
        if weight.grad_fn is not None:
            (alias,) = cut_off([weight])
            sums = self._mark_of(weight)
            assert sums is not None
            return alias, (edge_of(alias), sums[weight.output_nr])
        if id(weight) not in self._leaves:
            alias = weight.detach().requires_grad_()
            self._leaves[id(weight)] = alias, (edge_of(alias), Sum(leaf=weight))
        return self._leaves[id(weight)]

    def cast(self, node: Node, use: Use) -> Use:
        """The use of the cast `node` of a leaf, in place of that leaf's own."""
        edge = GradientEdge(node, 0)
        if node not in self._casts:
            self._casts[node] = Sum(
                maker=DeferredOperation(self.next_order(), (edge,), (), (use,))
            )
        return edge, self._casts[node]


class WeightBackward:
    """The second half of a backward."""

    def __init__(self, waiting: deque[DeferredOperation]) -> None:
        """Takes operations on activations, in the order in which their gradients arrived."""
        self._waiting = waiting
        self._left: Counter[Sum] = Counter()
        """Uses of a weight that are not done."""
        self._open: Counter[DeferredOperation] = Counter()
        """Outputs that are not done, of operations on weights alone."""
        self._ready: list[DeferredOperation] = []
        """Such operations, all of whose outputs are done."""
        for operation in waiting:
            self._expect(operation)

    def _expect(self, operation: DeferredOperation) -> None:
        for _, total in operation.uses:
            self._left[total] += 1
            maker = total.maker
            if maker is not None and self._left[total] == 1:
                self._open[maker] += 1
                maker.arrived = (None,) * len(maker.outputs)
                if self._open[maker] == 1:
                    self._expect(maker)

    def run(self) -> None:
        """Later operations come first."""
        while self._waiting or self._ready:
            ready = max(self._ready, key=lambda each: each.order, default=None)
            if ready and not (self._waiting and self._waiting[0].order > ready.order):
                self._ready.remove(ready)
                self._finish(ready)
            else:
                del ready
                self._finish(self._waiting.popleft())

    def _finish(self, operation: DeferredOperation) -> None:
        sums = [total for _, total in operation.uses]
        gradients = list(operation.of_weights())[::-1]
        del operation
        leaves = []
        for total in sums:
            if (gradient := gradients.pop()) is not None:
                total.add(gradient)
            del gradient
            self._left[total] -= 1
            if self._left[total]:
                continue
            if total.maker is not None:
                self._hand_on(total, total.maker)
            elif total.total is not None:
                leaves.append(total)
        if leaves:
            accumulate([(total.leaf, total.take()) for total in leaves])

    def _hand_on(self, total: Sum, maker: DeferredOperation) -> None:
        arrived = list(maker.arrived)
        arrived[total.index] = total.take()
        maker.arrived = tuple(arrived)
        self._open[maker] -= 1
        if not self._open[maker]:
            self._ready.append(maker)
