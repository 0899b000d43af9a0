"""Step plans that recompute: all voices accept them, and scarce memory costs less time."""

from __future__ import annotations

from fractions import Fraction
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeplan import planner
from pipeplan.chain import Chain
from pipeplan.cluster import Cluster, uniform
from pipeplan.errors import InfeasibleError, TimeLimitError
from pipeplan.ilp import Limits, Problem, solve
from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.incumbent import Incumbent
from pipeplan.ilp.problem import options_of
from pipeplan.ilp.recompute.contracted_chain import contract
from pipeplan.ilp.recompute.joint_incumbent import JointIncumbent
from pipeplan.ilp.recompute.search_result import SearchResult
from pipeplan.ilp.recompute.step_search import RecomputeStepSearch
from pipeplan.ilp.runs import Run, from_plan
from pipeplan.plan import Plan
from pipeplan.planner.config import AUTO_K
from pipeplan.simulator.recompute import condensed
from pipeplan.testing.plans_programs import with_options
from pipeplan.testing.plans_split import random_split_plan
from pipeplan.verifier.recompute import without_runs
from tests import handmade
from tests.equal_steps import equal
from tests.unit.ilp.test_step import CHECKS, chains


def planned(chain: Chain, cluster: Cluster, microbatches: int, seconds: float = 0.5) -> Plan:
    """The step plan that every voice accepts; work is limited."""
    config = planner.Config(
        semantics="flush",
        microbatches=microbatches,
        recompute="auto",
        time_limit_s=seconds,
        deterministic=True,
    )
    return planner.solve(chain, cluster, config)


@settings(max_examples=16, derandomize=True, deadline=None, suppress_health_check=CHECKS)
@given(chains(2, 8), st.integers(2, 4), st.integers(1, 6), st.integers(12, 60), st.integers(0, 2))
def test_every_voice_accepts(
    chain: Chain, gpus: int, microbatches: int, memory: int, options: int
) -> None:
    """Split or whole, runs or options: the planner's own check of all voices passes."""
    if options:
        chain = with_options(Random(memory), chain, options)
    try:
        plan = planned(chain, uniform(gpus, memory, bandwidth_bytes_per_s=10**9), microbatches)
    except (InfeasibleError, TimeLimitError):
        return
    assert plan.k == microbatches
    assert all(op.shift == 0 for op in plan.ops)


@pytest.mark.parametrize("seed", range(60))
def test_three_counts_of_a_split_run_agree(seed: int) -> None:
    """Solver, verifier and replay see the same halves of a run's backward (S6)."""
    plan = random_split_plan(seed, offload=False)
    runs = [run for s in plan.stages if s.remat for run in from_plan(s.remat.recompute)]
    mine = contract(plan.chain, runs).chain.layers
    for one, two, three in zip(
        mine, without_runs(plan).chain.layers, condensed(plan).chain.layers, strict=True
    ):
        unnamed = one.model_dump(exclude={"name"})
        assert unnamed == two.model_dump(exclude={"name"}) == three.model_dump(exclude={"name"})


@pytest.mark.parametrize(
    ("gpus", "memory", "seconds", "most"),
    [
        (3, Fraction(1, 4), 1.0, 1.45),
        pytest.param(4, Fraction(1, 4), 10.0, 1.42, marks=pytest.mark.long),
        pytest.param(4, Fraction(1, 3), 10.0, 1.36, marks=pytest.mark.long),
    ],
)
def test_scarce_memory_costs_less(
    gpus: int, memory: Fraction, seconds: float, most: float
) -> None:
    """Equal layers, step / (m load): less than where all is kept; recomputing all adds 1/3."""
    chain, costs = equal(gpus, split=True, memory=memory)
    steps, microbatches = {}, 2 * gpus
    for recompute in (False, True):
        problem = Problem(
            chain=chain,
            cluster=costs.cluster,
            semantics="flush",
            microbatches=microbatches,
            ks=AUTO_K,
            recompute=recompute,
        )
        steps[recompute] = solve(
            problem, Limits(time_limit_s=seconds, deterministic=True)
        ).period_ns
    assert steps[True] <= most * microbatches * 12_000 < steps[False]


def test_sets_to_start_from_free_most_bytes_for_their_time() -> None:
    """Each set is the cheapest single layers first; no set frees more than it must."""
    chain, costs = equal(2, split=True, memory=Fraction(1, 2))
    dear = chain.layers[3].model_copy(update={"forward_ns": 5000, "backward_weight_ns": None})
    chain = chain.model_copy(update={"layers": (*chain.layers[:3], dear, *chain.layers[4:])})
    costs = CostModel(chain, costs.cluster, "flush", "exact")
    problem = Problem(
        chain=chain, cluster=costs.cluster, semantics="flush", ks=AUTO_K, recompute=True
    )
    state = Incumbent(costs, options_of(problem, Limits(deterministic=True)))
    search = RecomputeStepSearch(JointIncumbent(state, SearchResult(state)))
    sets = search._sets()
    assert len(sets) == len(set(sets)) > 1
    for runs in sets:
        assert Run(3, 3) not in runs or len(runs) == costs.layers
    assert [len(runs) for runs in sets] == sorted((len(runs) for runs in sets), reverse=True)


@pytest.mark.parametrize("memory", [16, 22])
def test_the_plan_of_steady_states_is_there_where_the_search_finds_none(memory: int) -> None:
    """Alike layers on two GPUs: such sets of runs, cut off after the step, in runs if need be."""
    alike = {"output_bytes": 2, "saved_input_bytes": 2, "saved_bytes": 6}
    chain = handmade.chain([(2, 4)] * 8, [alike] * 8, input_bytes=2)
    plan = planned(chain, uniform(2, memory, bandwidth_bytes_per_s=10**12), 4, seconds=0.05)
    assert any(stage.remat and stage.remat.recompute for stage in plan.stages)
