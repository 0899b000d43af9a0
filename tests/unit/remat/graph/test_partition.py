"""H-Partition: heads of candidates, convex groups, levels that nest, clusters that are alike."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from random import Random

import networkx as nx
import pytest

from pipeplan.remat.graph.hierarchy.candidates import Score, dominated, windows
from pipeplan.remat.graph.hierarchy.cluster import HCluster, clusters
from pipeplan.remat.graph.hierarchy.data_flow import FlowValue, ForwardFlow, forward_flow
from pipeplan.remat.graph.hierarchy.h_partition import Candidates, Group, Sizes, h_partition, phase
from pipeplan.remat.graph.ledger import Ledger
from pipeplan.testing.joint_graphs import Gpt, gpt_graph
from pipeplan.testing.random_graphs import random_graph

SMALL = Gpt(8, width=16, heads=2, tokens=8, batch=2, vocabulary=16)
SIZES = Sizes(top=4, lower=5, operations=6)


def random_flow(seed: int, count: int = 24) -> ForwardFlow:
    """Values by chance; most nodes read a neighbour's, some one that many read."""
    draw = Random(seed)
    readers: list[set[int]] = [set() for _ in range(count)]
    for node in range(1, count):
        readers[max(0, node - draw.randint(1, 3))].add(node)
        if draw.random() < 0.4:
            readers[draw.choice((0, draw.randrange(node)))].add(node)
    values = tuple(
        FlowValue(draw.randint(1, 9), node, frozenset(each), not each)
        for node, each in enumerate(readers)
    )
    return ForwardFlow((1,) * count, values)


def convex(flow: ForwardFlow, group: frozenset[int]) -> bool:
    """Definition 3.3.1."""
    behind = {each for node in group for each in nx.descendants(flow.graph, node)}
    before = {each for node in group for each in nx.ancestors(flow.graph, node)}
    return behind & before <= group


def heads(flow: ForwardFlow, group: frozenset[int]) -> Iterator[int]:
    """Nodes by which Property 3 holds; -1 is the ancestor of all that is added."""
    graph = flow.graph.copy()
    graph.add_edges_from((-1, node) for node in flow.graph if not flow.graph.in_degree(node))
    for head in graph:
        near = all(
            before in group or before == head
            for node in group - {head}
            for before in graph.predecessors(node)
        )
        if near and group - {head} <= nx.descendants(graph, head):
            yield head


@pytest.mark.parametrize("seed", range(4))
def test_candidates_keep_property_3(seed: int) -> None:
    """Each has a head and is convex (Lemma 3.3.1); so has the union of two that share a node."""
    flow = random_flow(seed)
    found = sorted(dominated(flow, 8), key=sorted)
    assert len(found) > 10
    unions = [a | b for a, b in combinations(found, 2) if a & b]
    for group in {*found, *unions}:
        assert next(heads(flow, group), None) is not None
        assert convex(flow, group)


def test_windows_are_convex() -> None:
    """So are unions of two that share a node, which are windows."""
    flow = random_flow(1)
    found = set(windows(flow, 4))
    assert all(convex(flow, each) for each in found)
    assert {a | b for a, b in combinations(found, 2) if a & b} <= set(windows(flow, 8))


def test_the_score_counts_what_crosses() -> None:
    """(3.1): a value counts once whoever reads it, one that stays inside does not."""
    values = (
        FlowValue(5, None, frozenset({0}), False),
        FlowValue(7, 0, frozenset({1, 2}), False),
        FlowValue(3, 1, frozenset({2}), False),
        FlowValue(2, 2, frozenset(), True),
    )
    score = Score(ForwardFlow((1, 1, 1), values))
    assert score(frozenset({0, 1})) == (5 + 7 + 3) * 2**0.5
    assert score(frozenset({1, 2})) == (7 + 2) * 2**0.5
    assert Score(ForwardFlow((4, 1, 1), values), 1.0)(frozenset({0})) == (5 + 7) * 4


def nodes_at(group: Group) -> Iterator[Group]:
    """A group and all inside."""
    yield group
    for node in group.nodes:
        if isinstance(node, Group):
            yield from nodes_at(node)


@pytest.mark.parametrize("candidates", [dominated, windows])
@pytest.mark.parametrize("seed", range(4))
def test_levels_are_partitions_of_convex_groups(seed: int, candidates: Candidates) -> None:
    """Each operation once, in an order in which they run; sizes are kept; quotients have no cycle.

    Groups of groups nest: what a level puts together no lower one has apart.
    """
    flow = random_flow(seed, 60)
    top = h_partition(flow, SIZES, candidates)
    place = {at: index for index, at in enumerate(top.operations)}
    assert sorted(place) == list(range(60))
    assert all(place[a] < place[b] for a, b in flow.edges)
    assert len(top.nodes) <= SIZES.top
    for group in nodes_at(top):
        operations = group.operations
        assert convex(flow, frozenset(operations))
        first = place[operations[0]]
        assert operations == top.operations[first : first + len(operations)]
        if group is not top:
            alone = len(operations) <= SIZES.operations
            assert len(group.nodes) <= (SIZES.operations if alone else SIZES.lower)
        parts = [frozenset(node.operations) for node in group.nodes if isinstance(node, Group)]
        assert nx.is_directed_acyclic_graph(flow.contracted(parts)[0].graph)


def test_a_group_that_is_not_convex_is_refused() -> None:
    """Its quotient has a cycle."""
    values = tuple(FlowValue(1, node, frozenset({node + 1}), False) for node in range(2))
    with pytest.raises(nx.NetworkXUnfeasible):
        ForwardFlow((1, 1, 1), values).contracted([frozenset({0, 2})])


def test_windows_go_on_where_heads_end() -> None:
    """Ten values that all nodes behind them read: none has a close dominator."""
    count = 30
    values = [FlowValue(1, at, frozenset(range(10, count)), False) for at in range(10)]
    values += [FlowValue(1, at, frozenset({at + 1}), False) for at in range(10, count - 1)]
    flow = ForwardFlow((1,) * count, tuple(values))
    assert phase(flow, SIZES, dominated(flow, SIZES.lower)) == []
    assert len(h_partition(flow, SIZES, dominated).nodes) <= SIZES.top


def walked(ledger: Ledger, top: Group) -> list[HCluster]:
    """All clusters of all levels."""
    return [inner for cluster in clusters(ledger, top) for inner in cluster.walk()]


@pytest.mark.parametrize("candidates", [dominated, windows])
def test_layers_are_clusters_that_are_alike(candidates: Candidates) -> None:
    """Of 8 equal layers, nearly all clusters of a size have one key (section 3.3.5)."""
    ledger = Ledger(gpt_graph(SMALL))
    top = h_partition(forward_flow(ledger), Sizes(top=12, lower=24), candidates)
    found = [each for each in walked(ledger, top) if each.block.graph.forwards > 10]
    assert len(found) >= 8
    assert len({each.key for each in found}) <= 3


@pytest.mark.parametrize("seed", range(4))
def test_backwards_go_with_their_forwards(seed: int) -> None:
    """Clusters hold each operation once, and backwards depend on those of later clusters alone
    (Property 1).
    """
    ledger = Ledger(random_graph(seed, 9, 9))
    top = h_partition(forward_flow(ledger), SIZES)
    found = clusters(ledger, top)
    operations = [at for each in found for at in each.block.operations]
    assert sorted(operations) == list(range(18))
    of = {at: index for index, each in enumerate(found) for at in each.block.operations}
    maker = {s: at for at in range(18) for s in ledger.writes[at]}
    for at in range(18):
        for storage in ledger.reads[at]:
            before = maker.get(storage)
            if before is None or (before < 9) != (at < 9):
                continue
            assert of[before] <= of[at] if at < 9 else of[before] >= of[at]
