"""Cuts, identical blocks, options, and whole programs out of them."""

from __future__ import annotations

import functools
import time
from dataclasses import replace

import pytest

from pipeplan.operator_graph import Operation, OperatorGraph, Phase, Storage, StorageKind
from pipeplan.remat.graph.blocks.block import blocks
from pipeplan.remat.graph.blocks.chain import BlockChain
from pipeplan.remat.graph.blocks.cuts import cuts
from pipeplan.remat.graph.blocks.full import recompute_all
from pipeplan.remat.graph.blocks.options import OptionSet, grid, solve_grid
from pipeplan.remat.graph.blocks.partition import LARGEST_BLOCK, partition, repetition
from pipeplan.remat.graph.brute_force import best_order
from pipeplan.remat.graph.intervals.search import SearchLimits
from pipeplan.remat.graph.ledger import Ledger
from pipeplan.remat.graph.order_program import program
from pipeplan.remat.graph.orders import further, peak_bytes
from pipeplan.remat.programs import judge, keep_all
from pipeplan.testing.joint_graphs import GPT2_LARGE, Gpt, gpt_graph
from pipeplan.testing.random_graphs import random_graph

SMALL = Gpt(3, width=16, heads=2, tokens=8, batch=2, vocabulary=16)


def test_cuts_keep_the_passes_apart() -> None:
    """One value and at most one gradient cross; no backward reads across but them."""
    ledger = Ledger(gpt_graph(SMALL))
    found = cuts(ledger)
    assert len(found) > 6
    for cut in found:
        assert len(cut.values) == 1 >= len(cut.gradients)
        graph = ledger.graph
        early = {s for at in graph.operations[: cut.forward] for s in at.writes}
        late = {s for at in graph.operations[cut.forward : graph.forwards] for s in at.writes}
        for at in range(graph.forwards, len(graph.operations)):
            across = late if at >= cut.backward else early - set(cut.values)
            assert not across.intersection(graph.operations[at].reads)


def test_blocks_are_the_graph() -> None:
    """Each operation is in one block; layers give identical blocks, other sizes do not."""
    ledger = Ledger(gpt_graph(SMALL))
    found = partition(ledger)
    assert sorted(at for block in found for at in block.operations) == list(
        range(len(ledger.graph.operations))
    )
    layers = [block.key for block in found if len(block.operations) > 40]
    assert len(layers) == SMALL.layers
    assert len(set(layers)) == 1
    wider = partition(Ledger(gpt_graph(replace(SMALL, tokens=16))))
    assert layers[0] not in {block.key for block in wider}


def test_a_graph_without_cuts_is_one_block() -> None:
    """Its program is that of the graph."""
    ledger = Ledger(random_graph(3, 4, 3))
    assert len(blocks(ledger, [])) == 1


def _chain_of(length: int) -> OperatorGraph:
    """`length` equal layers of one operation each way."""
    storages = [Storage(name="x", bytes=4, kind=StorageKind.INPUT)]
    storages += [Storage(name="a", bytes=4, kind=StorageKind.ACTIVATION)] * length
    storages += [Storage(name="t", bytes=4, kind=StorageKind.TANGENT)]
    storages += [Storage(name="g", bytes=4, kind=StorageKind.GRADIENT)] * length
    forward, back = Phase.FORWARD, Phase.INPUT_GRADIENT
    operations = [
        Operation(name=f"f{i}", phase=forward, reads=(i,), writes=(i + 1,), time_ns=1)
        for i in range(length)
    ]
    for i in range(length):
        came, read = length + 1 + i, length - 1 - i
        operations.append(
            Operation(name=f"b{i}", phase=back, reads=(came, read), writes=(came + 1,), time_ns=2)
        )
    return OperatorGraph(
        name="chain",
        storages=tuple(storages),
        operations=tuple(operations),
        outputs=(length,),
        input_gradients=(2 * length + 1,),
    )


def test_tiny_layers_are_joined() -> None:
    """200 layers of two operations are a few dozen blocks, nearly all identical, and planned."""
    ledger = Ledger(_chain_of(200))
    found = partition(ledger)
    assert len(found) < 20
    assert len({block.key for block in found}) < 5
    assert sum(len(block.operations) for block in found) == 400
    peak = (peak_bytes(ledger, ledger.first_order()) + ledger.constant) // 2
    order = BlockChain(ledger).order(peak, keep_all=True)
    assert order is not None
    assert not judge(ledger.graph, program(ledger, order), peak).violations


def _masked(length: int) -> OperatorGraph:
    """Layers of which each also reads a mask that the first operation makes, in both passes."""
    plain = _chain_of(length)
    mask = len(plain.storages)
    made = Operation(name="mask", phase=Phase.FORWARD, reads=(0,), writes=(mask,), time_ns=1)
    reading = [each.model_copy(update={"reads": (*each.reads, mask)}) for each in plain.operations]
    kept = Storage(name="mask", bytes=1, kind=StorageKind.ACTIVATION)
    return plain.model_copy(
        update={"storages": (*plain.storages, kept), "operations": (made, *reading)}
    )


def test_what_crosses_all_layers_does_not_join_them() -> None:
    """A mask or an encoder's output is one more storage across each cut; half the peak is kept."""
    ledger = Ledger(_masked(200))
    assert len(cuts(ledger, 1)) == 1
    found = partition(ledger)
    assert max(len(block.operations) for block in found) <= LARGEST_BLOCK
    assert sorted(at for block in found for at in block.operations) == list(range(401))
    peak = ledger.constant + (peak_bytes(ledger, ledger.first_order()) - ledger.constant) // 2
    order = BlockChain(ledger).order(peak, keep_all=True)
    assert order is not None
    assert not judge(ledger.graph, program(ledger, order), peak).violations


@pytest.mark.parametrize(
    ("keys", "expected"),
    [("aababab", (1, 2, 3)), ("abc", (0, 0, 0)), ("xaaay", (1, 1, 3)), ("abcabc", (0, 3, 2))],
)
def test_repetition(keys: str, expected: tuple[int, int, int]) -> None:
    """Begin, period and number of what repeats most."""
    assert repetition(keys) == expected


@pytest.mark.parametrize("seed", range(8))
def test_options_are_the_best_at_their_budgets(seed: int) -> None:
    """Every answer of a grid is that of brute force, whatever was taken from other budgets."""
    options = OptionSet(random_graph(seed, 4, 3))
    solve_grid(options, 3, SearchLimits(60))
    ledger = options.ledger
    assert options.proven
    for peak, saved in grid(options, 3):
        best = best_order(options.slots, peak + ledger.constant, saved)
        found = options.answers[peak, saved].order
        assert (best is None) == (found is None)
        if best is not None and found is not None:
            assert further(ledger, found) == further(ledger, best)


@functools.cache
def chain_of(gpt: Gpt) -> BlockChain:
    """With options of all blocks."""
    chain = BlockChain(Ledger(gpt_graph(gpt)), count=4)
    chain.solve_options(SearchLimits(20), time.monotonic() + 100)
    return chain


@pytest.mark.parametrize("keep_all", [False, True])
@pytest.mark.parametrize("gpt", [SMALL, replace(SMALL, fused=True, vocabulary=0)])
def test_chains_keep_budgets(gpt: Gpt, keep_all: bool) -> None:
    """At shares of the peak: judged, within the peak, saved bytes too where they are limited."""
    chain = chain_of(gpt)
    ledger = chain.ledger
    first = ledger.first_order()
    moving = peak_bytes(ledger, first) - ledger.constant
    peaks = [ledger.constant + moving * share // 10 for share in (10, 8, 6, 5)]
    times = []
    for peak, order in zip(peaks, chain.orders(peaks, keep_all=keep_all), strict=True):
        assert order is not None
        outcome = judge(ledger.graph, program(ledger, order), peak)
        assert not outcome.violations
        times.append(outcome.compute_ns)
    assert times == sorted(times)
    saved = judge(ledger.graph, program(ledger, first)).saved_bytes // 2
    order = chain.order(peaks[0], saved, keep_all)
    assert order is not None
    outcome = judge(ledger.graph, program(ledger, order), peaks[0])
    assert not outcome.violations
    assert outcome.saved_bytes <= saved


def test_options_beat_whole_blocks() -> None:
    """Six layers of GPT2-large at half of the peak: options cost less than half of Rotor."""
    chain = chain_of(replace(GPT2_LARGE, layers=6))
    ledger = chain.ledger
    peak = ledger.constant + (peak_bytes(ledger, ledger.first_order()) - ledger.constant) // 2
    ours, whole = chain.order(peak), chain.order(peak, keep_all=True)
    assert ours is not None
    assert whole is not None
    assert 2 * further(ledger, ours) < further(ledger, whole)


def test_full_recompute() -> None:
    """Every forward but those of the last block runs twice, and the judge allows it."""
    graph = gpt_graph(SMALL)
    outcome = judge(graph, recompute_all(graph))
    assert not outcome.violations
    assert outcome.saved_bytes < judge(graph, keep_all(graph)).saved_bytes
    again = outcome.compute_ns - graph.compute_ns
    forward = sum(each.time_ns for each in graph.operations[: graph.forwards])
    assert 0.5 * forward < again < forward
