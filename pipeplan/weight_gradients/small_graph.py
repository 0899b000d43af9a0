"""The graph of one operation on its own, and the sums that its weights' gradients are added to."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, _engine_run_backward


class _Cut(torch.autograd.Function):
    """The same storages as outputs of a node that keeps nothing: where a small graph ends."""

    @staticmethod
    def forward(ctx: Any, trigger: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        raise AssertionError("gradients are taken before this node")


_TRIGGER = torch.empty(0, requires_grad=True)


def cut_off(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """`tensors` as inputs of a new graph, which does not keep them."""
    result: tuple[Tensor, ...] = _Cut.apply(_TRIGGER, *tensors)  # type: ignore[no-untyped-call]
    return result


def edge_of(tensor: Tensor) -> GradientEdge:
    """Where the gradient of `tensor` arrives in a graph that somebody else keeps.

    torch's own `get_gradient_edge` keeps it itself, which takes longer.
    """
    node = tensor.grad_fn
    if node is None:
        ((node, _),) = tensor.view_as(tensor).grad_fn.next_functions  # type: ignore[union-attr]
    assert node is not None
    return GradientEdge(node, tensor.output_nr)


def _run(ends: Sequence[Any], arrived: Sequence[Tensor], **how: Any) -> Gradients:
    """Torch's engine, without what `torch.autograd` checks of its callers for each call."""
    found: Gradients = _engine_run_backward(
        tuple(ends), tuple(arrived), create_graph=False, allow_unreachable=True, **how
    )
    return found


def accumulate(pairs: Sequence[tuple[Tensor | None, Tensor | None]]) -> None:
    """Add gradients to those of their leaves, as a backward does: hooks run."""
    leaves, gradients = zip(*pairs, strict=True)
    _run(leaves, gradients, keep_graph=False, inputs=(), accumulate_grad=True)


@dataclass(eq=False, slots=True)
class Sum:
    """Gradients that add up for a leaf, or for an output of an operation on weights alone."""

    leaf: Tensor | None = None
    maker: DeferredOperation | None = None
    index: int = 0
    """Which output of `maker`."""
    total: Tensor | None = None

    def add(self, gradient: Tensor) -> None:
        """One more; in order of arrival, as autograd adds."""
        self.total = gradient if self.total is None else self.total + gradient

    def take(self) -> Tensor | None:
        """The sum, which is forgotten."""
        total, self.total = self.total, None
        return total


Use = tuple[GradientEdge, Sum]
"""Where in a small graph the gradient is taken, and what it is added to."""
Gradients = tuple[Tensor | None, ...]


@dataclass(eq=False, slots=True)
class DeferredOperation:
    """The small graph of one operation."""

    order: int
    """Of two operations, the later one's gradients come first."""
    outputs: tuple[GradientEdge, ...]
    activations: tuple[GradientEdge, ...]
    """Where they enter; none, if it is on weights alone."""
    uses: tuple[Use, ...]
    """Of weights."""
    deferred: bool = True
    """Whether the graph waits for `weights`; otherwise gradients of weights do."""
    below: GradientEdge | None = None
    """What lies between here and `activations` needs no weight, and does not wait."""
    arrived: Gradients = ()
    """Gradients of outputs."""
    found: Gradients | None = None
    """Gradients of weights, where they are known already."""

    def gradients(
        self, wanted: Sequence[GradientEdge], arrived: Gradients, *, last: bool
    ) -> Gradients:
        """Of `wanted`; the graph is released if this is the last call."""
        pairs = [
            (edge, gradient)
            for edge, gradient in zip(self.outputs, arrived, strict=True)
            if gradient is not None
        ]
        if not pairs:
            return (None,) * len(wanted)
        ends, given = zip(*pairs, strict=True)
        return _run(ends, given, keep_graph=not last, inputs=tuple(wanted), accumulate_grad=False)

    def of_activations(self, arrived: Gradients) -> Gradients:
        """Computed now; the graph stays as far as weights need it."""
        if self.below is None:
            return self.gradients(self.activations, arrived, last=False)
        (middle,) = self.gradients([self.below], arrived, last=False)
        if middle is None:
            return (None,) * len(self.activations)
        return _run(
            [self.below],
            [middle],
            keep_graph=False,
            inputs=self.activations,
            accumulate_grad=False,
        )

    def of_weights(self) -> Gradients:
        """Computed now, at last; nothing is kept."""
        arrived, self.arrived = self.arrived, ()
        found, self.found = self.found, None
        if found is None:
            found = self.gradients([edge for edge, _ in self.uses], arrived, last=True)
        return found


_ACTIVATION, _WEIGHT = 1, 2


class Look:
    """What lies in the small graph of an operation."""

    def __init__(self, end: Node | None, weights: set[Node]) -> None:
        """Takes where activations enter, and where weights do."""
        self._end = end
        self._leaves = weights
        self._reach: dict[Node | None, int] = {None: 0}
        self.weights = False
        """Whether there is one."""
        self.joints: list[Node] = []
        """Where activations and weights meet."""
        self.casts: dict[Node, Node] = {}
        """Of weights, by their node: what autocast made of them."""

    def through(self, roots: Sequence[Node]) -> None:
        """Look from `roots` to where the graph was entered."""
        stack = list(roots)
        while stack:
            node = stack[-1]
            children = self._children(node)
            open_ones = [child for child in children if child not in self._reach]
            if open_ones and node not in self._reach:
                stack.extend(open_ones)
                continue
            stack.pop()
            if node not in self._reach:
                self._reach[node] = self._visit(node, children)
        self.weights = any(self._reach[root] & _WEIGHT for root in roots)

    def _children(self, node: Node) -> list[Node]:
        if node is self._end or node in self._leaves:
            return []
        return [child for child, _ in node.next_functions if child is not None]

    def _visit(self, node: Node, children: list[Node]) -> int:
        if node is self._end:
            return _ACTIVATION
        if node in self._leaves:
            return _WEIGHT
        bits = [self._reach[child] for child in children]
        if _WEIGHT in bits and any(each & _ACTIVATION for each in bits):
            self.joints.append(node)
        if len(children) == 1 and children[0] in self._leaves and node.name() == _CAST:
            self.casts[children[0]] = node
        return functools.reduce(int.__or__, bits, 0)

    def below(self) -> GradientEdge | None:
        """The one edge from the one joint towards activations, if more than one step is left."""
        if len(self.joints) != 1:
            return None
        edges = {
            (node, number)
            for node, number in self.joints[0].next_functions
            if self._reach[node] & _ACTIVATION
        }
        ((node, number), *others) = edges
        return None if others or node is self._end or node is None else GradientEdge(node, number)


_CAST = "ToCopyBackward0"
