"""A schedule as a start of the paper's ILP: every row of the literal model judges it."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from ortools.math_opt.python import mathopt

from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.memory import memory_rows
from pipeplan.ilp.paper import memory, method, scheduling
from pipeplan.ilp.paper.instance import from_costs
from pipeplan.ilp.paper.method import Backend, PaperResult, solve
from pipeplan.ilp.paper.start import start_values
from pipeplan.ilp.paper.variables import PaperVariables, Term, create
from pipeplan.ilp.schedule import Schedule
from pipeplan.ilp.warm_start import schedule_of
from pipeplan.planner import Config
from pipeplan.planner import solve as plan
from pipeplan.testing.plans import random_stages, scheduled
from tests.unit.ilp.test_paper import GB_S, SLOTS, costs_of, random_chain


def random_schedule(seed: int) -> tuple[CostModel, Schedule]:
    """Any stages and orders, non-contiguous ones too, on GPUs with just the bytes they need."""
    rng = Random(seed)
    layers, gpus = rng.randint(2, 6), rng.randint(1, 4)
    chain = random_chain(seed, layers, 6)
    bandwidth = rng.choice((None, GB_S))
    roomy = costs_of(chain, gpus, 10**6, bandwidth)
    drawn = scheduled(rng, chain, roomy.cluster, random_stages(rng, layers, gpus), 1)
    schedule = schedule_of(drawn)
    peak = max(row.peak_bytes for row in memory_rows(roomy, schedule))
    return costs_of(chain, gpus, peak, bandwidth), schedule


def built(
    costs: CostModel, schedule: Schedule
) -> tuple[mathopt.Model, PaperVariables, dict[Term, float]]:
    """The literal model, its variables, and their values for the schedule."""
    exact = from_costs(costs, None)
    model = mathopt.Model()
    x = create(model, exact, integer=True, count_slots=True)
    scheduling.add(model, exact, x)
    memory.add(model, exact, x)
    return model, x, start_values(exact, x, schedule, 1.0)


def broken(model: mathopt.Model, values: dict[Term, float]) -> list[str]:
    """Rows, bounds and integrality that values of all variables break."""
    said = [
        f"{variable}: {values[variable]}"
        for variable in model.variables()
        if not variable.lower_bound <= values[variable] <= variable.upper_bound
        or (variable.integer and values[variable] != int(values[variable]))
    ]
    for row in model.linear_constraints():
        total = sum(row.get_coefficient(each) * values[each] for each in model.row_nonzeros(row))
        if not row.lower_bound <= total <= row.upper_bound:
            said.append(str(row.as_bounded_linear_expression()))
    return said


@pytest.mark.parametrize("seed", [0, 1, 3, 5, 7, 8, 9, 11, 12, 16, 17, 21, 22])
def test_a_schedule_keeps_every_row(seed: int) -> None:
    """(1)-(36) and the rows of ours hold for its values, in the bytes that it needs."""
    costs, schedule = random_schedule(seed)
    model, x, values = built(costs, schedule)
    assert broken(model, values) == []
    assert values[x.period] == schedule.period


def test_one_byte_less_breaks_a_row() -> None:
    """The rows that judge are those of the memory: (36) alone, on the GPU of the peak."""
    costs, schedule = random_schedule(5)
    less = costs_of(costs.chain, costs.gpus, costs.budgets[0] - 1, GB_S)
    model, _, values = built(less, schedule)
    assert broken(model, values)


def test_a_second_slot_is_among_the_values() -> None:
    """(P5): where messages wait longer than a period the start says so, and keeps every row."""
    chain, memory_bytes, gpus, _ = SLOTS["long waits"]
    costs = costs_of(chain, gpus, memory_bytes, GB_S)
    found = solve(costs, time_limit=60).schedule
    assert found is not None
    model, x, values = built(costs, found)
    assert broken(model, values) == []
    assert any(values[slot] for slots in x.second_slot.values() for slot in slots)


@pytest.mark.parametrize("backend", ["highs", "scip"])
def test_a_start_is_the_first_solution(backend: Backend) -> None:
    """Within a limit that is too short for any plan, the start is what comes back."""
    costs, schedule = random_schedule(5)
    cold = solve(costs, time_limit=1e-3, backend=backend)
    warm = solve(costs, time_limit=1e-3, backend=backend, start=schedule)
    assert cold.schedule is None
    assert warm.schedule is not None
    assert warm.schedule.period <= schedule.period


def test_a_start_that_helps_nobody_is_left_out() -> None:
    """A period longer than one micro-batch at a time needs is outside of the model."""
    costs, schedule = random_schedule(2)
    assert schedule.period > from_costs(costs, None).horizon
    assert solve(costs, time_limit=60, start=schedule).status == "optimal"


def test_the_door_hands_the_best_schedule_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """A warm start of `ilp.solve` is the start of the ILP, and stays where that finds nothing."""
    costs, _ = random_schedule(5)
    config = Config(memory_model="paper", k=1, time_limit_s=0.1, deterministic=True)
    first = plan(costs.chain, costs.cluster, config)
    seen: list[Schedule | None] = []

    def nothing_found(_: CostModel, *, start: Schedule | None, **__: object) -> PaperResult:
        seen.append(start)
        return PaperResult("unknown", None, None, 0.0)

    monkeypatch.setattr(method, "solve", nothing_found)
    again = plan(costs.chain, costs.cluster, replace(config, method="paper-ilp", resume=first))
    assert again.period_ns == first.period_ns
    assert [start and start.period for start in seen] == [first.period_ns]
