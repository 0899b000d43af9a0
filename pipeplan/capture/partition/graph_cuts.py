"""Where a graph may be cut into layers, and where it is cut.

A cut lies between two consecutive steps; the tensors made before it and used behind it are what a
boundary there carries. Skips and encoder outputs are among them: they ride along.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor, nn

from pipeplan.capture.graph.data_flow import DataFlow, ModuleCall, Node
from pipeplan.capture.graph.operations import node_storages, node_tensors
from pipeplan.capture.partition.cut_selection import select_cuts
from pipeplan.layout import is_dense
from pipeplan.livebytes import key

SMALL_SHARE = 1 / 4
SMALL_COUNT = 12
"""Share of the work and number of heavy steps up to which a module may be one layer although it
could be cut: a block, not a stack of blocks."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Between steps `after - 1` and `after`."""

    after: int
    values: tuple[Node, ...]
    """What passes, in the order in which it is made."""
    size: int
    """Its bytes."""
    depth: int
    """Modules that both neighbouring steps run in."""


def layer_cuts(flow: DataFlow) -> list[Cut]:
    """The cuts that make layers: modules and parts of modules, no finer than is of use.

    1. Between two heavy steps one cut at most is kept: the one with the fewest bytes, then with
       the fewest tensors, then at the outermost module boundary, then the last one. So what is
       cheap joins a neighbour.
    2. A cut inside a module with little of the work goes where the nearest cuts outside of it are
       cheaper: the module is one layer.
    """
    best: list[Cut] = []
    heavy = [index for index, step in enumerate(flow.steps) if step in flow.heavy]
    cuts = {cut.after: cut for cut in possible_cuts(flow)}
    for one, two in pairwise(heavy):
        between = [cuts[after] for after in range(one + 1, two + 1) if after in cuts]
        if between:
            best.append(min(between, key=_price))
    total = sum(map(flow.work, flow.steps))
    return [cut for cut in best if not _is_dominated(flow, cut, best, total)]


def coarsened_cuts(flow: DataFlow, cuts: Sequence[Cut], layers: int) -> list[Cut]:
    """At most `layers - 1` of `cuts`."""
    edges = [0, *(cut.after for cut in cuts), len(flow.steps)]
    work = [sum(map(flow.work, flow.steps[begin:end])) for begin, end in pairwise(edges)]
    return [cuts[index] for index in select_cuts(work, [cut.size for cut in cuts], layers)]


def possible_cuts(flow: DataFlow) -> list[Cut]:
    """All cuts that can be made.

    What passes must be tensors without holes, each in a storage of its own, none of which is
    written into behind the cut; a buffer that is written stays in one layer.
    """
    last_use = _last_uses(flow)
    barred = _barred(flow)
    paths = [flow.module_path(step) for step in flow.steps]
    alive: list[Node] = []
    found = []
    for after in range(1, len(flow.steps)):
        made = flow.steps[after - 1]
        alive = [node for node in [*alive, made] if last_use.get(node, -1) >= after]
        if after not in barred and _can_pass(alive):
            size = sum(tensor.nbytes for node in alive for tensor in node_tensors(node))
            depth = _common(paths[after - 1], paths[after])
            found.append(Cut(after, tuple(alive), size, depth))
    return found


def _price(cut: Cut) -> tuple[int, int, int, int]:
    return cut.size, len(cut.values), cut.depth, -cut.after


def _last_uses(flow: DataFlow) -> dict[Node, int]:
    """Per step the index of the last step that uses it; outputs are used behind all steps."""
    found: dict[Node, int] = {}
    for index, step in enumerate(flow.steps):
        for source in step.all_input_nodes:
            if source in flow.index:
                found[source] = index
    return found | dict.fromkeys(flow.exported.outputs, len(flow.steps))


def _can_pass(values: Sequence[Node]) -> bool:
    """Whether there are tensors to pass, dense ones, and no two in one storage."""
    found = [node.meta.get("val") for node in values]
    passing = [value for value in found if isinstance(value, Tensor) and is_dense(value)]
    distinct = {key(value) for value in passing}
    return len(distinct) == len(values) > 0


def _barred(flow: DataFlow) -> set[int]:
    """Cuts that part a storage from a later write into it."""
    barred: set[int] = set()
    states = flow.exported.states
    first: dict[int, int] = {}
    for index, step in enumerate(flow.steps):
        for storage in node_storages(step):
            first.setdefault(storage, index)
    shared = _tied_storages(flow)
    held = {s for node in states for s in node_storages(node)}
    for index, step in enumerate(flow.steps):
        for source in step.all_input_nodes:
            for storage in node_storages(source):
                if storage in held and storage in flow.writers and storage not in shared:
                    begin = first.setdefault(storage, index)
                    barred.update(range(begin + 1, index + 1))
    for storage, writers in flow.writers.items():
        for writer in writers:
            if storage not in held and writer in flow.index and storage in first:
                barred.update(range(first[storage] + 1, flow.index[writer] + 1))
    return barred


def _tied_storages(flow: DataFlow) -> set[int]:
    """Storages of buffers whose module has parameters: these keep its layers on one GPU."""
    states = flow.exported.states
    owners = {
        name.rpartition(".")[0] for name, t in states.values() if isinstance(t, nn.Parameter)
    }
    return {
        storage
        for node, (name, _) in states.items()
        if name.rpartition(".")[0] in owners
        for storage in node_storages(node)
    }


def _is_dominated(flow: DataFlow, cut: Cut, cuts: Sequence[Cut], total: int) -> bool:
    """Whether the module that the cut is in is small, and its ends are cheaper to cut.

    Neither end may carry more bytes or, of equally many, more tensors; one must carry less. The
    module is the innermost one around the cut that is no mere sequence of others.
    """
    path = flow.module_path(flow.steps[cut.after])[: cut.depth]
    while path and path[-1].is_sequence:
        path = path[:-1]
    if len(path) < 2:
        return False
    begin = end = cut.after
    while begin and flow.module_path(flow.steps[begin - 1])[: len(path)] == path:
        begin -= 1
    while end < len(flow.steps) and flow.module_path(flow.steps[end])[: len(path)] == path:
        end += 1
    ends = [c for c in cuts if c.after <= begin][-1:] + [c for c in cuts if c.after >= end][:1]
    inside = flow.steps[begin:end]
    if len(ends) < 2 or len(flow.heavy.intersection(inside)) > SMALL_COUNT:
        return False
    if sum(map(flow.work, inside)) > SMALL_SHARE * total:
        return False
    prices = [_price(c)[:2] for c in ends]
    own = _price(cut)[:2]
    return max(prices) <= own and min(prices) < own


def _common(one: Sequence[ModuleCall], two: Sequence[ModuleCall]) -> int:
    """How many leading entries are equal."""
    count = 0
    for a, b in zip(one, two, strict=False):
        if a != b:
            break
        count += 1
    return count
