"""Recomputation of tiny chains held against brute force: partitions, orders, and runs."""

from __future__ import annotations

from fractions import Fraction
from random import Random
from unittest import mock

import pytest

from pipeplan import planner
from pipeplan.chain import Chain
from pipeplan.cluster import Cluster, uniform
from pipeplan.errors import InfeasibleError
from pipeplan.ilp.bounds.load import load_bound
from pipeplan.ilp.clock import DeterministicClock
from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.incumbent import Incumbent
from pipeplan.ilp.recompute import enumeration
from pipeplan.ilp.recompute.average_bytes import average_bytes_bound
from pipeplan.ilp.recompute.enumeration import count_sets, recompute_sets
from pipeplan.ilp.recompute.joint_incumbent import JointIncumbent
from pipeplan.ilp.recompute.search_result import SearchResult
from pipeplan.ilp.runs import Run, listed
from pipeplan.plan import Plan
from pipeplan.testing.plans_programs import with_options
from tests import grids, handmade, oracle, wheels
from tests.property.test_planner_oracle import STRETCH, stretched
from tests.searches import limits


def tiny(seed: int, layers: int) -> Chain:
    """Layers of 1 or 2 ns whose outputs are 1 or 2 bytes and that keep up to 4 more."""
    draw = Random(seed)
    fields: list[dict[str, int]] = []
    for _ in range(layers):
        output, before = draw.randint(1, 2), fields[-1]["output_bytes"] if fields else 0
        fields.append(
            {
                "output_bytes": output,
                "saved_output_bytes": draw.choice([0, output]),
                "saved_input_bytes": draw.choice([0, before]),
                "saved_bytes": draw.randint(0, 4),
                "weight_bytes": draw.randint(0, 1),
                "forward_workspace_bytes": draw.choice([0, 0, 1]),
            }
        )
    return handmade.chain([(draw.randint(1, 2), draw.randint(1, 2)) for _ in fields], fields)


def machines(seed: int, layers: int, gpus: int) -> Cluster:
    """Equal GPUs with little memory; transfers take no time, or half a ns for a byte."""
    memory = Random(seed).randint(7 + layers, 9 + 2 * layers)
    return uniform(gpus, memory, bandwidth_bytes_per_s=2 * 10**9 if seed % 2 else None)


def solved(chain: Chain, cluster: Cluster, *, again: bool = True, workers: int = 1) -> Plan | None:
    """The plan of one micro-batch per period; None where it is proven that there is none."""
    config = planner.Config(
        k=1,
        recompute="auto" if again else "off",
        time_limit_s=60,
        workers=workers,
        deterministic=True,
    )
    try:
        return planner.solve(chain, cluster, config)
    except InfeasibleError:
        return None


def held_against(
    seed: int, layers: int, gpus: int, *, options: int = 0
) -> tuple[Plan | None, int | None]:
    """The planner's plan has the period of brute force, and nothing above it is claimed."""
    chain, cluster = tiny(seed, layers), machines(seed, layers, gpus)
    chain = with_options(Random(seed), chain, options)
    best = wheels.optimum(chain, cluster)
    plan = solved(chain, cluster, workers=1 + seed % 2)
    assert (None if plan is None else plan.period_ns) == best
    if plan is not None and best is not None:
        bound = plan.solver.bounds.k1
        assert bound is not None
        assert bound[0] <= best * bound[1]
        assert load_bound(CostModel(chain, cluster, "2bw", "exact")) <= any_of(plan) <= best
    return plan, best


def any_of(plan: Plan) -> Fraction:
    """What is claimed of every plan, whatever it computes again and however many copies it has."""
    assert plan.solver.bounds.any is not None
    return Fraction(*plan.solver.bounds.any)


def test_every_set_of_runs_is_tried() -> None:
    """Planner and oracle list the same sets, each once: large Schroeder numbers."""
    for layers, count in ((1, 2), (2, 6), (3, 22), (5, 394)):
        mine, theirs = (
            list(recompute_sets([0] * layers)),
            list(oracle.every_run_set(0, layers - 1)),
        )
        assert len(mine) == len(set(mine)) == count
        assert {listed(runs) for runs in mine} == set(theirs)
    every = list(recompute_sets([2, 0, 1]))
    assert len(every) == len(set(every)) == count_sets([2, 0, 1])
    assert {runs for runs in every if all(run.option is None for run in runs)} == set(
        recompute_sets([0] * 3)
    )
    assert (Run(0, 0, 1), Run(1, 1), Run(2, 2, 0)) in every


def test_listing_what_there_is_to_try_takes_time() -> None:
    """Where time is over before all is listed, what is left is not: five layers, unequal GPUs."""
    chain, cluster = tiny(0, 5), machines(0, 5, 3)
    gpus = [x.model_copy(update={"memory_bytes": 30 + n}) for n, x in enumerate(cluster.gpus)]
    costs = CostModel(chain, cluster.model_copy(update={"gpus": tuple(gpus)}), "2bw", "exact")
    state = Incumbent(costs, limits(clock=DeterministicClock(), deterministic=True))
    state.raise_bound("any", load_bound(costs))
    joint = JointIncumbent(state, SearchResult(state))
    with mock.patch.object(enumeration, "allocations", wraps=enumeration.allocations) as listed:
        enumeration.decide(joint, Fraction(0), 0.05)
    assert joint.period is None
    assert 1 <= listed.call_count < len(list(recompute_sets([0] * 5)))
    assert state.elapsed < 0.1


@grids.first(
    6,
    case=[
        *((3, 2 + seed // 2 % 2, seed) for seed in range(12, 18)),
        (4, 2, 2),
        *((3, 3 - seed // 2 % 2, seed) for seed in range(12, 18)),
        (4, 2, 8),
    ],
)
def test_two_brute_forces_agree(case: tuple[int, int, int]) -> None:
    """That which prunes by wheels of slots finds what that which judges stages one by one does."""
    layers, gpus, seed = case
    chain, cluster = tiny(seed, layers), machines(seed, layers, gpus)
    limit = 2 * oracle.serial(chain, cluster)
    best = oracle.optimum(chain, cluster, limit=limit, again=True)
    assert wheels.optimum(chain, cluster) == best


@grids.first(
    16,
    case=[
        *((3, 2 + seed // 2 % 2, seed) for seed in range(12)),
        *((4, gpus, seed) for gpus in (2, 3) for seed in (3, 12)),
        *((3, 3 - seed // 2 % 2, seed) for seed in range(12)),
        *((4, gpus, 14) for gpus in (2, 3)),
    ],
)
def test_equal_to_brute_force(case: tuple[int, int, int]) -> None:
    """No partition, order or set of runs of a few layers has a shorter period."""
    layers, gpus, seed = case
    held_against(seed, layers, gpus)


@grids.first(5, seed=[15, 41, 47, 127, 394, 719, 759, 1062])
def test_equal_to_brute_force_with_programs(seed: int) -> None:
    """Nor has any choice of programs beside all of these, where it shortens the period."""
    _, best = held_against(seed, 3, 2, options=2)
    assert best is not None
    assert best != wheels.optimum(tiny(seed, 3), machines(seed, 3, 2))


def test_it_is_more_than_contiguous_plans_and_more_than_keeping() -> None:
    """A best plan that computes again, with several stages on a GPU, is found and proven."""
    chain, cluster = tiny(14, 4), machines(14, 4, 3)
    plan, without = solved(chain, cluster), solved(chain, cluster, again=False)
    assert plan is not None
    assert without is not None
    assert plan.solver.status == "optimal"
    assert (plan.period_ns, without.period_ns) == (6, 8)
    assert plan.solver.bounds.contiguous == (8, 1)
    assert len(plan.stages) > len({stage.gpu for stage in plan.stages})
    assert any(stage.remat for stage in plan.stages)


@pytest.mark.parametrize(
    ("layers", "gpus", "seed", "workers"),
    [(4, 2, 11, 1), (4, 2, 14, 1), (4, 2, 14, 2), (4, 3, 15, 1)],
)
def test_several_copies(layers: int, gpus: int, seed: int, workers: int) -> None:
    """Of every plan only averages are proven, whichever set of runs is searched on in the end."""
    chain, cluster = tiny(seed, layers), machines(seed, layers, gpus)
    best = wheels.optimum(chain, cluster)
    config = planner.Config(recompute="auto", time_limit_s=1, workers=workers, deterministic=True)
    plan = planner.solve(chain, cluster, config)
    costs = CostModel(chain, cluster, "2bw", "exact")
    assert any_of(plan) == max(load_bound(costs), average_bytes_bound(costs))
    assert best is not None
    assert plan.solver.bounds.k1 is not None
    assert Fraction(*plan.solver.bounds.k1) <= best


def test_each_set_of_runs_has_bounds_of_its_own() -> None:
    """What is proven of the chain found afterwards is not proven of all the others."""
    costs = CostModel(tiny(14, 4), machines(14, 4, 3), "2bw", "exact")
    whole = Incumbent(costs, limits(time_limit_s=60))
    whole.raise_bound("any", load_bound(costs), from_bytes=False)
    joint = JointIncumbent(whole, SearchResult(whole))
    enumeration.decide(joint, Fraction(0), 30)
    before, inner = dict(whole.bounds), joint.best.state
    assert inner is not whole
    assert before["k1"] == 6
    inner.raise_bound("any", Fraction(99))
    assert whole.bounds == before


@grids.first(1, case=[(5, 0), (5, 12), (6, 4), (5, 4), (5, 6), (5, 9)])
def test_five_and_six_layers_are_proven(case: tuple[int, int]) -> None:
    """On 3 GPUs the period is that of brute force, and is called optimal."""
    layers, seed = case
    plan, _ = held_against(seed, layers, 3)
    assert plan is not None
    assert plan.solver.status == "optimal"


@grids.first(2, case=[(4, 3), (5, 4), (4, 12), (5, 6), (5, 9), (5, 12)])
def test_milliseconds_are_proven_too(case: tuple[int, int]) -> None:
    """Times as long as real ones: the period lies in the last ns of the short chain's."""
    layers, seed = case
    chain, cluster = tiny(seed, layers), machines(seed, layers, 3)
    best = wheels.optimum(chain, cluster)
    plan = solved(*stretched(chain, cluster))
    assert plan is not None
    assert best is not None
    assert plan.solver.status == "optimal"
    assert (best - 1) * STRETCH < plan.period_ns <= best * STRETCH


@pytest.mark.long
@pytest.mark.parametrize(
    ("layers", "gpus", "seed"),
    [(4, 3, seed) for seed in range(40)]
    + [(5, gpus, seed) for gpus in (2, 3) for seed in range(16)]
    + [(6, gpus, seed) for gpus in (2, 3) for seed in range(6)],
)
def test_up_to_six_layers_equal_brute_force(layers: int, gpus: int, seed: int) -> None:
    """No partition, order or set of runs of up to 6 layers on 3 GPUs has a shorter period."""
    plan, _ = held_against(seed, layers, gpus)
    assert plan is None or plan.solver.status == "optimal"
