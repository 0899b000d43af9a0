"""What one node of an exported graph does: what it draws, what it writes, what it costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from pipeplan.layout import has_size
from pipeplan.livebytes import storages


@dataclass(frozen=True, slots=True)
class Effects:
    """What an operation does beyond returning a value."""

    random: bool
    """Whether it advances the random generator."""
    writes: frozenset[int]
    """Storages it changes."""


def node_tensors(node: fx.Node) -> list[Tensor]:
    """The tensors that `node` returns, as fake ones with shape and storage."""
    return [leaf for leaf in tree_leaves(node.meta.get("val")) if isinstance(leaf, Tensor)]


def node_storages(node: fx.Node) -> set[int]:
    """The storages behind what `node` returns; a view has its base's."""
    return storages(node_tensors(node))


def node_region(node: fx.Node) -> fx.GraphModule | None:
    """The graph inside a node that runs one (under no_grad or autocast), else None."""
    for source in node.all_input_nodes:
        if source.op == "get_attr":
            owner = source.graph.owning_module
            found = owner.get_submodule(str(source.target)) if owner is not None else None
            if isinstance(found, fx.GraphModule):
                return found
    return None


def node_effects(node: fx.Node, buffers: set[fx.Node]) -> Effects:
    """What `node` draws and writes, by the schemas of its operations.

    Batch norm changes the buffers it is given without saying so. A region inside writes what its
    operations write of what is passed into it; what it makes itself is nobody else's.

    Args:
        node: calls an operation or a region.
        buffers: placeholders of the model's buffers.
    """
    inner = node_region(node)
    if inner is not None:
        return _region_effects(node, inner, buffers)
    if not isinstance(node.target, OpOverload):
        return Effects(False, frozenset())
    written: set[int] = set()
    is_silent = _is_silent(node)
    for argument, value in _arguments(node):
        is_write = argument.alias_info is not None and argument.alias_info.is_write
        for source in tree_leaves(value):
            if isinstance(source, fx.Node) and (is_write or (is_silent and source in buffers)):
                written |= node_storages(source)
    return Effects(torch.Tag.nondeterministic_seeded in node.target.tags, frozenset(written))


def node_flops(node: fx.Node) -> int:
    """Floating-point operations of `node`'s forward, as torch counts them; nothing is computed.

    0 where they depend on values.
    """
    inner = node_region(node)
    if inner is not None:
        return sum(map(node_flops, _calls(inner)))
    target = node.target
    if not isinstance(target, OpOverload) or target.is_view or _CHEAP & set(target.tags):
        return 0
    if returns_argument(node):  # torch counts none of those that change their first argument
        return 0
    values = node_tensors(node)
    if not values or not hasattr(values[0], "fake_mode"):
        return 0
    if not all(
        has_size(one) for part in (node, *node.all_input_nodes) for one in node_tensors(part)
    ):
        return 0
    arguments, named = fx.node.map_arg((node.args, node.kwargs), lambda one: one.meta["val"])
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), values[0].fake_mode, counter:
        target(*arguments, **named)
    return counter.get_total_flops()


_CHEAP = {torch.Tag.pointwise, torch.Tag.reduction}


def returns_argument(node: fx.Node) -> bool:
    """Whether `node` writes into its first argument and returns it."""
    if not isinstance(node.target, OpOverload):
        return False
    schema = node.target._schema  # noqa: SLF001
    first = schema.arguments[0].alias_info if schema.arguments else None
    given = schema.returns[0].alias_info if len(schema.returns) == 1 else None
    return bool(first and given and first.is_write and given.is_write)


def is_pointwise(node: fx.Node) -> bool:
    """Whether `node` works element by element."""
    tags: Any = getattr(node.target, "tags", ())
    return torch.Tag.pointwise in tags


def _region_effects(node: fx.Node, inner: fx.GraphModule, buffers: set[fx.Node]) -> Effects:
    """What the operations of `inner` do to what `node` passes into it.

    Tensors inside and outside are the same fake ones, so storages are, too.
    """
    places = inner.graph.find_nodes(op="placeholder")
    passed = [each for each in node.args if isinstance(each, fx.Node) and each.op != "get_attr"]
    pairs = zip(places, passed, strict=True)
    own = {place for place, source in pairs if source in buffers}
    parts = [node_effects(part, own) for part in _calls(inner)]
    touched = {storage for source in passed for storage in node_storages(source)}
    written = {storage for part in parts for storage in part.writes}
    return Effects(any(part.random for part in parts), frozenset(touched & written))


def _calls(graph: fx.GraphModule) -> list[fx.Node]:
    return [node for node in graph.graph.nodes if node.op == "call_function"]


def _is_silent(node: fx.Node) -> bool:
    """Whether it is a composite operation, which may change its arguments without saying so.

    A norm that is told to use the statistics it has changes none.
    """
    tags: Any = getattr(node.target, "tags", ())
    if torch.Tag.maybe_aliasing_or_mutating not in tags:
        return False
    return not any(
        argument.name in ("training", "use_input_stats") and value is False
        for argument, value in _arguments(node)
    )


def _arguments(node: fx.Node) -> Iterator[tuple[torch.Argument, Any]]:
    """Each argument of the schema, and what is passed for it; None for its default."""
    assert isinstance(node.target, OpOverload)
    schema = node.target._schema  # noqa: SLF001
    for index, argument in enumerate(schema.arguments):
        value = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
        yield argument, value
