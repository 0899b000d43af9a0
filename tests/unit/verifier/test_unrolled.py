"""The closed form against an unrolled window of random valid plans, event by event."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeplan.plan import Plan
from pipeplan.verifier import audit, verify
from tests import greedy_split, split_bytes
from tests.greedy_offload import random_plan
from tests.handmade_unrolled import OFFLOAD, F, Unrolled, W, broken, buffers, shifts, states

Draw = Callable[[int], Plan]
DRAWS = [pytest.param(random_plan, id="whole"), pytest.param(greedy_split.random_plan, id="split")]


@settings(max_examples=50, derandomize=True, deadline=None)
@pytest.mark.parametrize("draw", DRAWS)
@given(seed=st.integers(0, 10**6))
def test_memory_equals_the_unrolled_window(draw: Draw, seed: int) -> None:
    """On random valid plans every term of every GPU's row equals the brute-force one."""
    plan = draw(seed)
    assert verify(plan) == ()
    grid = Unrolled(plan).filled()
    for gpu, row in enumerate(audit(plan).memory):
        need = grid.peak(gpu)
        need["message"] += buffers(plan, gpu)
        hosted = plan.hosted(gpu)
        if plan.semantics == "flush" and plan.memory_model == "exact" and hosted:
            work = max(
                layer.optimizer_workspace_bytes
                for stage in hosted
                for layer in plan.chain.layers[stage.first : stage.last + 1]
            )
            if work > sum(need.values()):
                need = {"saved": 0, "working": work, "direct": 0, "message": 0}
        got = {name: getattr(row, f"{name}_bytes") for name in need}
        assert (gpu, got, row.states_bytes) == (gpu, need, states(plan, gpu))
        assert row.peak_bytes == row.states_bytes + sum(need.values())
        assert row.host_bytes == grid.host_bytes(gpu)


@settings(max_examples=35, derandomize=True, deadline=None)
@pytest.mark.parametrize("draw", DRAWS)
@given(seed=st.integers(0, 10**6))
def test_in_flight_and_step_equal_the_unrolled_window(draw: Draw, seed: int) -> None:
    """In-flight counts and (T5), by listing micro-batches one by one."""
    plan = draw(seed)
    grid, told = Unrolled(plan), audit(plan)
    for s in range(len(plan.stages)):
        stays = [(grid.start(F, s, m), grid.end(grid.back(s), s, m)) for m in grid.window]
        inside = [key for key, _ in stays if 0 <= key[0] < plan.period_ns]
        assert told.in_flight[s] == max(sum(a <= x < b for a, b in stays) for x in inside)
    spans = [
        grid.time(kind, stage, m)
        for kind, stage, copy in grid.ops
        for m in range(plan.microbatches)
        if m % plan.k == copy
    ]
    drained = max(end for _, end in spans) - min(begin for begin, _ in spans)
    steady = -(-plan.microbatches * plan.period_ns // plan.k)
    update = told.step_ns - (drained if plan.semantics == "flush" else steady)
    slowest = [
        sum(
            -(-layer.optimizer_ns * 2 // int(2 * plan.cluster.gpus[gpu].speed))
            for stage in plan.hosted(gpu)
            for layer in plan.chain.layers[stage.first : stage.last + 1]
        )
        for gpu in range(len(plan.cluster.gpus))
    ]
    assert update == max(slowest)


@settings(max_examples=30, derandomize=True, deadline=None)
@pytest.mark.parametrize("draw", DRAWS)
@given(seed=st.integers(0, 10**6), data=st.data())
def test_every_move_is_judged_as_the_definition_does(
    draw: Draw, seed: int, data: st.DataObject
) -> None:
    """An op moved anywhere: order and overlap rules agree with the definitions, pair by pair."""
    plan = draw(seed)
    index = data.draw(st.integers(0, len(plan.ops) - 1))
    fields = {
        "start_ns": data.draw(st.integers(0, plan.period_ns - 1)),
        "shift": data.draw(st.integers(0, max(op.shift for op in plan.ops) + 1)),
    }
    ops = list(plan.ops)
    ops[index] = ops[index].model_copy(update=fields)
    plan = plan.model_copy(update={"ops": tuple(ops)})
    names = {v.rule.value for v in verify(plan)} & {"gpu", "link", "fifo", "precedence", "shifts"}
    need = broken(Unrolled(plan))
    if "gpu" in need and copies(plan):  # (O1) says nothing where computes overlap, nor (H3)
        names, need = names - {"precedence"}, need - {"precedence"}
    assert names == need


@pytest.mark.parametrize("seed", range(20))
def test_the_random_plans_differ_in_kind(seed: int) -> None:
    """The generator gives valid plans (its variety is asserted below)."""
    assert verify(random_plan(seed)) == ()


def copies(plan: Plan) -> dict[int, list[int]]:
    """Copies that are offloaded, by stage."""
    found: dict[int, list[int]] = {}
    for op in plan.ops:
        if op.kind is OFFLOAD:
            found.setdefault(op.stage, []).append(op.copy_)
    return found


def shares(plan: Plan) -> bool:
    """Whether two stages of one GPU offload."""
    gpus = [plan.stages[stage].gpu for stage in copies(plan)]
    return len(gpus) > len(set(gpus))


def test_the_random_plans_cover_the_hard_cases() -> None:
    """Among 150 seeds: k > 1, shared GPUs, neighbours on one GPU, wraps, zero lengths, offload."""
    plans = [random_plan(seed) for seed in range(150)]
    seen = {
        "k": any(p.k == 3 for p in plans),
        "wrap": any(op.start_ns + op.duration_ns > p.period_ns for p in plans for op in p.ops),
        "zero compute": any(
            op.gpu is not None and not op.duration_ns for p in plans for op in p.ops
        ),
        "zero transfer": any(
            op.link is not None and not op.duration_ns for p in plans for op in p.ops
        ),
        "shift": any(shifts(p) > 4 for p in plans),
        "apart": any([s.gpu for s in p.stages][:3] in ([0, 1, 0], [1, 0, 1]) for p in plans),
        "neighbours": any(a.gpu == b.gpu for p in plans for a, b in pairwise(p.stages)),
        "half": any(p.cluster.links.duplex == "half" and len(p.stages) > 1 for p in plans),
        "paper": any(p.memory_model == "paper" for p in plans),
        "offload": sum(bool(copies(p)) for p in plans) > 50,
        "some copies": any(p.k > len(held) for p in plans for held in copies(p).values()),
        "two stages": any(shares(p) for p in plans),
        "half way": any(p.cluster.host and p.cluster.host.duplex == "half" for p in plans),
    }
    assert all(seen.values()), seen


def test_the_random_split_plans_cover_the_hard_cases() -> None:
    """Among 300 seeds: inputs that the stage before keeps too, W before and after its backward."""
    seen = dict.fromkeys(("shared", "first", "last", "zero", "two layers", "k", "offload"), 0)
    for plan in map(greedy_split.random_plan, range(300)):
        at = {op.label: op.shift * plan.period_ns + op.start_ns for op in plan.ops}
        for stage in (stage for stage in plan.stages if stage.split_backward):
            seen["two layers"] += stage.last > stage.first
            seen["k"] += plan.k > 1
            seen["offload"] += stage.id in copies(plan)
            seen["zero"] += any(
                op.kind is W and op.stage == stage.id and not op.duration_ns for op in plan.ops
            )
            if split_bytes.weights(plan, stage.id)[2]:
                seen["shared"] += 1
                back = at[f"{stage.id - 1}{plan.stages[stage.id - 1].backward}0"]
                seen["first" if at[f"{stage.id}W0"] < back else "last"] += 1
        if min(seen.values()) > 10:
            break
    assert all(count > 10 for count in seen.values()), seen
