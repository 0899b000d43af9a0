"""Data flow of a graph: which operations run once, which are repeated where they are needed.

Steps are the operations with consequences: they depend on weights or on random numbers, change
something, or are expensive. Each belongs to exactly one layer. All others (masks, positions,
rotary tables, views of weights, casts of the input) are free: every layer that needs one computes
it again from constants, weights and the model's inputs, so that it is never sent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import networkx as nx
from torch import fx, nn

from pipeplan.capture.eager_modules.eager_operation import is_eager
from pipeplan.capture.graph.export import ExportedModel
from pipeplan.capture.graph.operations import (
    is_pointwise,
    node_effects,
    node_flops,
    node_storages,
    node_tensors,
)
from pipeplan.errors import InputError
from pipeplan.layout import has_size

Node: TypeAlias = fx.Node

_ROOT = "root"
"""Node of the graph behind which everything bound lies."""


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """One call of a module."""

    key: str
    """Distinct for each call."""
    path: str
    """The module's name in the model."""
    is_sequence: bool
    """Whether the module only calls others in a row."""


_SEQUENCES = {"torch.nn.modules.container.Sequential"}


class DataFlow:
    """The data flow of an exported model."""

    def __init__(self, exported: ExportedModel) -> None:
        """Sorts the operations of `exported` into steps and free ones.

        Raises:
            InputError: if the model writes into its input.
        """
        self.exported = exported
        nodes = list(exported.module.graph.nodes)
        self.position = {node: index for index, node in enumerate(nodes)}
        """Place of each node in the program."""
        self.graph = nx.DiGraph()
        self.graph.add_nodes_from(nodes)
        self.graph.add_edges_from((s, node) for node in nodes for s in node.all_input_nodes)
        calls = [node for node in nodes if node.op == "call_function"]
        buffers = {n for n, (_, t) in exported.states.items() if not isinstance(t, nn.Parameter)}
        self._effects = {node: node_effects(node, buffers) for node in calls}
        self._flops = {node: 0 if is_eager(node) else node_flops(node) for node in calls}
        self.writers = self._writers()
        bound = self._bound(calls)
        self.steps = tuple(node for node in calls if node in bound and self._matters(node))
        """In the order of the program."""
        self.index = {node: index for index, node in enumerate(self.steps)}
        self._refuse_written_inputs()

    def rebuilt(self, node: Node, before: int) -> set[Node]:
        """The free nodes that make the free `node` as it is before program place `before`.

        With a storage come all operations that write into it up to there.
        """
        found: set[Node] = set()
        waiting = [node]
        while waiting:
            one = waiting.pop()
            if one in found or one in self.index:
                continue
            found.add(one)
            waiting.extend(one.all_input_nodes)
            waiting.extend(self._written_before(one, before))
        return found

    def needs(self, step: Node) -> set[Node]:
        """All free nodes that `step` needs: placeholders and what is computed from them."""
        place = self.position[step]
        free = [source for source in step.all_input_nodes if source not in self.index]
        return set().union(*(self.rebuilt(source, place) for source in free))

    def between(self, known: set[Node], wanted: Sequence[Node]) -> set[Node]:
        """All nodes that lead from `known` to `wanted`, with what writes into what they make.

        What is written into buffers is left out, but for what is read there afterwards.
        """
        found: set[Node] = set()
        waiting = list(wanted)
        while waiting:
            node = waiting.pop()
            if node in found or node in known:
                continue
            found.add(node)
            waiting.extend(node.all_input_nodes)
            if node in self._effects:
                waiting.extend(w for s in node_storages(node) for w in self.writers.get(s, ()))
            for source in node.all_input_nodes:
                if source in self.exported.states:
                    waiting.extend(self._written_before(source, self.position[node]))
        return found

    def places(self) -> dict[Node, Hashable]:
        """What identifies each operation: the call of a module, the kind, how many before it."""
        counts: Counter[Hashable] = Counter()
        found: dict[Node, Hashable] = {}
        for node in self._effects:
            place = (tuple(call.key for call in self.module_path(node)), node.target)
            found[node] = (*place, counts[place])
            counts[place] += 1
        return found

    def module_path(self, step: Node) -> tuple[ModuleCall, ...]:
        """The calls of modules that the step runs in, outermost first."""
        stack = step.meta.get("nn_module_stack") or {}
        path = tuple(
            ModuleCall(key, path, kind in _SEQUENCES) for key, (path, kind) in stack.items()
        )
        eager = self.exported.calls.of(step)
        return path if eager is None else (*path, ModuleCall(eager.path, eager.path, False))

    @cached_property
    def heavy(self) -> frozenset[Node]:
        """Steps that a layer is made for: matrix products, convolutions, look-ups in tables."""
        fed = nx.DiGraph(self.graph)
        fed.add_edges_from((_ROOT, node) for node in self.exported.inputs)
        follows = nx.descendants(fed, _ROOT)
        return frozenset(
            step
            for step in self.steps
            if self._flops[step] or is_eager(step) or (step in follows and self._looks_up(step))
        )

    def _looks_up(self, step: Node) -> bool:
        """Whether it reads a table of weights in another way than element by element."""
        if is_pointwise(step):
            return False
        states, copies = self.exported.states, self.exported.copies
        sources = (copies.get(source, source) for source in step.all_input_nodes)
        read = (states[source][1] for source in sources if source in states)
        return any(isinstance(tensor, nn.Parameter) and tensor.dim() > 1 for tensor in read)

    def work(self, step: Node) -> int:
        """Floating-point operations of a step, and one per element that it makes."""
        eager = self.exported.calls.of(step)
        flops = eager.work if eager else self._flops[step]
        return flops + sum(t.numel() for t in node_tensors(step) if has_size(t))

    def _matters(self, node: Node) -> bool:
        effect = self._effects[node]
        return bool(node.users) or effect.random or bool(effect.writes) or is_eager(node)

    def _written_before(self, node: Node, place: int) -> Iterator[Node]:
        """What writes into the storages of `node` before a place in the program."""
        for storage in node_storages(node):
            yield from (w for w in self.writers.get(storage, ()) if self.position[w] < place)

    def _writers(self) -> dict[int, list[Node]]:
        """Per changed storage, the operations that change it."""
        found: dict[int, list[Node]] = {}
        for node, effect in self._effects.items():
            for storage in effect.writes:
                found.setdefault(storage, []).append(node)
        return found

    def _bound(self, calls: list[Node]) -> set[Node]:
        """All nodes that are not free.

        Views of weights are free although they depend on a weight, but for weights that pass from
        layer to layer. A storage into which something bound writes is bound itself.
        """
        states = self.exported.states
        weights = {node for node, (_, t) in states.items() if isinstance(t, nn.Parameter)}
        stay = weights - {*self.exported.copies.values()}
        own = {s for node in stay for s in node_storages(node)} - self.writers.keys()
        views = {node for node in calls if node_tensors(node) and node_storages(node) <= own}
        seeds = weights | {node for node in states if node_storages(node) & self.writers.keys()}
        seeds |= {
            node
            for node in calls
            if self._effects[node].random or self._flops[node] or is_eager(node)
        }
        reach = nx.DiGraph(self.graph)
        reach.remove_nodes_from(views)
        seeds |= {user for view in views for user in self.graph.successors(view)}
        bound: set[Node] = set()
        while not seeds - views <= bound:
            reach.add_edges_from((_ROOT, seed) for seed in seeds - views)
            bound = nx.descendants(reach, _ROOT)
            dirty = {s for n in bound & self._effects.keys() for s in self._effects[n].writes}
            seeds = bound | {node for node in calls if dirty & node_storages(node)}
        return bound

    def _refuse_written_inputs(self) -> None:
        inputs = {s for node in self.exported.inputs for s in node_storages(node)}
        for storage in inputs & self.writers.keys():
            node = self.writers[storage][0]
            raise InputError(
                f"task: model: {_where(node)}: {node.target} writes into the model's input, need"
                " an input that stays as it is, since other stages read it too. Use the operation"
                " that returns a new tensor, or clone the input first."
            )


def _where(node: Node) -> str:
    """The module in which a node runs."""
    stack = node.meta.get("nn_module_stack") or {}
    path = next(reversed(list(stack.values())), ("", ""))[0]
    return f"module {path!r}" if path else "forward"
