"""Step plans: list scheduling never deadlocks, bounds hold, and all voices accept the plans."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeplan import planner
from pipeplan.chain import Chain
from pipeplan.cluster import Host, uniform
from pipeplan.errors import InfeasibleError, TimeLimitError
from pipeplan.ilp import Limits, Problem, solve
from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.incumbent import Incumbent
from pipeplan.ilp.problem import options_of
from pipeplan.ilp.solve import LONG_STEP, PERIODIC
from pipeplan.ilp.step.bound import step_bound
from pipeplan.ilp.step.cuts import CutSearch
from pipeplan.ilp.step.dispatch import W
from pipeplan.ilp.step.instance import StepInstance, instance
from pipeplan.ilp.step.list_scheduler import DispatchingRule, as_schedule, schedule_step
from pipeplan.ilp.step.placements import placements, stages_of
from pipeplan.ilp.step.rules import random_rule
from pipeplan.ilp.step.search import OPENING, StepSearch
from pipeplan.plan import Plan
from pipeplan.planner.config import AUTO_K, problem
from tests import handmade, step_brute
from tests.equal_steps import equal

CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large]


@st.composite
def chains(draw: st.DrawFn, least: int, most: int, *, empty: bool = False) -> Chain:
    """Layers of a few ns and bytes that tell what their weight gradients take and need."""
    small, times, fields = st.integers(0, 4), [], []
    for _ in range(draw(st.integers(least, most))):
        weight = draw(st.integers(0 if empty else 1, 3))
        times.append((draw(st.integers(0 if empty else 1, 4)), weight + draw(st.integers(1, 3))))
        saved, before = draw(small), fields[-1]["output_bytes"] if fields else 0
        output = draw(small)
        entering = draw(st.integers(0, before))
        fields.append(
            {
                "output_bytes": output,
                "saved_output_bytes": draw(st.integers(0, output)),
                "saved_input_bytes": entering,
                "saved_bytes": saved,
                "weight_bytes": draw(st.integers(0, 2)),
                "backward_weight_ns": weight,
                "backward_input_ns": times[-1][1] - weight + draw(st.integers(0, 1)),
                "forward_split_ns": times[-1][0] + draw(st.integers(0, 1)),
                "saved_for_weight_bytes": entering + draw(st.integers(0, saved + 2)),
                "saved_input_for_weight_bytes": entering,
                "weight_backward_workspace_bytes": draw(st.integers(0, 2)),
            }
        )
    return handmade.chain(times, fields)


def planned(
    chain: Chain,
    gpus: int,
    microbatches: int,
    memory: int,
    latency: int = 0,
    seconds: float = 0.3,
) -> Plan:
    """The step plan that every voice accepts; work is limited."""
    config = planner.Config(
        semantics="flush", microbatches=microbatches, time_limit_s=seconds, deterministic=True
    )
    cluster = uniform(gpus, memory, latency_ns=latency, bandwidth_bytes_per_s=10**9)
    return planner.solve(chain, cluster, config)


@settings(max_examples=16, derandomize=True, deadline=None, suppress_health_check=CHECKS)
@given(chains(2, 9, empty=True), st.integers(2, 4), st.integers(1, 7), st.integers(20, 200))
def test_every_voice_accepts(chain: Chain, gpus: int, microbatches: int, memory: int) -> None:
    """Split or whole, ample or scarce: the planner's own check of all voices passes."""
    try:
        plan = planned(chain, gpus, microbatches, memory)
    except (InfeasibleError, TimeLimitError):
        return
    assert plan.k == microbatches
    assert all(op.shift == 0 for op in plan.ops)
    assert plan.period_ns == max(op.start_ns + op.duration_ns for op in plan.ops)


@settings(max_examples=12, derandomize=True, deadline=None, suppress_health_check=CHECKS)
@given(chains(2, 3), st.integers(1, 2), st.integers(0, 1))
def test_against_every_order(chain: Chain, microbatches: int, latency: int) -> None:
    """No plan is shorter than brute force, and no bound exceeds that."""
    plan, least = both(chain, microbatches, latency, seconds=0.3)
    assert plan.period_ns >= least
    costs = CostModel(plan.chain, plan.cluster, "flush", "exact")
    assert step_bound(costs, microbatches) * microbatches <= least
    claimed = plan.solver.bounds.any
    assert claimed is None or Fraction(*claimed) * microbatches <= least


@pytest.mark.long
@settings(max_examples=25, derandomize=True, deadline=None, suppress_health_check=CHECKS)
@given(chains(3, 3), st.integers(1, 3), st.integers(0, 1))
def test_plans_are_as_short_as_any(chain: Chain, microbatches: int, latency: int) -> None:
    """With some time: equal to brute force over all placements, splits and orders."""
    plan, least = both(chain, microbatches, latency, seconds=4.0)
    assert plan.period_ns == least


def both(chain: Chain, microbatches: int, latency: int, seconds: float) -> tuple[Plan, int]:
    """The plan for two GPUs without limits of memory or bandwidth, and the shortest step."""
    chain = chain.model_copy(
        update={"layers": tuple(x.model_copy(update={"output_bytes": 0, "saved_output_bytes": 0,
            "saved_input_bytes": 0, "saved_input_for_weight_bytes": 0}) for x in chain.layers)}
    )  # fmt: skip
    least = step_brute.shortest_step(chain, 2, microbatches, latency)
    return planned(chain, 2, microbatches, 10**6, latency, seconds=seconds), least


@pytest.mark.parametrize("memory", [Fraction(1, 3), Fraction(1, 2), Fraction(1)])
@pytest.mark.parametrize("split", [True, False])
def test_no_rule_deadlocks(split: bool, memory: Fraction) -> None:
    """Where one micro-batch fits, every rule ends with all of them."""
    _, costs = equal(3, split=split, memory=memory)
    random = Random(0)
    for placement in placements(costs):
        for cuts in CutSearch(costs, random, 5, split=split).all(placement):
            of = instance(costs, stages_of(costs, cuts, placement, [split] * len(cuts)), 5)
            if (of.gpus["whole"] <= of.gpus["room"]).all():
                check_ends(of, random)


@pytest.mark.parametrize("memory", [90, 98])
def test_an_input_that_waits_has_its_room_already(memory: int) -> None:
    """Where less is free than a message, a forward that frees its own may start all the same."""
    fields = {"saved_bytes": 4, "output_bytes": 1, "weight_bytes": 4, "gradient_bytes": 4}
    chain = handmade.chain([(1000, 2000)] * 16, [fields | {"optimizer_bytes": 8}] * 16)
    costs = CostModel(chain, uniform(4, memory), "flush", "exact")
    placed = (0, 1, 2, 3, 3, 2, 1, 0)
    check_ends(
        instance(costs, stages_of(costs, range(0, 16, 2), placed, [False] * 8), 16), Random(1)
    )


def check_ends(of: StepInstance, random: Random) -> None:
    """Ten random rules, an op of which ranks later, end with all micro-batches."""
    for rule in [random_rule(of, random) for _ in range(10)]:
        place = (random.randrange(3), random.randrange(len(of.stages)), random.randrange(-2, 3))
        times, _ = schedule_step(of, replace(rule, shifts={place: 10.0 * of.load_ns}))
        assert times is not None
        schedule = as_schedule(of, times)
        assert schedule.period == times.end
        assert all(len(row) == of.microbatches for row in schedule.times.values())


def test_shifts_of_all_micro_batches_are_another_rank() -> None:
    """Those of the second half count from the end; a shift of one alone is a third rule."""
    _, costs = equal(3, split=True, memory=Fraction(1, 2))
    there_and_back = stages_of(costs, range(0, 12, 2), (0, 1, 2, 2, 1, 0), [True] * 6)
    of, random, differ = instance(costs, there_and_back, 5), Random(0), 0
    for rule in [random_rule(of, random) for _ in range(10)]:
        ranks = [list(row) for row in rule.ranks]
        ranks[W][2] += 20_000
        places = [(W, 2, number) for number in (0, 1, 2, -2, -1)]
        moved = starts(of, replace(rule, ranks=tuple(map(tuple, ranks))))
        assert moved == starts(of, replace(rule, shifts=dict.fromkeys(places, 20_000)))
        alone = starts(of, replace(rule, shifts={places[1]: 20_000}))
        differ += alone not in (moved, starts(of, rule))
    assert differ


def starts(of: StepInstance, rule: DispatchingRule) -> list[list[list[int]]]:
    """By kind, stage and micro-batch."""
    times, _ = schedule_step(of, rule)
    assert times is not None
    found: list[list[list[int]]] = times.starts.tolist()
    return found


def test_cuts_of_many_stages_are_even() -> None:
    """64 random layers on 16 GPUs: no GPU has much more than its share, looped or as a V."""
    source = Random(0)
    forward = [source.randint(200, 2000) for _ in range(64)]
    chain = handmade.chain([(each, 2 * each) for each in forward])
    costs = CostModel(chain, uniform(16, 2**40), "flush", "exact")
    for row in (range(16), range(15, -1, -1)):
        placement = (*range(16), *row)
        cuts = next(CutSearch(costs, Random(0), 10**6, split=False).all(placement))
        of = instance(costs, stages_of(costs, cuts, placement, [False] * len(cuts)), 32)
        assert of.load_ns * 16 < 1.2 * 3 * sum(forward)


def test_a_search_ends_where_nothing_fits() -> None:
    """Runs of list scheduling that end before their first event count as work, too."""
    chain = handmade.chain([(2, 3)] * 2, [{"saved_bytes": 1000}] * 2)
    problem = Problem(
        chain=chain, cluster=uniform(2, 100), semantics="flush", microbatches=4, ks=AUTO_K
    )
    options = options_of(problem, Limits(time_limit_s=1.0, deterministic=True))
    state = Incumbent(CostModel(chain, problem.cluster, "flush", "exact"), options)
    StepSearch(state).run(1.0)
    assert state.best is None
    assert options.clock.spent >= 1.0 * OPENING


def test_ties_that_no_listed_placement_keeps() -> None:
    """Two pairs of tied layers, on three GPUs of which none holds half: still no serial plan."""
    sizes = [{"saved_bytes": 10, "weight_bytes": 20, "gradient_bytes": 20} for _ in range(8)]
    ties = {0: "a", 4: "a", 2: "b", 6: "b"}
    tied = [
        size | ({"parameters": (ties[layer],)} if layer in ties else {})
        for layer, size in enumerate(sizes)
    ]
    chain = handmade.chain([(1000, 2000)] * 8, tied)
    problem = Problem(
        chain=chain, cluster=uniform(3, 260), semantics="flush", microbatches=8, ks=AUTO_K
    )
    found = solve(problem, Limits(time_limit_s=1.0, deterministic=True))
    home = {layer: s.gpu for s in found.stages for layer in range(s.first, s.last + 1)}
    assert home[0] == home[4]
    assert home[2] == home[6]
    assert found.per_microbatch < 10_000  # one micro-batch at a time takes 24,000


def test_patience_pays_for_short_messages() -> None:
    """A GPU that never waits for what is 5 ns away loses an op's length again and again."""
    _, costs = equal(4, split=True, memory=Fraction(1))
    placement = tuple(range(4)) * 4
    random = Random(0)
    cuts = next(CutSearch(costs, random, 8, split=True).all(placement))
    of = instance(costs, stages_of(costs, cuts, placement, [True] * len(cuts)), 8)
    shortest: dict[bool, int] = {}
    for rule in [random_rule(of, random) for _ in range(80)]:
        for each in (rule, replace(rule, patience=0)):
            times, _ = schedule_step(of, each)
            assert times is not None
            waits = each.patience > 0
            shortest[waits] = min(shortest.get(waits, times.end), times.end)
    assert shortest[True] < 1.04 * 8 * 12_000 < shortest[False]


@pytest.mark.parametrize(
    ("gpus", "microbatches", "memory", "most"),
    [
        (4, 8, Fraction(1), 1.04),
        (4, 8, Fraction(3, 4), 1.12),
        (4, 8, Fraction(1, 2), 1.26),
    ],
)
def test_equal_layers(gpus: int, microbatches: int, memory: Fraction, most: float) -> None:
    """Step / (m load) with little work; 1F1B needs 1.375."""
    chain, costs = equal(gpus, split=True, memory=memory)
    problem = Problem(
        chain=chain,
        cluster=costs.cluster,
        semantics="flush",
        microbatches=microbatches,
        ks=(1, 2),
    )
    found = solve(problem, Limits(time_limit_s=0.5, deterministic=True))
    assert found.period_ns <= most * microbatches * 12_000


@pytest.mark.parametrize(("times", "most"), [(2, 0.05), (4, 0.02)])
def test_the_bound_is_near_in_ample_memory(times: int, most: float) -> None:
    """At two and four micro-batches a GPU, plans and the bound are that close to each other."""
    chain, costs = equal(4, split=True, memory=Fraction(2))
    problem = Problem(
        chain=chain, cluster=costs.cluster, semantics="flush", microbatches=4 * times, ks=AUTO_K
    )
    found = solve(problem, Limits(time_limit_s=0.5, deterministic=True))
    assert found.gap is not None
    assert found.gap <= most


@pytest.mark.parametrize("gpus", [(0, 1, 0), (1, 0, 1, 0)])
def test_a_layout_of_ones_own(gpus: tuple[int, ...]) -> None:
    """All layers pinned: micro-batches overlap as well as on placements that are searched."""
    chain, costs = equal(2, split=True, memory=Fraction(1))
    cuts = [len(chain.layers) * part // len(gpus) for part in range(len(gpus) + 1)]
    spans = zip(cuts, cuts[1:], gpus, strict=False)
    pins: dict[int | str, int] = {f"{a}..{b - 1}": gpu for a, b, gpu in spans}
    config = planner.Config(
        semantics="flush", microbatches=8, time_limit_s=0.5, deterministic=True, pins=pins
    )
    plan = planner.solve(chain, costs.cluster, config)
    homes = [stage.gpu for stage in plan.stages for _ in range(stage.first, stage.last + 1)]
    asked = [gpu for a, b, gpu in zip(cuts, cuts[1:], gpus, strict=False) for _ in range(a, b)]
    assert homes == asked
    layer = chain.layers[0].forward_ns + chain.layers[0].backward_ns
    assert plan.period_ns <= 1.2 * 8 * layer * max(homes.count(0), homes.count(1))


def test_offloading_under_flush_says_that_no_whole_step_is_planned() -> None:
    """Whole steps do not offload: who asks for both is told what they get."""
    chain, costs = equal(2, split=True, memory=Fraction(1))
    host = Host(memory_bytes=10**9, bandwidth_bytes_per_s=10**9)
    cluster = costs.cluster.model_copy(update={"host": host})
    notes = {}
    for offload in (False, True):
        problem = Problem(
            chain=chain,
            cluster=cluster,
            semantics="flush",
            microbatches=2,
            ks=AUTO_K,
            offload=offload,
        )
        notes[offload] = solve(problem, Limits(time_limit_s=0.3, deterministic=True)).notes
    assert PERIODIC not in notes[False]
    assert PERIODIC in notes[True]


def test_a_step_too_long_for_a_file_says_that_it_is_periodic() -> None:
    """Plan files list 1,024 micro-batches: a longer step repeats a period, and it is told."""
    chain, costs = equal(2, split=True, memory=Fraction(1))
    notes = []
    for microbatches in (1024, 1025):
        config = planner.Config(semantics="flush", microbatches=microbatches)
        asked = problem(chain, costs.cluster, config)
        notes.append(solve(asked, Limits(time_limit_s=0.3, deterministic=True)).notes)
    assert LONG_STEP not in notes[0]
    assert LONG_STEP in notes[1]


def test_progress_tells_of_steps_alone() -> None:
    """The periodic plan that the search starts from is told as the step that it takes."""
    chain, costs = equal(4, split=True, memory=Fraction(1))
    problem = Problem(
        chain=chain, cluster=costs.cluster, semantics="flush", microbatches=8, ks=AUTO_K
    )
    told: list[Fraction] = []
    found = solve(
        problem,
        Limits(time_limit_s=0.4, deterministic=True),
        progress=lambda _s, period, _b, _g, _p: told.append(period) if period else None,
    )
    assert told == sorted(told, reverse=True)
    assert told[-1] * 8 == found.period_ns


def test_a_backward_is_split_only_where_that_is_known() -> None:
    """Without figures of a layer its stage stays whole; the first stage always does."""
    chain, costs = equal(2, split=True, memory=Fraction(1))
    unknown = chain.layers[6].model_copy(update={"backward_weight_ns": None})
    layers = (*chain.layers[:6], unknown, *chain.layers[7:])
    costs = replace(costs, chain=chain.model_copy(update={"layers": layers}))
    stages = stages_of(costs, (0, 2, 4, 6), (0, 1, 0, 1), [True] * 4)
    assert [stage.split_backward for stage in stages] == [False, True, True, False]
    assert not any(each.split_backward for each in stages_of(costs, (0, 4), (0, 1), [False] * 2))


@pytest.mark.parametrize(("more", "expected"), [(0, True), (900, False)])
def test_backwards_are_split_where_that_pays(more: int, expected: bool) -> None:
    """Not where both halves, and the forward before them, take much longer than whole ones."""
    chain, _ = equal(2, split=True, memory=Fraction(1))
    times = {"backward_input_ns": 1000 + more, "forward_split_ns": 1000 + more}
    layers = tuple(layer.model_copy(update=times) for layer in chain.layers)
    chain = chain.model_copy(update={"layers": layers})
    plan = planned(chain, 2, 4, 10**6, latency=5, seconds=0.5)
    assert any(stage.split_backward for stage in plan.stages) == expected


def test_what_takes_no_time_is_not_split() -> None:
    """A stage of activations alone has nothing to put off: its backward is one op."""
    fields = [{"saved_bytes": 5, "backward_weight_ns": time, "saved_for_weight_bytes": 0}
              for time in (2, 0, 0, 2)]  # fmt: skip
    chain = handmade.chain([(2, 4), (2, 2), (2, 2), (2, 4)], fields)
    costs = CostModel(chain, uniform(4, 10**4), "flush", "exact")
    stages = stages_of(costs, (0, 1, 2, 3), (0, 1, 2, 3), [True] * 4)
    assert [stage.split_backward for stage in stages] == [False, False, False, True]
    assert stages_of(costs, (0, 2), (0, 1), [True] * 2)[1].split_backward


@pytest.mark.parametrize("split", [False, True])
def test_a_step_that_no_micro_batch_fits_into_is_ruled_out(split: bool) -> None:
    """At its loss all that its forwards keep is there, whatever a backward is."""
    chain, costs = equal(2, split=split, memory=Fraction(1, 3))
    with pytest.raises(InfeasibleError, match=r"what one micro-batch keeps \(8000 bytes\)"):
        solve(Problem(chain=chain, cluster=costs.cluster, semantics="flush", ks=AUTO_K))
