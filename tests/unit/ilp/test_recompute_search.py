"""Allocations and runs sought together, in turns: steps are sound, sums right, time is kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from random import Random
from typing import Any, Literal

import pytest

from pipeplan.cluster import Cluster, Host, uniform
from pipeplan.ilp import search
from pipeplan.ilp.clock import DeterministicClock
from pipeplan.ilp.contiguous.dynamic_program import ContiguousPartition
from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.incumbent import Incumbent
from pipeplan.ilp.local_search.allocation import Allocation
from pipeplan.ilp.local_search.balancing import Estimate
from pipeplan.ilp.local_search.list_scheduler import ModuloListScheduler
from pipeplan.ilp.memory import memory_rows
from pipeplan.ilp.objective import cost
from pipeplan.ilp.offload.relief_estimate import estimate_relief, offloadable_segments
from pipeplan.ilp.offload.repair import repair_by_offloading
from pipeplan.ilp.recompute import search as recompute_search
from pipeplan.ilp.recompute.annealing import RecomputeAnnealing
from pipeplan.ilp.recompute.assignment_annealing import (
    KEPT,
    OPTIONS,
    RECOMPUTED,
    RecomputeAssignmentAnnealing,
)
from pipeplan.ilp.recompute.balancing import joined
from pipeplan.ilp.recompute.contracted_chain import contract
from pipeplan.ilp.recompute.contraction_cache import ContractionCache, clip_to_stages
from pipeplan.ilp.recompute.dynamic_program import RecomputeDP
from pipeplan.ilp.recompute.initial_sets import InitialSets
from pipeplan.ilp.recompute.joint_incumbent import JointIncumbent
from pipeplan.ilp.recompute.moves import mutate, ways
from pipeplan.ilp.recompute.search_result import SearchResult
from pipeplan.ilp.recompute.trim import trim
from pipeplan.ilp.runs import Run, Runs
from pipeplan.plan import OpKind
from pipeplan.planner import Config, solve
from pipeplan.testing.instances import Case, chain_of
from pipeplan.testing.networks import build
from pipeplan.verifier import verify
from tests.searches import limits
from tests.unit.ilp.test_recompute import some_chain

GIB = 2**30


def machines(gpus: int, memory: int) -> Cluster:
    """Equal GPUs, 12 GB/s."""
    return uniform(gpus, memory, bandwidth_bytes_per_s=12 * 10**9)


def random_costs(seed: int, layers: int, options: int = 0, **cluster: Any) -> CostModel:
    """A random chain with small numbers, of `some_chain`."""
    chain = some_chain(seed, layers, options)
    usual = {"bandwidth_bytes_per_s": 10**9} | cluster
    return CostModel(chain, uniform(3, usual.pop("memory", 60), **usual), "2bw", "exact")


def test_runs_end_at_borders() -> None:
    """A run across borders becomes one run in each stage; what is kept stays kept."""
    stages = [(0, 2), (3, 3), (4, 9)]
    runs = [Run(1, 5), Run(7, 7, 1), Run(8, 8)]
    assert clip_to_stages(runs, stages) == (
        Run(1, 2),
        Run(3, 3),
        Run(4, 5),
        Run(7, 7, 1),
        Run(8, 8),
    )
    assert clip_to_stages([Run(0, 9)], stages) == (Run(0, 2), Run(3, 3), Run(4, 9))
    assert clip_to_stages([], stages) == ()


@pytest.mark.parametrize("seed", range(6))
def test_a_step_changes_one_stage_alone(seed: int) -> None:
    """Runs stay disjoint, in order and inside their stages; few layers and many are reached."""
    random, stages = Random(seed), [(0, 4), (5, 5), (6, 11)]
    runs: Runs = ()
    counts, options = set(), set[Run]()
    for _ in range(600):
        stage = random.choice(stages)
        offered = [(Run(6, 7), Run(9, 11))] if stage == (6, 11) else []
        given = [Run(7, 7, 0), Run(7, 7, 1), Run(10, 10, 0)] if stage == (6, 11) else []
        new = mutate(random, runs, stage, offered, given)
        assert clip_to_stages(new, stages) == new
        assert all(run.first <= run.last for run in new)
        assert all(one.last < other.first for one, other in pairwise(new))
        outside = [run for run in runs if not stage[0] <= run.first <= stage[1]]
        assert outside == [run for run in new if not stage[0] <= run.first <= stage[1]]
        runs = new
        counts.add(sum(run.last + 1 - run.first for run in runs))
        options |= {run for run in runs if run.option is not None}
    assert options == {Run(7, 7, 0), Run(7, 7, 1), Run(10, 10, 0)}
    assert counts >= set(range(4, 12))


def test_joined_runs_cover_the_same_layers() -> None:
    """However long runs may be, the same layers are recomputed, and none crosses a border."""
    single = (*(Run(layer, layer) for layer in (1, 2, 3, 4, 6)), Run(7, 7, 0), Run(8, 8))
    found = list(joined(single, [(0, 2), (3, 8)]))
    assert found[0] == single
    assert (Run(1, 2), Run(3, 4), Run(6, 6), Run(7, 7, 0), Run(8, 8)) in found
    for runs in found:
        assert [n for a, b, *_ in runs for n in range(a, b + 1)] == [1, 2, 3, 4, 6, 7, 8]
        assert Run(7, 7, 0) in runs


def test_pieces_are_merged_chains() -> None:
    """A merged chain made of known layers is the one that is made from scratch."""
    costs = random_costs(5, 9)
    pieces, random = ContractionCache(costs), Random(0)
    for _ in range(40):
        runs = mutate(random, (), (0, 8), [])
        chain, mine = pieces.of(runs)
        assert chain == contract(costs.chain, runs)
        assert mine.chain == chain.chain
        assert mine.recomputed == chain.recomputed
        assert pieces.of(runs)[1] is mine


def test_sums_of_a_balance_stay_right() -> None:
    """After thousands of steps the total is that of the same allocation and ways from scratch."""
    used = set[int]()
    for seed in range(5):
        costs = random_costs(seed, 10, options=2)
        variants = [ContractionCache(costs).of(runs)[1] for runs in ways(costs.chain)]
        period = costs.load_ns(0, 9, 0) // 2
        guess = Estimate(Allocation((0,) * 10, frozenset()), [6.0] * 10, [0.1] * 3)
        balance = RecomputeAssignmentAnnealing(costs, variants, period, guess, [0] * 10, 0.01)
        balance.anneal(Random(seed), 3000)
        known = replace(guess, layout=Allocation(balance.homes, frozenset()))
        fresh = RecomputeAssignmentAnnealing(costs, variants, period, known, balance.chosen, 0.01)
        assert fresh.total == pytest.approx(balance.total, abs=1e-6)
        used.update(balance.chosen)
    assert used == {KEPT, RECOMPUTED, OPTIONS, OPTIONS + 1}


def placed(costs: CostModel, random: Random) -> ModuloListScheduler | None:
    """A random allocation at a roomy period."""
    cuts = sorted(random.sample(range(1, costs.layers), 3))
    bounds = list(zip([0, *cuts], [*cuts, costs.layers], strict=True))
    runs = [(first, end - 1, number % 3) for number, (first, end) in enumerate(bounds)]
    placing = ModuloListScheduler(costs, runs, costs.load_ns(0, costs.layers - 1, 0) // 2)
    return placing if placing.place() else None


def test_relief_is_nearly_what_fits() -> None:
    """Where relief covers what a fast host must take, sending it away nearly always fits."""
    host = Host(memory_bytes=10**9, bandwidth_bytes_per_s=2 * 10**10)
    covered = mended = asked = 0
    for seed in range(60):
        costs = random_costs(seed, 9, host=host, memory=10**6)
        placing = placed(costs, Random(seed))
        if placing is None:
            continue
        peaks = [row.peak_bytes for row in memory_rows(costs, placing.schedule())]
        memory = int(max(peaks) * 0.8)
        scarce = replace(costs, cluster=costs.cluster.model_copy(update={"gpus": gpus(memory)}))
        over = [peak - memory for peak in peaks]
        away = estimate_relief(scarce, placing.runs, placing.times, placing.period, over)
        asked += 1
        assert all(0 <= size <= max(0, lack) + 99 for size, lack in zip(away, over, strict=True))
        if all(size >= lack for size, lack in zip(away, over, strict=True)):
            covered += 1
            mended += repair_by_offloading(scarce, placing.schedule()) is not None
    assert covered >= 5
    assert mended >= 0.7 * covered
    assert covered < asked, "what no micro-batch keeps cannot leave"


def gpus(memory: int) -> tuple[Any, ...]:
    """Three equal ones."""
    return uniform(3, memory).gpus


def test_relief_knows_the_way() -> None:
    """A way that is too slow takes nothing away; a fast one all that rests, in whole periods."""
    costs = random_costs(1, 8, host=Host(memory_bytes=10**9, bandwidth_bytes_per_s=1))
    times = {(OpKind.F, 0): (0,), (OpKind.B, 0): (100_000 + costs.forward_ns(0, 7, 0),)}
    asked = [(0, 7, 0)], times, 30_000, [10**6, 0, 0]
    assert estimate_relief(costs, *asked) == [0, 0, 0]
    fast = costs.cluster.model_copy(
        update={"host": Host(memory_bytes=10**9, bandwidth_bytes_per_s=10**12)}
    )
    assert estimate_relief(replace(costs, cluster=fast), *asked) == [
        3 * offloadable_segments(costs, 0, 7, covered=False),
        0,
        0,
    ]
    assert offloadable_segments(costs, 0, 7, covered=False) > 0


def test_shorter_than_every_contiguous_plan() -> None:
    """ResNet-18 on 4 GPUs at 0.6 of its memory: several stages a GPU, and runs, beat 1F1B."""
    chain, cluster = chain_of("resnet18"), Case("resnet18", 4, 0.6, "exact").cluster
    config = Config(time_limit_s=4, workers=1, recompute="auto", deterministic=True)
    one = solve(chain, cluster, replace(config, method="contiguous"))
    free = solve(chain, cluster, config)
    assert verify(free) == ()
    assert any(stage.remat for stage in free.stages)
    assert len(free.stages) > 4
    assert free.period_per_microbatch < Fraction(98, 100) * one.period_per_microbatch


def in_vain(**asked: Any) -> JointIncumbent:
    """A plan with two runs where memory is ample."""
    costs = random_costs(4, 6, memory=10**6)
    state = Incumbent(costs, limits(**asked))
    state.raise_bound("any", Fraction(1))
    joint = JointIncumbent(state, SearchResult(state))
    chain, mine = ContractionCache(costs).of((Run(0, 1), Run(4, 4)))
    placing = ModuloListScheduler(
        mine, [(0, 1, 0), (2, 3, 1), (4, 4, 2)], 2 * mine.load_ns(0, 4, 0)
    )
    assert placing.place()
    assert joint.offer(chain, mine, placing.schedule())
    return joint


def test_nothing_is_computed_again_in_vain() -> None:
    """Where memory is ample every run of a plan is kept, and the period falls with the load."""
    joint = in_vain()
    before, cuts = joint.period, [stage.layers for stage in joint.best.stages]
    trim(joint)
    assert joint.best.contracted is not None
    assert not joint.best.contracted.runs
    assert [stage.layers for stage in joint.best.stages] == cuts
    assert joint.period is not None
    assert before is not None
    assert joint.period < before


def test_trimming_ends_well_after_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that there is no time for stay; where work is counted each one is tried."""
    monkeypatch.setattr("pipeplan.ilp.recompute.trim.BEYOND_S", -1.0)
    hurried, counted = in_vain(time_limit_s=1e-6), in_vain(time_limit_s=1e-6, deterministic=True)
    for joint, left in ((hurried, 2), (counted, 0)):
        trim(joint)
        assert joint.best.contracted is not None
        assert len(joint.best.contracted.runs) == left


def test_the_walk_finds_runs_by_itself() -> None:
    """From a serial plan that computes all again it finds shorter ones, each of them exact."""
    found = 0
    for seed in range(6):
        costs = random_costs(seed, 7, memory=70)
        state = Incumbent(costs, replace(limits(), clock=DeterministicClock(), time_limit_s=20))
        state.raise_bound("any", Fraction(1))
        joint = JointIncumbent(state, SearchResult(state))
        chain, mine = ContractionCache(costs).of((Run(0, 2), Run(3, 6)))
        placing = ModuloListScheduler(mine, [(0, 0, 0), (1, 1, 1)], mine.load_ns(0, 1, 0))
        if not placing.place() or not joint.offer(chain, mine, placing.schedule()):
            continue
        before = joint.period
        RecomputeAnnealing(joint, None).run(1)
        best, known = joint.best.state, joint.period
        assert best.best is not None
        assert before is not None
        assert known is not None
        assert best.is_feasible(best.best)
        assert joint.best.cost == cost(best.costs, best.best, state.options.microbatches)
        found += known < before
    assert found >= 2


def test_what_cannot_be_is_said_at_once() -> None:
    """Where no contiguous plan exists, however much is recomputed, no time is spent on it."""
    costs = random_costs(3, 6, memory=30)
    state = Incumbent(costs, limits(contiguous_only=True, time_limit_s=60))
    assert recompute_search.run(state).state.best is None
    assert state.infeasible is not None
    assert state.remaining > 30


def phases(**asked: Any) -> list[str]:
    """What a search for ResNet-18 on two GPUs with a host does."""
    host = Host(memory_bytes=100 * GIB, bandwidth_bytes_per_s=12 * 10**9)
    cluster = machines(2, 4 * GIB).model_copy(update={"host": host})
    seen: list[str] = []
    config = Config(workers=1, recompute="auto", offload="auto", **asked)
    solve(build("resnet18", 8, 1000), cluster, config, lambda *row: seen.append(row[4]))
    return seen


def test_when_time_is_over_only_required_sets_are_tried() -> None:
    """With a plan at hand and no time: no offloading, no bound, no turns; else all of them."""
    hurried = phases(time_limit_s=1e-6)
    assert "recompute options" in hurried
    for phase in ("offload options", "recompute bound"):
        assert phase not in hurried
    assert not any(phase.startswith("recompute balancing") for phase in hurried)
    patient = phases(time_limit_s=1, deterministic=True, gap=0.0)
    assert {"offload options", "recompute bound"} <= set(patient)
    assert any(phase.startswith("recompute balancing") for phase in patient)


def test_progress_never_forgets_the_best_plan() -> None:
    """Whatever part of the search speaks, periods only fall once there is a plan."""
    seen: list[Fraction | None] = []
    config = Config(workers=1, recompute="auto", time_limit_s=1, deterministic=True)
    plan = solve(
        build("resnet18", 8, 1000),
        machines(2, 4 * GIB),
        config,
        lambda *row: seen.append(row[1]),
    )
    known = seen[next(n for n, period in enumerate(seen) if period is not None) :]
    assert None not in known
    assert known == sorted(known, key=lambda period: -(period or 0))
    assert known[-1] == plan.period_per_microbatch


@pytest.mark.parametrize(("offload", "said"), [("off", 0), ("auto", 1)])
def test_long_chains_say_that_nothing_is_recomputed(
    offload: Literal["off", "auto"], said: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With offloading, whose tables are larger, chains are long earlier."""
    monkeypatch.setattr(recompute_search, "MOST_LAYERS", {False: 6, True: 5})
    chain = random_costs(0, 6, memory=10**6).chain
    host = Host(memory_bytes=10**9, bandwidth_bytes_per_s=10**9)
    cluster = machines(3, 10**6).model_copy(update={"host": host})
    config = Config(recompute="auto", offload=offload, time_limit_s=0.5, deterministic=True)
    notes = solve(chain, cluster, config).solver.notes
    assert sum("recomputation is only planned for" in note for note in notes) == said


def test_the_contiguous_period_is_kept() -> None:
    """A better plan of another chain, which is not contiguous, leaves it as it is."""
    costs = random_costs(0, 6, memory=10**6)
    found = [Incumbent(costs, limits()) for _ in range(2)]
    for state in found:
        state.raise_bound("any", Fraction(1))
        search.contiguous(state)
    first, better = found
    assert first.best is not None
    assert first.contiguous == first.best.per_microbatch
    joint = JointIncumbent(Incumbent(costs, limits()), SearchResult(first))
    joint.take(SearchResult(first))
    better.best, better.contiguous = replace(first.best, period=first.best.period - 1), None
    joint.take(SearchResult(better))
    assert joint.best.state is better
    assert joint.contiguous == first.contiguous


def test_room_for_messages_is_sought_from_the_period_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No shorter period is asked for again, and the answer is that of a search from below."""
    asked: list[tuple[RecomputeDP, int, ContiguousPartition | None]] = []
    shortest = RecomputeDP.shortest

    def watched(
        solver: RecomputeDP, lowest: int, over: Callable[[], bool]
    ) -> ContiguousPartition | None:
        found = shortest(solver, lowest, over)
        asked.append((solver, lowest, found))
        return found

    monkeypatch.setattr(RecomputeDP, "shortest", watched)
    longer = 0
    for seed in range(12):
        costs = random_costs(seed, 6, memory=(45, 60, 80)[seed % 3])
        state = Incumbent(costs, replace(limits(), clock=DeterministicClock()))
        state.raise_bound("any", Fraction(1))
        asked.clear()
        list(InitialSets(JointIncumbent(state, SearchResult(state))))
        (_, low, first), *others = asked
        if first is None:
            continue
        careful, begun, second = others[0]
        assert (low, begun) == (1, first.period)
        assert careful.messages
        assert second == shortest(careful, 1)
        longer += second is not None and second.period > first.period
    assert longer >= 2


def test_candidates_come_once() -> None:
    """No set of runs is offered twice, and those of the best 1F1B partitions come first, sure."""
    seen = 0
    for seed in range(12):
        costs = random_costs(seed, 6, memory=(45, 60, 80)[seed % 3])
        state = Incumbent(costs, replace(limits(), clock=DeterministicClock()))
        state.raise_bound("any", Fraction(1))
        found = list(InitialSets(JointIncumbent(state, SearchResult(state))))
        assert len({candidate.contracted.runs for candidate in found}) == len(found)
        assert all(candidate.contracted.runs for candidate in found)
        flags = [candidate.required for candidate in found]
        assert flags == sorted(flags, reverse=True)
        seen += sum(flags)
    assert seen >= 5
