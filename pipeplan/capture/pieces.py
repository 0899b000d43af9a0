"""Layers out of a graph: one module per piece, with the user's own weights under their names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, fx, nn

from pipeplan.capture.cuts import Cut
from pipeplan.capture.flow import Flow, Node
from pipeplan.capture.naming import layer_names
from pipeplan.capture.operations import memory_order


@dataclass(frozen=True, slots=True)
class Piece:
    """One layer."""

    name: str
    module: nn.Module
    fed: tuple[int, ...]
    """Which of the model's inputs it gets behind its boundary."""


def pieces(flow: Flow, cuts: Sequence[Cut]) -> list[Piece]:
    """The layers between `cuts`."""
    edges = [0, *(cut.after for cut in cuts), len(flow.steps)]
    groups = [flow.steps[begin:end] for begin, end in pairwise(edges)]
    carried = [flow.exported.inputs, *(cut.values for cut in cuts), (flow.exported.output,)]
    found = []
    for index, name in enumerate(layer_names(flow, groups)):
        piece = _Piece(flow, groups[index], carried[index], carried[index + 1])
        found.append(Piece(name, piece.module(), piece.fed))
    return found


class _Piece:
    """Copies the nodes of one layer, in the order of the program."""

    def __init__(
        self, flow: Flow, steps: Sequence[Node], taken: Sequence[Node], given: Sequence[Node]
    ) -> None:
        self._flow, self._taken, self._given = flow, taken, given
        needed: set[Node] = set(steps).union(*(flow.needs(step) for step in steps))
        for node in given:
            needed |= flow.rebuilt(node, flow.position[node] + 1)
        inputs = flow.exported.inputs
        more = [index for index, node in enumerate(inputs) if node in needed and node not in taken]
        self.fed = tuple(more)
        self._placeholders = [*taken, *(inputs[index] for index in more)]
        self._nodes = sorted(needed - set(self._placeholders), key=flow.position.__getitem__)

    def module(self) -> fx.GraphModule:
        """The layer. Tensors that lie transposed in memory pass in the order of their memory."""
        graph = fx.Graph()
        made: dict[Node, Node] = {}
        attributes: dict[str, Tensor | nn.Module] = {}
        states = self._flow.exported.states
        for node in self._placeholders:
            made[node] = graph.placeholder(node.name)
        for node in self._taken:
            made[node] = _permuted(graph, made[node], _inverse(_order(node)))
        for node in self._nodes:
            if node in states:
                name, attributes[name] = states[node]
                made[node] = graph.get_attr(name)
                continue
            if node.op == "get_attr":
                name = str(node.target)
                attributes[name] = self._flow.exported.module.get_submodule(name)
            made[node] = graph.node_copy(node, made.__getitem__)
        results = tuple(_permuted(graph, made[node], _order(node)) for node in self._given)
        graph.output(results if len(results) > 1 else results[0])
        return fx.GraphModule(attributes, graph)


def _order(node: Node) -> tuple[int, ...]:
    return memory_order(node.meta["val"])


def _inverse(order: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(order.index(dimension) for dimension in range(len(order)))


def _permuted(graph: fx.Graph, value: Node, order: tuple[int, ...]) -> Node:
    if order == tuple(range(len(order))):
        return value
    return graph.call_function(torch.ops.aten.permute.default, (value, list(order)))
