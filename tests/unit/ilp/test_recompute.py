"""Choosing what to compute again: options are true, cuts and options together are optimal."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from random import Random
from unittest import mock

import numpy as np
import pytest

from pipeplan.chain import Chain, Layer
from pipeplan.cluster import uniform
from pipeplan.ilp.bounds.load import contiguous_bound, load_bound
from pipeplan.ilp.contiguous.dynamic_program import ContiguousDP
from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.incumbent import Incumbent
from pipeplan.ilp.recompute import search as recompute_search
from pipeplan.ilp.recompute.alike import AlikeLayers
from pipeplan.ilp.recompute.bound import recompute_bound
from pipeplan.ilp.recompute.contracted_chain import contract
from pipeplan.ilp.recompute.dynamic_program import RecomputeDP
from pipeplan.ilp.recompute.label_maker import LabelMaker
from pipeplan.ilp.recompute.labels import EACH, FIELDS, MORE, MOST, PEAK, worth_keeping
from pipeplan.ilp.recompute.options import UNUSED, list_options
from pipeplan.ilp.runs import Run, Runs, from_plan
from pipeplan.simulator.recompute import condensed
from pipeplan.testing.plans import random_plan
from pipeplan.testing.plans_programs import with_options
from pipeplan.verifier.recompute import without_runs
from tests import grids
from tests.searches import limits


def every_choice(
    first: int, last: int, chain: Chain | None = None, *, nested: bool = True
) -> Iterator[Runs]:
    """All sets of runs of layers first..last, options of layers of `chain` among them."""
    if first > last:
        yield ()
        return
    options = chain.layers[first].options if chain else ()
    for rest in every_choice(first + 1, last, chain, nested=nested):
        yield rest
        for number in range(len(options)):
            yield (Run(first, first, number), *rest)
    for end in range(first, last + 1):
        for inner in every_choice(first, end - 1) if nested else ((),):
            for rest in every_choice(end + 1, last, chain, nested=nested):
                yield (Run(first, end, inner=inner), *rest)


def some_chain(seed: int, layers: int, options: int = 0) -> Chain:
    """A random chain with small numbers; its layers share nothing and have up to some options."""
    chain = random_plan(seed, layers=layers, memory_model="exact").chain
    bare = {"parameters": (), "options": ()}
    free = tuple(layer.model_copy(update=bare) for layer in chain.layers)
    chain = chain.model_copy(update={"layers": free, "programs": ()})
    return with_options(Random(seed), chain, options) if options else chain


def costs_of(chain: Chain, gpus: int, memory: int) -> CostModel:
    """Equal GPUs with slow links."""
    return CostModel(chain, uniform(gpus, memory, bandwidth_bytes_per_s=10**9), "2bw", "exact")


def _load(layer: Layer) -> int:
    return layer.forward_ns + layer.backward_ns


@pytest.mark.parametrize("seed", range(60))
def test_three_counts_of_a_run_agree(seed: int) -> None:
    """Solver, verifier and replay see the same layer in a run, by three computations."""
    plan = random_plan(seed, memory_model="exact", offload=False, programs=True)
    given = [stage.remat for stage in plan.stages if stage.remat]
    runs = [run for each in given for run in from_plan(each.recompute)]
    runs += [Run(layer, layer, option) for each in given for layer, option in each.programs]
    mine = contract(plan.chain, sorted(runs))
    for one, two, three in zip(
        mine.chain.layers,
        without_runs(plan).chain.layers,
        condensed(plan).chain.layers,
        strict=True,
    ):
        unnamed = one.model_dump(exclude={"name"})
        assert unnamed == two.model_dump(exclude={"name"}) == three.model_dump(exclude={"name"})
    assert [mine.original(stage) for stage in without_runs(plan).stages] == list(plan.stages)


@pytest.mark.parametrize("seed", range(12))
def test_options_are_what_their_runs_cost(seed: int) -> None:
    """Time, kept bytes and peak of an option are those of the merged chain with its runs."""
    chain = some_chain(seed, 6, options=3 * (seed % 2))
    offered, seen = list_options(chain, nested=True), 0
    for last in range(6):
        for number in range(offered.more.shape[2]):
            if offered.more[0, last, number] == UNUSED:
                continue
            runs = offered.runs(0, last, number)
            mine = contract(chain, runs)
            end = next(n for n, piece in enumerate(mine.pieces) if piece[1] == last)
            # Flush: nothing but forwards and backwards is in a segment's peaks.
            size = CostModel(mine.chain, uniform(1, 0), "flush", "exact").segment(0, end)
            assert size.saved == offered.saved[0, last, number]
            peak = max(size.forward, size.saved + size.backward)
            # A layer before a run that holds others may save more of its input than it does.
            more = sum(_more_held(chain, run) for run in runs)
            assert peak <= offered.peak[0, last, number] <= peak + more
            longer = sum(map(_load, mine.chain.layers)) - sum(map(_load, chain.layers))
            assert longer == offered.more[0, last, number]
            seen += 1
    assert seen > 20


def _more_held(chain: Chain, run: Run) -> int:
    """Bytes that runs which hold others are charged at most beyond what they need."""
    if not run.inner:
        return 0
    before = chain.layers[run.first - 1 : run.first] if run.first else ()
    held = [each.saved_output_bytes for x in before for each in (x, *x.options)]
    own = max(0, max(held, default=0) - chain.layers[run.first].saved_input_bytes)
    return own + sum(_more_held(chain, each) for each in run.inner)


@grids.first(5, seed=range(14))
def test_cuts_and_options_equal_brute_force(seed: int) -> None:
    """Up to 5 layers on 3 GPUs: no set of runs has a shorter contiguous 1F1B period.

    Options count as runs: up to two for each of up to four layers.
    """
    options = 2 * (seed % 3 < 2)
    chain = some_chain(seed, 3 + seed % 3, options)
    sets = every_choice(0, len(chain.layers) - 1, chain)
    choices = [contract(chain, runs).chain for runs in sets]
    for memory in (25, 35, 50, 80):
        costs = costs_of(chain, 3, memory)
        found = RecomputeDP(costs, options=list_options(chain, nested=True)).shortest(1)
        partitions = (ContiguousDP(costs_of(one, 3, memory)).shortest(1) for one in choices)
        periods = [partition.period for partition in partitions if partition is not None]
        assert (None if found is None else found.period) == min(periods, default=None)


@pytest.mark.parametrize("seed", range(14))
def test_the_runs_of_a_partition_give_its_period(seed: int) -> None:
    """The merged chain of the runs that the solver names reaches the period it claims."""
    chain = some_chain(seed, 7, options=seed % 3)
    for memory in (30, 45, 70):
        costs = costs_of(chain, 3, memory)
        solver = RecomputeDP(costs, options=list_options(chain, nested=True))
        found = solver.shortest(1)
        if found is not None:
            again_costs = costs_of(contract(chain, solver.runs(found)).chain, 3, memory)
            partition = ContiguousDP(again_costs).solve(found.period)
            assert partition is not None
            assert partition.spans[0] <= found.spans[0]


def test_where_nothing_fits_recomputation_does() -> None:
    """A chain whose kept bytes exceed the memory is planned; without need nothing is run again."""
    chain = some_chain(3, 6)
    fat = chain.model_copy(
        update={
            "layers": tuple(
                layer.model_copy(update={"saved_bytes": 40, "forward_ns": 5, "backward_ns": 9})
                for layer in chain.layers
            )
        }
    )
    allowed = limits(contiguous_only=True)
    tight, ample = costs_of(fat, 2, 130), costs_of(fat, 2, 10**6)
    assert ContiguousDP(tight).shortest(1) is None
    found = recompute_search.run(Incumbent(tight, allowed))
    assert found.state.best is not None
    assert found.contracted is not None
    assert found.contracted.runs
    unhindered = recompute_search.run(Incumbent(ample, allowed))
    assert unhindered.state.best is not None
    assert unhindered.contracted is None


def test_options_that_are_kept_lie_evenly_in_bytes() -> None:
    """Of many that are close to each other few are kept, and none of those far apart is missed."""
    close, far = np.linspace(100_000, 90_000, 990), np.linspace(80_000, 0, 10)
    labels = np.zeros((FIELDS, 1000), dtype=np.int64)
    labels[MORE], labels[PEAK] = np.arange(1000), np.concatenate([close, far])
    kept = worth_keeping(labels, 1000, MOST, False, False)
    assert kept[0] == 0
    assert kept[-1] == 999
    assert len(kept) <= EACH
    assert np.diff(labels[PEAK, kept]).min() >= -2 * 100_000 // EACH


@grids.first(3, seed=range(8))
def test_the_bound_exceeds_no_plan(seed: int) -> None:
    """Up to 6 layers on 3 GPUs: no set of runs has a relaxed period below the bound."""
    chain = some_chain(seed, 3 + seed % 4, options=2 * (seed % 4 < 2))
    sets = every_choice(0, len(chain.layers) - 1, chain)
    choices = [contract(chain, runs).chain for runs in sets]
    for memory in (30, 50):
        costs = costs_of(chain, 3, memory)
        lowest = max(1, int(load_bound(costs)))
        claimed = recompute_bound(costs, lowest)
        bounds = [contiguous_bound(costs_of(one, 3, memory), lowest) for one in choices]
        least = min((bound for bound in bounds if bound is not None), default=None)
        if claimed is None:
            assert least is None
        else:
            assert least is None or claimed <= least


def test_the_bound_says_more_than_the_load() -> None:
    """Where layers must be recomputed, time for it is in the bound."""
    stronger = 0
    for seed in range(14):
        costs = costs_of(some_chain(seed, 6), 3, 35)
        lowest = max(1, int(load_bound(costs)))
        claimed = recompute_bound(costs, lowest)
        stronger += claimed is None or claimed > lowest
    assert stronger >= 7


@pytest.mark.parametrize("seed", range(8))
def test_dropped_options_lower_others(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However few options a segment keeps, the bound stays one: it only falls."""
    costs = costs_of(some_chain(seed, 8), 3, 40)
    many = recompute_bound(costs, 1)
    for module in ("label_maker", "labels"):
        monkeypatch.setattr(f"pipeplan.ilp.recompute.{module}.MOST", 2)
    few = recompute_bound(costs, 1)
    assert few is not None or many is None
    assert many is None or (few is not None and few <= many)


@grids.each_pair(relaxed=[False, True], offload=[False, True], nested=[False, True])
def test_layers_that_are_alike_are_listed_once(
    relaxed: bool, offload: bool, nested: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that repeat, with others around them: all options as if each was listed."""
    small = {"output_bytes": 4, "saved_output_bytes": 1, "saved_input_bytes": 2, "options": ()}
    source = some_chain(3, 3, options=2)
    plain, *block = source.layers
    plain = plain.model_copy(update=small)
    block = [layer.model_copy(update={**small, "options": layer.options}) for layer in block]
    layers = (plain, *block, *block, *block, plain, *block, plain)
    chain = source.model_copy(update={"layers": layers, "input_bytes": 4})
    listed = partial(list_options, chain, relaxed=relaxed, offload=offload, nested=nested)
    with mock.patch.object(
        LabelMaker, "_extend", autospec=True, side_effect=LabelMaker._extend
    ) as made:
        once = listed()
    assert made.call_count < sum(range(len(layers) + 1))
    monkeypatch.setattr(AlikeLayers, "of", lambda _, first: (first, 0))
    each = listed()
    for name in ("more", "saved", "peak", "levels", "ids"):
        assert np.array_equal(getattr(once, name), getattr(each, name)), name
    for first, last in itertools.combinations_with_replacement(range(len(layers)), 2):
        for option in np.flatnonzero(each.more[first, last] < UNUSED):
            assert once.runs(first, last, int(option)) == each.runs(first, last, int(option))
