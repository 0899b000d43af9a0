"""Annealing in arrays judges as the list scheduler does, and steps to what allocations may be."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest

from pipeplan.cluster import Gpu, Pair, uniform
from pipeplan.ilp.compiled import with_attributes
from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.local_search.allocation import Allocation
from pipeplan.ilp.local_search.allocation_judge import judge
from pipeplan.ilp.local_search.allocation_moves import DRAWS, LONGEST_WAIT, make_step
from pipeplan.ilp.local_search.allocation_steps import walk
from pipeplan.ilp.local_search.allocation_walk import (
    AllocationWalk,
    allocation_of,
    arrays_of,
    kept,
)
from pipeplan.ilp.local_search.annealing import memory_overflow
from pipeplan.ilp.local_search.chain_arrays import BACKWARD, FORWARD, chain_arrays, op_ns, send_ns
from pipeplan.ilp.local_search.layer_ways import ENDS, NO_WAYS, OPTIONS
from pipeplan.ilp.local_search.list_scheduler import ModuloListScheduler, overload
from pipeplan.ilp.modulo_scheduling import STAGE
from pipeplan.ilp.runs import Run, Runs
from tests import handmade
from tests.random_placements import random_costs

GPUS = 3
NOWHERE = np.zeros(0)
"""No host."""


def some_costs(random: Random) -> CostModel:
    """A few layers on GPUs of several speeds and sizes, and links of several kinds."""
    costs = random_costs(random, random.choice(("exact", "paper")), GPUS)
    gpus = tuple(
        Gpu(name=f"gpu{n}", memory_bytes=random.randint(5, 60), speed=random.choice((0.5, 1.0)))
        for n in range(GPUS)
    )
    fields = {"from": 0, "to": 2, "latency_ns": 3, "bandwidth_bytes_per_s": 5 * 10**8}
    slow = Pair.model_validate(fields)
    links = costs.cluster.links.model_copy(
        update={
            "duplex": random.choice(("full", "half")),
            "pairs": random.choice(((), (slow,))),
        }
    )
    update = {"gpus": gpus, "links": links, "action_overhead_ns": random.randint(0, 2)}
    return replace(costs, cluster=costs.cluster.model_copy(update=update))


def some_layout(random: Random, layers: int) -> Allocation:
    """Anything that an allocation may be."""
    k = random.choice((1, 1, 2, 3))
    return Allocation(
        tuple(random.randrange(GPUS) for _ in range(layers)),
        frozenset(layer for layer in range(1, layers) if random.random() < 0.3),
        tuple(copy / k for copy in range(k)),
        waits={
            layer: random.choice(((random.random() / 2, 0.0), (0.0, random.random() / 2)))
            for layer in range(layers)
            if random.random() < 0.2
        },
    )


def some_runs(random: Random, layers: int) -> Runs:
    """Any runs and options of layers."""
    found, layer = [], 0
    while layer < layers:
        last = min(layers - 1, layer + random.choice((0, 0, 1, 3)))
        kind = random.choice((None, None, 0, 1, "kept"))
        if kind is None:
            found.append(Run(layer, last))
        elif kind != "kept":
            found.append(Run(layer, layer, kind))
            last = layer
        layer = last + 1
    return tuple(found)


def stepped(costs: CostModel, layout: Allocation, random: np.random.Generator) -> Allocation:
    """What one random step makes of an allocation."""
    arrays, none = arrays_of(layout), NO_WAYS[ENDS][OPTIONS]
    make_step(arrays, chain_arrays(costs), none, random.random(DRAWS))
    return allocation_of(arrays)


def listed(costs: CostModel, layout: Allocation, period: int) -> tuple[float, int]:
    """What `judge` is to say: by the list scheduler."""
    over = overload(costs, layout.runs, period, len(layout.turns))
    if over > 0:
        return 2 + over, 0
    centres = [int(turn * period) for turn in layout.turns]
    placing = ModuloListScheduler(
        costs, layout.runs, period, centres, layout.waits_by_stage(period)
    )
    found = placing.place()
    placed = placing.placed * placing.copies
    if not found:
        return 2 - placing.placed / (len(layout.runs) + 1), placed
    return memory_overflow(placing.peaks(), costs.budgets), placed


def test_judgement_is_the_list_schedulers() -> None:
    """Load, room and bytes of random allocations, in both memory models."""
    random, kinds = Random(0), [0] * 4
    for _ in range(800):
        costs = some_costs(random)
        layout = some_layout(random, costs.layers)
        whole = costs.load_ns(0, costs.layers - 1, 0) * len(layout.turns)
        period = int(whole * random.choice((0.5, 0.7, 1)))
        stages = with_attributes(np.zeros(costs.layers, STAGE))
        got = judge(chain_arrays(costs), NO_WAYS, NOWHERE, stages, arrays_of(layout), period)
        expected = listed(costs, layout, period)
        assert got == pytest.approx(expected, abs=1e-9)
        kinds[3 if got[0] > 2 else 2 if got[0] > 1 else int(got[0] > 0)] += 1
    assert min(kinds) > 20


def test_durations_are_those_of_the_costs() -> None:
    """Of all segments, and of transfers of all boundaries."""
    random = Random(1)
    for _ in range(20):
        costs = some_costs(random)
        known = chain_arrays(costs)
        for gpu in range(GPUS):
            for first in range(costs.layers):
                for last in range(first, costs.layers):
                    forward = op_ns(known, FORWARD, first, last + 1, gpu)
                    assert forward == costs.forward_ns(first, last, gpu)
                    backward = op_ns(known, BACKWARD, first, last + 1, gpu)
                    assert backward == costs.backward_ns(first, last, gpu)
            for other in set(range(GPUS)) - {gpu}:
                for at in range(costs.layers - 1):
                    way = at, gpu, other
                    assert send_ns(known, FORWARD, *way) == costs.send_forward_ns(*way)
                    assert send_ns(known, BACKWARD, *way) == costs.send_backward_ns(*way)


def test_arrays_are_the_same_allocation() -> None:
    """There and back."""
    random = Random(2)
    for _ in range(100):
        layout = some_layout(random, 9)
        assert allocation_of(arrays_of(layout)) == layout
        layout = replace(layout, recompute=some_runs(random, 9))
        assert allocation_of(arrays_of(layout, recompute=True)) == layout


def test_steps_come_to_allocations() -> None:
    """Homes are GPUs, splits and waits of layers, turns rise; everything changes now and then."""
    costs = some_costs(Random(3))
    costs = replace(costs, chain=handmade.chain([(1, 1)] * 9))
    random, draws, changed = Random(4), np.random.default_rng(0), [0] * 4
    for _ in range(300):
        layout = some_layout(random, 9)
        new = stepped(costs, layout, draws)
        assert set(new.homes) <= set(range(GPUS))
        assert new.splits <= set(range(1, 9))
        assert len(new.turns) == len(layout.turns)
        assert new.turns[0] == 0
        assert sorted(new.turns) == list(new.turns)
        assert new.turns[-1] < 1
        assert all(0 <= sum(wait) <= LONGEST_WAIT for wait in new.waits.values())
        assert all(0 in wait for wait in new.waits.values())
        for number, name in enumerate(("homes", "splits", "turns", "waits")):
            changed[number] += getattr(new, name) != getattr(layout, name)
    assert min(changed) > 10


def test_one_layer_has_nothing_to_split() -> None:
    """Moves of an allocation of a single layer move it or leave it."""
    costs = CostModel(handmade.chain([(1, 1)]), uniform(2, 100), "2bw", "exact")
    layout, draws, homes = Allocation((0,), frozenset()), np.random.default_rng(0), set()
    for _ in range(60):
        layout = stepped(costs, layout, draws)
        homes.add(layout.homes)
        assert not layout.splits
    assert homes == {(0,), (1,)}


def test_tied_and_pinned_layers_stay() -> None:
    """The first and the last layer share a GPU, which is any; the second is pinned."""
    fields = [{"parameters": ("w",)}, {}, {}, {"parameters": ("w",)}]
    chain = handmade.chain([(1, 1)] * 4, fields)
    costs = CostModel(chain, uniform(GPUS, 100), "2bw", "exact", pins=((1, 2),))
    layout = kept(costs, Allocation((0, 1, 0, 1), frozenset()), 0.7)
    draws, ends = np.random.default_rng(0), set()
    for _ in range(100):
        assert layout.homes[0] == layout.homes[3]
        assert layout.homes[1] == 2
        ends.add(layout.homes[0])
        layout = stepped(costs, layout, draws)
    assert ends == set(range(GPUS))


def test_a_walk_ends_at_what_fits() -> None:
    """Six equal layers on one GPU of two that hold three each: what fits waits to be judged."""
    chain = handmade.chain([(1, 1)] * 6, [{"weight_bytes": 10}] * 6)
    costs = CostModel(chain, uniform(2, 80), "flush", "exact")
    at, period = Allocation((0,) * 6, frozenset()), 6
    walking = AllocationWalk(costs, np.random.default_rng(1))
    begun = listed(costs, at, period)[0]
    walking.begin(at, begun, period)
    done, placed = walking.run(np.full(2000, 0.03))
    assert walking.waits
    assert 0 < done < 2000
    assert placed > 0
    assert listed(costs, walking.new, period)[0] == 0
    least, closest = walking.closest
    assert 0 < least < begun
    assert listed(costs, closest, period)[0] == pytest.approx(least)
    new = walking.new
    walking.judged(0.0)
    walking.run(np.full(1, 1e-9))
    assert walking.closest == (0.0, new)


def test_what_does_not_fit_after_all_is_weighed() -> None:
    """A cold walk does not go to what its plan's bytes say is worse; a hot one may."""
    chain = handmade.chain([(1, 1)] * 6, [{"weight_bytes": 10}] * 6)
    costs = CostModel(chain, uniform(2, 80), "flush", "exact")
    at = Allocation((0,) * 6, frozenset())
    known, stages = chain_arrays(costs), with_attributes(np.zeros(6, STAGE))
    for heat, goes in ((1e-9, False), (1e9, True)):
        places = [arrays_of(at), arrays_of(replace(at, homes=(1,) * 6)), arrays_of(at)]
        excesses = np.array([0.5, 0.6, 0.5])
        draws = np.full((1, DRAWS), 0.5)
        done = walk(
            known, NO_WAYS, NOWHERE, stages, *places, excesses, 6, draws, np.array([heat]), True, 1
        )
        assert done == (1, 0, False)
        assert (places[0][0][0] == 1) == goes
        assert excesses.tolist() == [0.6 if goes else 0.5, 0.6, 0.5]


def test_a_walk_ends_where_steps_take_long() -> None:
    """It goes on from there; the same random numbers come to the same allocation."""
    costs = CostModel(handmade.chain([(1, 1)] * 6), uniform(2, 80), "flush", "exact")
    known, stages = chain_arrays(costs), with_attributes(np.zeros(6, STAGE))
    at, period = Allocation((0, 0, 0, 1, 1, 1), frozenset(), waits={0: (0.5, 0.0)}), 12
    draws, heats = np.random.default_rng(0).random((50, DRAWS)), np.full(50, 1.0)
    draws[:, 0] = draws[:, DRAWS // 2] = 0.9  # changes of homes alone
    ends = []
    for enough in (10**6, 7):
        places, excesses, step = [arrays_of(at) for _ in range(3)], np.full(3, 0.5), 0
        while step < 50:
            rest = draws[step:], heats[step:]
            done, placed, found = walk(
                *(known, NO_WAYS, NOWHERE, stages, *places, excesses, period),
                *(*rest, False, enough),
            )
            if found:
                places[2][0][:] = places[1][0]
                done += 1
            assert enough > 7 or placed <= 7 + 6
            step += done
        ends.append(allocation_of(places[0]))
    assert ends[0] == ends[1]
