"""PipeDream's `graph.txt` profiles: one line per node, one per edge, in any order.

Narayanan et al., PipeDream (SOSP 2019). Times are milliseconds, sizes bytes, of one micro-batch.
"""

from __future__ import annotations

import re
from fractions import Fraction

import networkx as nx

from pipeplan.chain import Chain
from pipeplan.errors import InputError
from pipeplan.importers.linearize import (
    Graph,
    ImportedOperation,
    groups,
    operation,
    storages,
    without_dead_ends,
)
from pipeplan.units import MAX_INT, shown

_NUMBER = r"[0-9]{1,20}(?:\.[0-9]{1,20})?(?:[eE][+-]?[0-9]{1,2})?"
_SIZES = rf"{_NUMBER}|\[{_NUMBER}(?:; {_NUMBER})*\]"
_NODE = re.compile(
    r"(?P<name>\S+) -- (?P<text>.*) -- "
    rf"forward_compute_time=(?P<forward>{_NUMBER}), backward_compute_time=(?P<backward>{_NUMBER}),"
    rf" activation_size=(?P<output>{_SIZES}), parameter_size=(?P<weight>{_NUMBER})"
    r"(?: -- stage_id=-?[0-9]+)?"
)
_EDGE = re.compile(r"\s+(\S+) -- (\S+)\s*")
_TEXT_LENGTH = 48


def pipedream(text: str, *, name: str, microbatch_size: int = 1, where: str = "profile") -> Chain:
    """The chain of a PipeDream profile, linearized at the operations every path passes.

    The profile does not say what autograd keeps. Assumed (docs/reference/formats.md): every
    operation keeps its input, in place operations and views share storage, so a layer keeps its
    input and each distinct storage inside it; its output is kept by the next layer, as its input.

    Args:
        text: the profile.
        name: of the chain.
        microbatch_size: that the profile was taken with.
        where: names the profile in errors, such as its path.

    Raises:
        InputError: if the text is no such profile, or its graph has a cycle.
    """
    graph = without_dead_ends(read_graph(text, where))
    inputs = [op for _, op in graph.nodes(data="operation") if op.is_input]
    if not inputs:
        raise InputError(f"{where}: got no node called Input, need one: the model's input")
    data = {
        "name": name,
        "source": "PipeDream profile",
        "mode": "imported",
        "microbatch_size": microbatch_size,
        "input_bytes": sum(op.output_bytes for op in inputs),
    }
    boundary, layers = data["input_bytes"], []
    for index, group in enumerate(groups(graph, where)):
        layers.append(_layer(graph, group, index, boundary))
        boundary = layers[-1]["output_bytes"]
    return Chain.from_data(data | {"layers": layers}, where)


def _layer(graph: Graph, group: list[str], index: int, input_bytes: object) -> dict[str, object]:
    """The chain's layer of one group; a boundary is what leaves the group or the model."""
    ops = [operation(graph, name) for name in group]
    inside = set(group)
    leaving = [name for name in group if not inside.issuperset(graph.successors(name))]
    ends = leaving or [name for name in group if not graph.out_degree(name)]
    owner = storages(graph, group)
    kept = (set(owner.values()) & inside) - {owner[name] for name in ends}
    weights = sum(op.weight_bytes for op in ops)
    return {
        "name": _name(ops, index),
        "forward_ns": sum(op.forward_ns for op in ops),
        "backward_ns": sum(op.backward_ns for op in ops),
        "weight_bytes": weights,
        "gradient_bytes": weights,
        "output_bytes": sum(operation(graph, name).output_bytes for name in ends),
        "saved_input_bytes": input_bytes,
        "saved_bytes": sum(operation(graph, name).output_bytes for name in kept),
    }


def _name(ops: list[ImportedOperation], index: int) -> str:
    real = [op for op in ops if not op.is_bookkeeping] or ops
    last = f"..{real[-1].name}" if len(real) > 1 else ""
    return f"{index}:{real[0].name}{last} {real[0].text[:_TEXT_LENGTH]}"


def read_graph(text: str, where: str) -> Graph:
    """The operations of a profile and who reads whose output.

    Raises:
        InputError: if the text is no such profile.
    """
    graph: Graph = nx.DiGraph()
    edges: list[tuple[int, str, str]] = []
    for number, line in enumerate(text.split("\n"), start=1):
        place = f"{where}: line {number}"
        if not line.strip():
            continue
        if node := _NODE.fullmatch(line.strip()):
            if node["name"] in graph:
                raise InputError(f"{place}: got node {shown(node['name'])} again, need it once")
            graph.add_node(node["name"], operation=_operation(node, place))
        elif edge := _EDGE.fullmatch(line):
            edges.append((number, edge[1], edge[2]))
        else:
            raise InputError(
                f"{place}: got {shown(line)}, need a node"
                " 'name -- text -- forward_compute_time=.., backward_compute_time=..,"
                " activation_size=.., parameter_size=..' or an indented edge 'name -- name'"
            )
    for number, *ends in edges:
        for end in ends:
            if end not in graph:
                raise InputError(
                    f"{where}: line {number}: got an edge of {shown(end)}, need a node of the file"
                )
        graph.add_edge(*ends)
    return graph


def _operation(node: re.Match[str], where: str) -> ImportedOperation:
    return ImportedOperation(
        name=node["name"],
        text=node["text"],
        forward_ns=_whole(node["forward"], 10**6, where),
        backward_ns=_whole(node["backward"], 10**6, where),
        output_bytes=sum(
            _whole(size, 1, where) for size in node["output"].strip("[]").split("; ")
        ),
        weight_bytes=_whole(node["weight"], 1, where),
    )


def _whole(number: str, scale: int, where: str) -> int:
    """`number * scale`, exactly, rounded up to an integer: never less than what was measured."""
    value = -int(-Fraction(number) * scale // 1)
    if value > MAX_INT:
        raise InputError(f"{where}: got {number}, need at most {MAX_INT // scale}")
    return value
