"""What waits for the second half of a backward, and the second half itself."""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from pipeplan.weight_gradients.small_graph import DeferredOperation, Gradients, Sum, Use, cut_off

MARK = "pipeplan: made of weights alone"
"""In the metadata of a node of autograd: the sums of its outputs."""


class InnerBackwardError(RuntimeError):
    """A layer calls for gradients in its own forward: its backward cannot be split."""

    def __init__(self) -> None:
        super().__init__(
            "a layer computes gradients in its own forward, which a split backward cannot tell"
            " from the stage's. Plan without split backwards."
        )


def metadata(tensor: Tensor) -> dict[Any, Any]:
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
        self._leaves: dict[int, tuple[Tensor, Sum]] = {}
        self._casts: dict[Node, Sum] = {}
        self._operations = 0

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

    def stand_in(self, weight: Tensor) -> tuple[Tensor, Use]:
        """What an operation uses in place of `weight`, and where that one's gradients add up."""
        if weight.grad_fn is not None:
            (alias,) = cut_off([weight])
            total = metadata(weight)[MARK][weight.output_nr]
            return alias, (get_gradient_edge(alias), total)
        if id(weight) not in self._leaves:
            self._leaves[id(weight)] = weight.detach().requires_grad_(), Sum(leaf=weight)
        alias, total = self._leaves[id(weight)]
        return alias, (get_gradient_edge(alias), total)

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
        for total in sums:
            if (gradient := gradients.pop()) is not None:
                total.add(gradient)
            del gradient
            self._left[total] -= 1
            if not self._left[total]:
                self._hand_on(total)

    def _hand_on(self, total: Sum) -> None:
        maker = total.maker
        if maker is not None:
            maker.arrived = (
                *maker.arrived[: total.index],
                total.take(),
                *maker.arrived[total.index + 1 :],
            )
            self._open[maker] -= 1
            if not self._open[maker]:
                self._ready.append(maker)
        elif total.total is not None:
            torch.autograd.backward([total.leaf], [total.take()])  # type: ignore[arg-type]
