"""Whatever parses is judged: the verifier never raises, and what it accepts keeps its word."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from pipeplan.errors import InputError
from pipeplan.plan import Plan
from pipeplan.verifier import Violation, audit, verify
from tests.greedy_offload import random_plan

SHIFTS = st.sampled_from((0, 1, 2, 3, 50, 10**6))
NUMBERS = st.sampled_from((0, 1, 2, 3, 7, 50, 2**31, 2**62))


def places(value: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Every place in a JSON value that holds something other than an object or list."""
    if isinstance(value, dict):
        return [found for key in value for found in places(value[key], (*path, key))]
    if isinstance(value, list):
        inner = [found for i, entry in enumerate(value) for found in places(entry, (*path, i))]
        return [*inner, path]
    return [path]


def change(data: Any, path: tuple[str | int, ...], draw: st.DataObject) -> None:
    """Another number at `path`; at a list, an entry less or one twice."""
    for key in path[:-1]:
        data = data[key]
    old = data[path[-1]]
    if isinstance(old, list) and old:
        index = draw.draw(st.integers(0, len(old) - 1))
        data[path[-1]] = draw.draw(
            st.sampled_from(([*old[:index], *old[index + 1 :]], [*old, old[index]], old[::-1]))
        )
    elif isinstance(old, str):
        data[path[-1]] = draw.draw(
            st.sampled_from(
                ("", "F", "B", "SEND_F", "OFFLOAD", "flush", "2bw", "paper", "half", "optimal")
            )
        )
    else:
        data[path[-1]] = draw.draw(NUMBERS)


@settings(max_examples=130, derandomize=True, deadline=None)
@given(st.integers(0, 400), st.data())
def test_any_plan_that_parses_is_judged(seed: int, draw: st.DataObject) -> None:
    """One to three changes anywhere in a valid plan's file: violations or none, never a crash."""
    data = json.loads(random_plan(seed).to_json())
    for _ in range(draw.draw(st.integers(1, 3))):
        found = places(data)
        change(data, found[draw.draw(st.integers(0, len(found) - 1))], draw)
    try:
        plan = Plan.from_data(data)
    except InputError:
        return
    violations = verify(plan)
    assert all(isinstance(violation, Violation) for violation in violations)
    assert all("\n" not in str(violation) for violation in violations)
    if not violations:
        told = audit(plan)
        assert (told.memory, told.step_ns) == (plan.memory, plan.step_ns)


@settings(max_examples=70, derandomize=True, deadline=None)
@given(st.integers(0, 400), st.data())
def test_any_schedule_is_audited_or_refused(seed: int, draw: st.DataObject) -> None:
    """Numbers of the ops changed at will: an audit, or bytes that no file can hold."""
    data = json.loads(random_plan(seed).to_json())
    for op in data["ops"]:
        for field in ("start_ns", "shift", "duration_ns"):
            if draw.draw(st.booleans()):
                op[field] = draw.draw(SHIFTS if field == "shift" else NUMBERS)
    plan = Plan.from_data(data)
    try:
        told = audit(plan)
    except InputError:
        return
    assert len(told.memory) == len(plan.cluster.gpus)
    assert len(told.in_flight) == len(plan.stages)
