"""Changes of a joint graph that keep every bit, and let storages go earlier."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

_aten = torch.ops.aten
_FILLED: dict[Any, int] = {
    _aten.zeros_like.default: 0,
    _aten.ones_like.default: 1,
    _aten.new_zeros.default: 0,
    _aten.new_ones.default: 1,
}
"""Operators that ask their first argument for its shape and type alone, and what they fill in."""
_VALUES: dict[Any, int] = {_aten.full_like.default: 1, _aten.new_full.default: 2}
"""The same; where the value is that they fill in."""


def simplify(module: GraphModule) -> None:
    """Rewrites `module` in place.

    Constants are made from shapes instead of from a tensor that has them, so that they do not keep
    it alive. The backward of a batch norm in training does not read running statistics. A
    recurrent layer keeps what its backward reads, as it does where autograd calls it. What nobody
    needs is left out, but for random operators: they move the stream of random numbers.
    """
    graph = module.graph
    for node in list(graph.nodes):
        if node.op == "call_function":
            _from_shape(node)
            _without_statistics(node)
            _for_training(node)
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and not is_random(node):
            graph.erase_node(node)


def is_random(node: Node) -> bool:
    """Whether `node` draws random numbers."""
    tags = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags


def _from_shape(node: Node) -> None:
    made = node.meta.get("val")
    if not isinstance(made, Tensor) or not made.is_contiguous():
        return
    value: Any = _FILLED.get(node.target)
    if node.target in _VALUES:
        value = node.args[_VALUES[node.target]]
    if value is None or isinstance(value, Node):
        return
    node.target = _aten.full.default
    node.args = (list(made.shape), value)
    node.kwargs = {"dtype": made.dtype, "device": made.device}


def _without_statistics(node: Node) -> None:
    if node.target is _aten.native_batch_norm_backward.default and node.args[7] is True:
        node.args = (*node.args[:3], None, None, *node.args[5:])


def _for_training(node: Node) -> None:
    """The tracer sees the layer below autograd, where it takes it for one that is not trained."""
    place = _TRAINED.get(node.target)
    if place is not None:
        node.args = (*node.args[:place], True, *node.args[place + 1 :])


_TRAINED: dict[Any, int] = {
    _aten.mkldnn_rnn_layer.default: 15,
    _aten.mkldnn_rnn_layer_backward.default: 18,
}
"""Which argument says that the layer is trained."""
