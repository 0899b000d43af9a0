"""Stages some of whose layers run again: machine code says what contracted chains say."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest

from pipeplan.cluster import Host
from pipeplan.ilp.compiled import with_attributes
from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.local_search.allocation import Allocation
from pipeplan.ilp.local_search.allocation_judge import judge
from pipeplan.ilp.local_search.allocation_moves import CHANGE
from pipeplan.ilp.local_search.allocation_stages import first_layers
from pipeplan.ilp.local_search.allocation_walk import AllocationWalk, allocation_of, arrays_of
from pipeplan.ilp.local_search.annealing import memory_overflow
from pipeplan.ilp.local_search.chain_arrays import chain_arrays
from pipeplan.ilp.local_search.layer_ways import (
    ENDS,
    INSIDE,
    KEPT,
    OPTION,
    OPTIONS,
    RUN,
    offloadable,
    stage_bytes,
    stage_ns,
    unsaved_output,
    way_arrays,
)
from pipeplan.ilp.local_search.list_scheduler import ModuloListScheduler, overload
from pipeplan.ilp.local_search.run_moves import change_runs
from pipeplan.ilp.modulo_scheduling import STAGE
from pipeplan.ilp.offload.relief_estimate import estimate_relief, link_of, offloadable_segments
from pipeplan.ilp.recompute.contraction_cache import ContractionCache, clip_to_stages
from pipeplan.ilp.runs import Run
from tests.unit.ilp.test_allocation_walk import NOWHERE, some_layout, some_runs
from tests.unit.ilp.test_recompute_search import random_costs

LAYERS = 9
HOST = Host(memory_bytes=10**9, bandwidth_bytes_per_s=3 * 10**9)


def some_costs(seed: int, memory: int = 150) -> CostModel:
    """A random chain, now and then short, whose layers have up to two options."""
    random = Random(seed)
    machines = {
        "host": random.choice((None, HOST, HOST)),
        "duplex": random.choice(("full", "half")),
        "memory": memory,
    }
    layers = random.choice((1, 2, LAYERS, LAYERS, LAYERS))
    costs = random_costs(seed, layers, options=seed % 3, **machines)
    semantics, model = random.choice(("2bw", "flush")), random.choice(("exact", "exact", "paper"))
    return replace(costs, semantics=semantics, memory_model=model)


def with_runs(costs: CostModel, seed: int) -> Allocation:
    """Any allocation, and any runs and options that the layers have."""
    random, layers = Random(seed), costs.chain.layers
    runs = (
        run
        for run in some_runs(random, costs.layers)
        if run.option is None or run.option < len(layers[run.first].options)
    )
    return replace(some_layout(random, costs.layers), recompute=tuple(runs))


def contracted(
    costs: CostModel, layout: Allocation
) -> tuple[CostModel, list[tuple[int, int, int]]]:
    """The chain in which runs are layers, and the allocation's stages in these."""
    runs = clip_to_stages(layout.recompute, layout.segments())
    chain, mine = ContractionCache(costs).of(runs)
    return mine, chain.renumbered(layout.runs)


def test_stages_are_those_of_contracted_chains() -> None:
    """Bytes, times, what is sent and what may leave, behind a stage elsewhere or here."""
    stages = 0
    for seed in range(80):
        costs = some_costs(seed)
        layout = with_runs(costs, seed)
        mine, placed = contracted(costs, layout)
        chain, known = chain_arrays(costs), way_arrays(costs)
        *_, ways = arrays_of(layout, recompute=True)
        for (first, last, gpu), (begin, end, _) in zip(placed, layout.runs, strict=True):
            for beside in (False, True)[: 1 + (first > 0)]:
                size = mine.segment(first, last, covered=beside)
                found = stage_bytes(chain, known, ways, begin, end + 1, beside)
                assert found == (size.saved, size.running, size.backward)
                most = offloadable_segments(mine, first, last, covered=beside)
                assert offloadable(known, ways, begin, end + 1, beside) == most
            times = mine.forward_ns(first, last, gpu), mine.backward_ns(first, last, gpu)
            assert stage_ns(chain, known, ways, begin, end + 1, gpu) == times
            unsaved = mine.unsaved_bytes(last, backward=False)
            assert unsaved_output(known, ways[end], end) == unsaved
            stages += 1
    assert stages > 200


@pytest.mark.parametrize("offload", [False, True])
def test_judgement_is_that_of_the_contracted_chain(offload: bool) -> None:
    """Load, room and bytes, less what may be offloaded, of random allocations with runs."""
    kinds = [0] * 4
    for seed in range(80):
        costs = some_costs(seed, 100)
        layout = with_runs(costs, seed)
        mine, placed = contracted(costs, layout)
        copies = len(layout.turns)
        load = costs.load_ns(0, costs.layers - 1, 0)
        period = max(1, load * copies * (2 + seed % 3) // 3)
        stages, host = with_attributes(np.zeros(costs.layers, STAGE)), NOWHERE
        if offload and costs.exact and costs.cluster.host:
            host = link_of(HOST)
        layout_arrays = arrays_of(layout, recompute=True)
        known = chain_arrays(costs), way_arrays(costs), host
        found, _ = judge(*known, stages, layout_arrays, period)
        expected = overload(mine, placed, period, copies)
        kind = 3
        if expected > 0:
            expected += 2
        else:
            centres = [int(turn * period) for turn in layout.turns]
            placing = ModuloListScheduler(
                mine, placed, period, centres, layout.waits_by_stage(period)
            )
            if placing.place():
                peaks = placing.peaks()
                if len(host):
                    over = [peak - room for peak, room in zip(peaks, costs.budgets, strict=True)]
                    away = estimate_relief(mine, placed, placing.times, period, over)
                    peaks = [peak - size for peak, size in zip(peaks, away, strict=True)]
                expected = memory_overflow(peaks, costs.budgets)
                kind = int(expected > 0)
            else:
                expected = 2 - placing.placed / (len(placed) + 1)
                kind = 2
        assert found == pytest.approx(expected, abs=1e-9)
        kinds[kind] += 1
    assert min(kinds) > 3


def test_a_gpus_speed_rounds_each_layer() -> None:
    """Times on GPUs of other speeds are at most as many ns longer as a stage has layers."""
    longer = 0
    for seed in range(60):
        costs = random_costs(seed, LAYERS, options=seed % 3)
        gpus = tuple(gpu.model_copy(update={"speed": 0.7}) for gpu in costs.cluster.gpus)
        costs = replace(costs, cluster=costs.cluster.model_copy(update={"gpus": gpus}))
        layout = with_runs(costs, seed)
        mine, placed = contracted(costs, layout)
        *_, ways = arrays_of(layout, recompute=True)
        arrays = chain_arrays(costs), way_arrays(costs)
        for (first, last, gpu), (begin, end, _) in zip(placed, layout.runs, strict=True):
            forward, backward = stage_ns(*arrays, ways, begin, end + 1, gpu)
            more = forward - mine.forward_ns(first, last, gpu)
            more_back = backward - mine.backward_ns(first, last, gpu)
            assert 0 <= more <= end + 1 - begin
            assert 0 <= more_back <= 2 * (end + 1 - begin)
            longer += more_back > 0
    assert longer > 10


@pytest.mark.parametrize("seed", range(6))
def test_a_change_is_one_of_one_stage(seed: int) -> None:
    """Other stages' runs stay, clipped; few layers and many are reached, and each option."""
    costs = random_costs(seed, LAYERS, options=2)
    options, random = way_arrays(costs)[ENDS][OPTIONS], np.random.default_rng(seed)
    layout = Allocation((0, 0, 0, 0, 1, 2, 2, 2, 2), frozenset((7,)))
    arrays, counts, taken = arrays_of(layout, recompute=True), set(), set()
    before = clip_to_stages((), layout.segments())
    for _ in range(1500):
        change_runs(arrays[-1], first_layers(*arrays[:2]), options, random.random(CHANGE))
        new = clip_to_stages(allocation_of(arrays).recompute, layout.segments())
        changed = {
            stage
            for stage in layout.segments()
            if [run for run in before if stage[0] <= run.first <= stage[1]]
            != [run for run in new if stage[0] <= run.first <= stage[1]]
        }
        assert len(changed) <= 1
        assert all(run.option is None or run.first == run.last for run in new)
        assert all(run.option is None or run.option < options[run.first] for run in new)
        counts.add(sum(run.last + 1 - run.first for run in new))
        taken |= {(run.first, run.option) for run in new if run.option is not None}
        before = new
    assert counts >= set(range(1, LAYERS))
    assert taken == {(layer, n) for layer in range(LAYERS) for n in range(options[layer])}


def test_arrays_number_the_ways() -> None:
    """A run, what is kept, an option by its number."""
    layout = Allocation((0,) * 6, frozenset(), recompute=(Run(0, 3), Run(5, 5, 1)))
    arrays = arrays_of(layout, recompute=True)
    assert arrays[-1].tolist() == [RUN, INSIDE, INSIDE, INSIDE, KEPT, OPTION + 1]
    assert allocation_of(arrays) == layout


def test_a_walk_changes_runs_and_homes() -> None:
    """Where nothing fits without runs, it comes to what has some."""
    costs, found = random_costs(3, LAYERS, memory=70), set()
    walk = AllocationWalk(costs, np.random.default_rng(0), recompute=True)
    period = costs.load_ns(0, LAYERS - 1, 0)
    walk.begin(Allocation((0,) * LAYERS, frozenset()), 3.0, period)
    for _ in range(300):
        walk.run(np.full(20, 0.03))
        if walk.waits:
            found.add(walk.new.recompute)
            walk.judged(0.0)
    assert len(found) > 5
    assert () not in found
