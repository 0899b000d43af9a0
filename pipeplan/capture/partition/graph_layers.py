"""Layers of a graph: one `torch.fx` module per part of it, with the user's own weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, fx, nn

from pipeplan.capture.eager_modules.eager_operation import (
    copied_call,
    eager_inputs,
    output_tensors,
)
from pipeplan.capture.graph.data_flow import DataFlow, Node
from pipeplan.capture.partition.graph_cuts import Cut
from pipeplan.capture.partition.layer_modules import layer_modules
from pipeplan.capture.partition.layer_names import layer_names
from pipeplan.errors import InputError
from pipeplan.layout import memory_order


class GraphLayer(nn.Module):
    """A layer with one graph for training and one for evaluation, which share their tensors."""

    def __init__(self, training: fx.GraphModule, evaluation: fx.GraphModule | None) -> None:
        super().__init__()
        self.in_training = training
        self.in_evaluation = evaluation

    def forward(self, *values: Tensor) -> Tensor | tuple[Tensor, ...]:
        """What the layer computes in its present mode.

        Raises:
            InputError: if the model computes in a different way when it is evaluated.
        """
        graph = self.in_training if self.training else self.in_evaluation
        if graph is None:
            raise InputError(
                "task: model: its graph in eval mode cannot be cut where the one in training mode"
                " is, so it cannot be evaluated. Give the model's layers as a Python list."
            )
        result: Tensor | tuple[Tensor, ...] = graph(*values)
        return result


@dataclass(frozen=True, slots=True)
class CutLayer:
    """One layer."""

    name: str
    module: GraphLayer
    fed: tuple[int, ...]
    """Which of the model's inputs it gets behind its boundary."""
    modules: tuple[str, ...]
    """Names of the modules whose code runs in it."""

    @property
    def is_eager(self) -> bool:
        """Whether it calls a module that stays eager, in training."""
        return any(node.target is output_tensors for node in self.module.in_training.graph.nodes)


def graph_layers(
    flow: DataFlow, cuts: Sequence[Cut], evaluation: DataFlow | None, model: nn.Module
) -> tuple[list[CutLayer], tuple[int, ...]]:
    """The layers between `cuts`, and which of the model's inputs the first one takes.

    Args:
        flow: of the model in the mode in which it is trained.
        cuts: in order.
        evaluation: of the model in eval mode, if that can be exported.
        model: the user's.
    """
    edges = [0, *(cut.after for cut in cuts), len(flow.steps)]
    groups = [flow.steps[begin:end] for begin, end in pairwise(edges)]
    behind = [*(cut.values for cut in cuts), flow.exported.outputs]
    computed = [_nodes(flow, *each) for each in zip(groups, behind, strict=True)]
    inputs = flow.exported.inputs
    entering = tuple(i for i, node in enumerate(inputs) if node in computed[0]) or (0,)
    carried = [tuple(inputs[i] for i in entering), *behind]
    twins = _twins(flow, evaluation, {node for values in carried for node in values})
    found = []
    for name, modules, nodes, (taken, given) in zip(
        layer_names(flow, groups),
        layer_modules(flow, groups, model),
        computed,
        pairwise(carried),
        strict=True,
    ):
        fed = _fed(flow, nodes, taken)
        train = _LayerBuilder(flow, taken, fed, given).module(nodes, {})
        judge = None
        if evaluation and twins:
            judge = _LayerBuilder(evaluation, taken, fed, given).behind(twins)
        found.append(CutLayer(name, GraphLayer(train, judge), fed, modules))
    return found, entering


def _nodes(flow: DataFlow, group: Sequence[Node], given: Sequence[Node]) -> set[Node]:
    """All that a layer computes: the steps of `group`, what they need, what makes `given`."""
    nodes = set(group).union(*(flow.needs(step) for step in group))
    return nodes.union(*(flow.rebuilt(node, flow.position[node] + 1) for node in given))


def _fed(flow: DataFlow, nodes: set[Node], taken: Sequence[Node]) -> tuple[int, ...]:
    inputs = enumerate(flow.exported.inputs)
    return tuple(index for index, node in inputs if node in nodes and node not in taken)


def _twins(flow: DataFlow, other: DataFlow | None, nodes: set[Node]) -> dict[Node, Node]:
    """For each of `nodes` of `flow`, the one that `other` makes in the same place of the model.

    That is the operation of the same kind that comes as often in the same call of a module. Empty
    if one is missing, or is a tensor of another kind.
    """
    if other is None or len(flow.exported.outputs) != len(other.exported.outputs):
        return {}
    places = {place: node for node, place in other.places().items()}
    twins = dict(zip(flow.exported.inputs, other.exported.inputs, strict=True))
    twins |= dict(zip(flow.exported.outputs, other.exported.outputs, strict=True))
    passing = _passing(other)
    twins |= {copy: passing[name] for name, copy in _passing(flow).items() if name in passing}
    for node, place in flow.places().items():
        if node in nodes - twins.keys() and place in places:
            twins[node] = places[place]
    alike = all(node in twins and _kind(node) == _kind(twins[node]) for node in nodes)
    return twins if alike else {}


def _passing(flow: DataFlow) -> dict[str, Node]:
    """The copy of each parameter that passes from layer to layer, by the parameter's name."""
    exported = flow.exported
    return {exported.states[node][0]: copy for copy, node in exported.copies.items()}


def _kind(node: Node) -> tuple[torch.Size, torch.dtype]:
    value = node.meta["val"]
    return value.shape, value.dtype


class _LayerBuilder:
    """Makes the module of one layer out of copies of a graph's nodes.

    Tensors that lie transposed in memory pass boundaries in the order of their memory, so that
    they arrive as they left.
    """

    def __init__(
        self, flow: DataFlow, taken: Sequence[Node], fed: Sequence[int], given: Sequence[Node]
    ) -> None:
        """Takes the layer's boundaries.

        Args:
            flow: of the mode to make the module for.
            taken: nodes of the training graph that come in.
            fed: the model's inputs that come behind them.
            given: nodes of the training graph that go out.
        """
        self._flow, self._taken, self._fed, self._given = flow, taken, fed, given

    def behind(self, twins: Mapping[Node, Node]) -> fx.GraphModule | None:
        """The module in eval mode: all that leads from what comes in to what goes out."""
        inputs = self._flow.exported.inputs
        known = {twins[node] for node in self._taken} | {inputs[index] for index in self._fed}
        nodes = self._flow.between(known, [twins[node] for node in self._given])
        return None if set(inputs) & nodes - known else self.module(nodes, twins)

    def module(self, nodes: set[Node], twins: Mapping[Node, Node]) -> fx.GraphModule:
        """The module that computes `nodes`; `twins` are this graph's nodes for those of training.

        It holds the user's own tensors, under the names of `_inside`.
        """
        graph = fx.Graph()
        made: dict[Node, Node] = {}
        inputs = self._flow.exported.inputs
        taken = [graph.placeholder(node.name) for node in self._taken]
        for index in self._fed:
            made[inputs[index]] = graph.placeholder(inputs[index].name)
        for node, value in zip(self._taken, taken, strict=True):
            made[twins.get(node, node)] = _permuted(graph, value, _inverse(_order(node)))
        attributes: dict[str, Tensor | nn.Module] = {}
        for node in sorted(nodes - made.keys(), key=self._flow.position.__getitem__):
            made[node] = self._copied(graph, node, made, attributes)
        results = tuple(
            _permuted(graph, made[twins.get(node, node)], _order(node)) for node in self._given
        )
        graph.output(results if len(results) > 1 else results[0])
        return fx.GraphModule(attributes, graph)

    def _copied(
        self,
        graph: fx.Graph,
        node: Node,
        made: dict[Node, Node],
        attributes: dict[str, Tensor | nn.Module],
    ) -> Node:
        states = self._flow.exported.states
        if node in states:
            name, tensor = states[node]
            attributes[_inside(name)] = tensor
            return graph.get_attr(_inside(name))
        if node.op == "get_attr":
            name = str(node.target)
            attributes[_inside(name)] = self._flow.exported.module.get_submodule(name)
            return graph.get_attr(_inside(name))
        call = self._flow.exported.calls.of(node)
        if call is not None:
            path = _inside(call.path)
            attributes[path] = call.module
            return copied_call(graph, call, path, [made[value] for value in eager_inputs(node)])
        return graph.node_copy(node, made.__getitem__)


def _inside(name: str) -> str:
    """Where a graph's module has what the model calls `name`.

    Some names are the module's own (`meta`, `type`), and some are no names in Python (`class`).
    """
    return ".".join(f"of_{part}" for part in name.split("."))


def _order(node: Node) -> tuple[int, ...]:
    return memory_order(node.meta["val"])


def _inverse(order: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(order.index(dimension) for dimension in range(len(order)))


def _permuted(graph: fx.Graph, value: Node, order: tuple[int, ...]) -> Node:
    if order == tuple(range(len(order))):
        return value
    return graph.call_function(torch.ops.aten.permute.default, (value, list(order)))
