"""One GPU: the per-device planner's schedules as runs of layers, and what of them leaves."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any, Literal

import pytest

from pipeplan.chain import Chain
from pipeplan.cluster import Host, uniform
from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.memory import fits, memory_rows
from pipeplan.ilp.memory_events import ExactMemoryEvents
from pipeplan.ilp.offload.one_at_a_time import DeviceShare, OneAtATime
from pipeplan.ilp.recompute import one_gpu
from pipeplan.ilp.recompute.contracted_chain import contract
from pipeplan.ilp.recompute.one_gpu import in_one_stage
from pipeplan.ilp.recompute.persistent import persistent_runs, runs_of
from pipeplan.ilp.runs import Run
from pipeplan.plan import OpKind, Plan, Semantics
from pipeplan.planner import Config, solve
from pipeplan.remat import from_chain, judge, rematerialize_chain
from pipeplan.remat.checkpointing.periodic import keep_all, periodic
from pipeplan.remat.checkpointing.rotor import persistent_schedules, rotor
from pipeplan.remat.late_acceptance import always
from pipeplan.testing.instances import chain_of
from tests import grids
from tests.unit.ilp.test_recompute import some_chain


@pytest.mark.parametrize("seed", range(6))
def test_a_schedule_takes_as_long_as_its_runs(seed: int) -> None:
    """By the judge of device schedules and by the contracted chain, of all budgets."""
    chain = some_chain(seed, 7)
    costs = from_chain(chain)
    budget = judge(costs, keep_all(costs)).peak_bytes
    seen = 0
    for schedule in persistent_schedules(costs, budget, 40):
        merged = contract(chain, runs_of(schedule.ops)).of(
            CostModel(chain, uniform(1, 0), "flush", "exact")
        )
        assert in_one_stage(merged).period == judge(costs, schedule).makespan_ns
        seen += 1
    assert seen > 1


def test_runs_of_periodic_checkpoints() -> None:
    """Each segment but the last is a run, whatever is given up between."""
    costs = from_chain(some_chain(1, 7))
    assert runs_of(periodic(costs, 1).ops) == ()
    assert runs_of(periodic(costs, 3).ops) == (Run(0, 1), Run(2, 3))


def test_one_table_has_the_schedules_of_all_budgets() -> None:
    """Rotor's own at the largest; then longer ones that need less, each time once."""
    costs = from_chain(chain_of("gpt8"))
    budget = judge(costs, keep_all(costs)).peak_bytes * 3 // 4
    found = [judge(costs, each) for each in persistent_schedules(costs, budget, 60)]
    best = rotor(costs, budget, 60)
    assert best is not None
    assert found[0].makespan_ns == judge(costs, best).makespan_ns
    times = [each.makespan_ns for each in found]
    assert times == sorted(set(times))
    assert max(each.peak_bytes for each in found) <= budget
    assert list(persistent_runs(chain_of("gpt8"), 0)) == []


def _planned(share: float, name: str = "resnet18", **asked: Any) -> tuple[Plan, Fraction]:
    """A plan on one GPU, and Rotor's time in as much memory.

    It is a share of what keeping all takes beside the states.
    """
    chain = chain_of(name)
    costs = from_chain(chain)
    extra = judge(costs, keep_all(costs)).peak_bytes - costs.static
    bandwidth = extra * 10**9 // (2 * costs.compute)
    budget = costs.static + int(share * extra)
    known = rematerialize_chain(costs, budget, "rotor")
    more = sum(
        layer.weight_bytes + layer.waiting_gradient_bytes + layer.optimizer_workspace_bytes
        for layer in chain.layers
    )
    host = Host(memory_bytes=2**50, bandwidth_bytes_per_s=bandwidth, duplex="half")
    cluster = uniform(1, budget + more).model_copy(update={"host": host})
    config = Config(recompute="auto", time_limit_s=0.5, deterministic=True, workers=1, **asked)
    return solve(chain, cluster, config), Fraction(known.outcome.makespan_ns)


@grids.each_value(share=[0.5, 0.7], offload=["off", "auto"])
def test_a_plan_is_no_longer_than_the_per_device_planner(share: float, offload: str) -> None:
    """Within as much memory; runs that hold runs count where plans without them fit, too."""
    plan, known = _planned(share, offload=offload)
    assert plan.period_per_microbatch <= known


def test_local_search_finds_shorter_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is recomputed beside what leaves: changed sets beat those of persistent schedules."""
    plan, known = _planned(0.5, "gpt8", offload="auto")
    monkeypatch.setattr(one_gpu._Looks, "search", lambda *_: None)
    without, _ = _planned(0.5, "gpt8", offload="auto")
    assert plan.period_per_microbatch < without.period_per_microbatch <= known


def lasting(chain: Chain) -> Chain:
    """Every op takes a ns more."""
    layers = tuple(
        layer.model_copy(
            update={"forward_ns": layer.forward_ns + 1, "backward_ns": layer.backward_ns + 1}
        )
        for layer in chain.layers
    )
    return chain.model_copy(update={"layers": layers})


@grids.each_value(semantics=["flush", "2bw"], duplex=["half", "full"])
def test_what_one_gpu_offloads_fits(semantics: Semantics, duplex: Literal["half", "full"]) -> None:
    """The per-device planner counts no byte too few, and no time that a rule forbids.

    Where every op lasts, that is: ops without length have an order of their own (O5). Some chains
    have such schedules below the budget of one stage, some of these wait for transfers, and
    in some saved inputs leave, whole ones with their forward. Choosing of each stage what it sends
    makes some shorter.
    """
    found, waited, entered, early, shorter = 0, 0, 0, 0, 0
    host = Host(memory_bytes=10**9, bandwidth_bytes_per_s=10**9, duplex=duplex)
    for seed in range(10, 16):
        ample = CostModel(
            lasting(some_chain(seed, 6)), uniform(1, 10**6, host=host), semantics, "exact"
        )
        whole = ample.segment(0, 5)
        peak = whole.states + max(whole.running, whole.saved + whole.backward, whole.optimizer)
        for eighths in (5, 6, 7):
            budget = peak * eighths // 8
            if budget < whole.states + whole.optimizer:
                continue
            costs = replace(ample, cluster=uniform(1, budget, host=host))
            planner = OneAtATime(costs, DeviceShare((0, 5), 0, budget))
            schedules = list(planner.schedules())
            planner.choose(always)
            chosen = list(planner.schedules())
            assert len(chosen) >= bool(schedules)
            for schedule in (*schedules, *chosen):
                sweep = ExactMemoryEvents(costs, schedule)
                assert fits(memory_rows(costs, schedule))
                for each in schedule.offloads:
                    leaves, returns = each.times[0]
                    assert leaves + each.ns <= sweep.deferred(each.stage, returns)
                    begin = schedule.times[OpKind.F, each.stage][0]
                    end = begin + sweep.length((OpKind.F, each.stage))
                    first = schedule.stages[each.stage].first
                    whole_input = not each.runs and each.size == costs.chain.input_of(first)
                    assert leaves >= (begin if whole_input else end)
                    entered += each.input
                    early += leaves < end
                found += 1
                waited += schedule.period > costs.load_ns(0, 5, 0)
            if schedules:
                periods = [min(each.period for each in some) for some in (schedules, chosen)]
                assert periods[1] <= periods[0]
                shorter += periods[1] < periods[0]
    assert found >= 18
    assert waited
    assert entered
    assert early
    assert shorter
