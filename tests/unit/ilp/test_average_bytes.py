"""The bound from averages of time and bytes: right for all choices, and below every plan."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from fractions import Fraction
from random import Random

import pytest

from pipeplan.chain import Chain, Layer
from pipeplan.cluster import Host, uniform
from pipeplan.ilp.bounds.load import load_bound
from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.incumbent import Incumbent
from pipeplan.ilp.recompute import search as recompute_search
from pipeplan.ilp.recompute.average_bytes import average_bytes_bound
from pipeplan.ilp.runs import Runs
from pipeplan.plan import Plan, Remat, Stage
from pipeplan.testing import plans
from pipeplan.testing.plans_programs import running, with_options
from tests import grids, handmade
from tests.searches import limits
from tests.unit.ilp.test_recompute import costs_of, every_choice, some_chain


def taken(chain: Chain, runs: Runs) -> tuple[int, int]:
    """Ns that a micro-batch takes under a choice, and least bytes times ns: piece by piece."""
    layers = chain.layers
    time = sum(layer.forward_ns + layer.backward_ns for layer in layers)
    held, saved, at = 0, 0, 0
    begins = {run.first: run for run in runs}
    while at < len(layers):
        run = begins.get(at)
        stays = sum(layer.forward_ns + layer.backward_ns for layer in layers[at:])
        if run is None or run.option is not None:
            own = layers[at]
            one = own if run is None or run.option is None else own.under(own.options[run.option])
            more = one.forward_ns + one.backward_ns - own.forward_ns - own.backward_ns
            time, stays = time + more, stays + more
            held += max(0, one.saved_input_bytes - saved) * stays
            held += (one.saved_bytes + one.saved_output_bytes) * (stays - one.forward_ns)
            held += working(chain, at, one)
            saved, at = one.saved_output_bytes, at + 1
            continue
        given = chain.input_of(at)
        turn = sum(layer.backward_ns for layer in layers[at : run.last + 1])
        held += max(0, given - saved) * (stays - turn)
        there = min(given, layers[at].saved_input_bytes)
        held += max(0, there - saved) * (turn + layers[at].forward_ns)
        for inside in range(run.first, run.last + 1):
            layer = layers[inside]
            time += layer.forward_ns
            held += (layer.saved_bytes + layer.saved_output_bytes) * layer.backward_ns
            light = layer.forward_light_workspace_bytes
            if light is None:
                light = layer.saved_bytes + layer.forward_workspace_bytes
            first = light + layer.output_bytes
            held += layer.forward_ns * first + working(chain, inside, layer)
        saved, at = 0, run.last + 1
    return time, held


def working(chain: Chain, index: int, layer: Layer) -> int:
    """Bytes times ns of one F, and beyond what is saved of one B."""
    ahead = layer.saved_bytes + layer.forward_workspace_bytes + layer.output_bytes
    gradients = layer.gradient_of_output_bytes + chain.gradient_of_input(index)
    back = layer.backward_workspace_bytes + gradients
    return layer.forward_ns * ahead + layer.backward_ns * back


def mixed(costs: CostModel, choices: list[tuple[int, int]]) -> Fraction:
    """The least T that some mixture of choices needs: two are enough, as there are two limits."""
    room = sum(costs.budgets) - sum(costs.segment(i, i).states for i in range(costs.layers))

    def least(one: tuple[int, int], two: tuple[int, int]) -> Iterator[Fraction]:
        # both limits are lines in the share of `one`: their maximum is least at an end or where
        # they meet
        for share in (Fraction(0), Fraction(1), meeting(one, two)):
            if 0 <= share <= 1:
                time, held = (share * a + (1 - share) * b for a, b in zip(one, two, strict=True))
                yield max(time / costs.gpus, held / room)

    def meeting(one: tuple[int, int], two: tuple[int, int]) -> Fraction:
        apart = [time * room - held * costs.gpus for time, held in (one, two)]
        return Fraction(-apart[1], apart[0] - apart[1]) if apart[0] != apart[1] else Fraction(-1)

    return min(t for pair in itertools.product(choices, repeat=2) for t in least(*pair))


def not_worse(choices: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Without those that no mixture needs: another one is as quick and holds as little."""
    kept: list[tuple[int, int]] = []
    for time, held in sorted(choices):
        if not kept or held < kept[-1][1]:
            kept.append((time, held))
    return kept


@grids.first(6, seed=range(24))
def test_it_is_the_best_mixture_of_all_choices(seed: int) -> None:
    """Against a list of all choices: each alone, and each two of them in any shares."""
    chain = some_chain(seed, 2 + seed % 3, options=seed % 3)
    sets = every_choice(0, len(chain.layers) - 1, chain, nested=False)
    choices = not_worse(taken(chain, runs) for runs in sets)
    for memory in (20, 35, 60, 1000):
        costs = costs_of(chain, 3, memory)
        states = sum(costs.segment(i, i).states for i in range(costs.layers))
        if states < 3 * memory:
            assert average_bytes_bound(costs) == mixed(costs, choices)


def some_plan(seed: int) -> Plan:
    """A plan on equal GPUs with runs in runs and options, whose budgets are what it takes."""
    rng = Random(seed)
    chain = with_options(rng, some_chain(seed, 2 + seed % 5))
    gpus = rng.randint(1, min(3, len(chain.layers)))
    cluster = uniform(gpus, 0, bandwidth_bytes_per_s=10**11)
    stages = plans.random_stages(rng, len(chain.layers), gpus)
    if seed % 4:
        again = (plans.recomputing(rng, stage) for stage in stages)
        stages = tuple(running(rng, chain, stage) for stage in again)
    plan = plans.scheduled(rng, chain, cluster, stages, 1 + seed % 3)
    peaks = [row.peak_bytes for row in plans.settle(plan).memory]
    fitting = uniform(gpus, max(peaks), bandwidth_bytes_per_s=10**11)
    return plan.model_copy(update={"cluster": fitting})


@grids.first(60, seed=range(600))
def test_no_plan_is_below_it(seed: int) -> None:
    """Random plans in any order, with several stages on a GPU and several micro-batches."""
    plan = some_plan(seed)
    costs = CostModel(plan.chain, plan.cluster, plan.semantics, "exact")
    assert average_bytes_bound(costs) <= plan.period_per_microbatch


@pytest.mark.parametrize("memory", [30, 35])
def test_it_says_more_than_the_load(memory: int) -> None:
    """Where memory is scarce, the time of what must be computed again is in the bound."""
    several = (costs_of(some_chain(seed, 6), 3, memory) for seed in range(14))
    stronger = sum(average_bytes_bound(costs) > load_bound(costs) for costs in several)
    assert stronger >= 7


@pytest.mark.parametrize("offload", [False, True])
def test_the_search_claims_it(offload: bool) -> None:
    """Of every plan, unless what is kept may leave; and its plan is not below it."""
    alike = {"output_bytes": 1, "saved_input_bytes": 1, "saved_bytes": 8}
    costs = costs_of(handmade.chain([(20, 40)] * 16, [alike] * 16, input_bytes=1), 4, 70)
    bound, load = average_bytes_bound(costs), load_bound(costs)
    assert bound > load
    host = Host(memory_bytes=2**20, bandwidth_bytes_per_s=10**9)
    costs = replace(costs, cluster=costs.cluster.model_copy(update={"host": host}))
    allowed = limits(time_limit_s=1, offload=offload, contiguous_only=True, deterministic=True)
    state = recompute_search.run(Incumbent(costs, allowed)).state
    assert state.best is not None
    assert state.bounds["any"] == (load if offload else bound) <= state.best.per_microbatch


def test_nothing_is_claimed_of_gpus_of_other_speeds() -> None:
    """The time of a run is rounded there."""
    costs = costs_of(some_chain(2, 6), 3, 35)
    gpus = tuple(gpu.model_copy(update={"speed": 2.0}) for gpu in costs.cluster.gpus)
    cluster = costs.cluster.model_copy(update={"gpus": gpus})
    assert average_bytes_bound(replace(costs, cluster=cluster)) == 0


def test_a_run_need_not_hold_its_input_during_its_backward() -> None:
    """(V4) counts there what the first layer saves of it: here nothing."""
    first = {"saved_bytes": 1000, "output_bytes": 10, "backward_workspace_bytes": 290}
    second = {"saved_bytes": 1000, "output_bytes": 4, "backward_workspace_bytes": 186}
    sizes = [
        {**first, "forward_workspace_bytes": 170},
        {**second, "forward_workspace_bytes": 182},
    ]
    chain = handmade.chain([(1, 2), (1, 2)], sizes, input_bytes=100)
    again = Remat(recompute=((0, 0),))
    stages = (Stage(id=0, layers=(0, 0), gpu=0, remat=again), Stage(id=1, layers=(1, 1), gpu=0))
    drawn = (
        plans.settle(plans.scheduled(Random(seed), chain, uniform(1, 0), stages, 1))
        for seed in range(20)
    )
    period, peak = min((plan.period_ns, plan.memory[0].peak_bytes) for plan in drawn)
    assert (period, peak) == (7, 1300)
    assert average_bytes_bound(CostModel(chain, uniform(1, peak), "2bw", "exact")) <= period
