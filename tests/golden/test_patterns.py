"""Figures 2, 8 and 9 of paper 002: what a pattern's places say of micro-batches and bytes.

Beaumont, Eyraud-Dubois, Shilova, "Pipelined Model Parallelism" (2020), Definition 1, Lemmas 8
to 10. Plans are made as the text says that the figures illustrate; verifier and simulator judge
them. Figure 10 by itself is tested in test_paper_examples_verifier.py.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from itertools import accumulate, pairwise, permutations

import pytest

from pipeplan.chain import Chain
from pipeplan.cluster import uniform
from pipeplan.plan import MemoryModel, OpKind, Plan
from pipeplan.verifier import audit, verify
from tests import handmade
from tests.golden.test_paper_examples_planner import chain
from tests.golden.test_theorems_pipeline import (
    Stages,
    Task,
    assert_right,
    compute_order,
    placed,
    singles,
)

# --- Figures 2 and 9: which micro-batch an op of the period works on ----------------------------


@pytest.mark.parametrize("seed", range(30))
def test_shifts_and_activations_follow_from_places(seed: int) -> None:
    """Lemmas 9 and 10: v and v' of (23)-(30) give the least shifts and the bytes that are kept."""
    of, stages, period, tau = pattern(seed)
    order, late = [*tau], lateness(of, period, tau)
    shift = dict(zip(order, accumulate(late.values(), initial=0), strict=True))
    plan = shifted(of, stages, period, tau, shift)
    assert_right(plan)
    for broken, needed in late.items():
        if needed:  # one shift less from here on is too early
            least = {op: shift[op] - (order.index(op) > order.index(broken)) for op in order}
            (found,) = verify(shifted(of, stages, period, tau, least))
            assert found.rule.value == "precedence"

    for gpu in {gpu for _, _, gpu in stages}:
        mine = [s for s, (_, _, at) in enumerate(stages) if at == gpu]
        kept = max(
            sum(stored(s, op, late, tau) * of.layers[s].saved_bytes for s in mine)
            for op in order
            if op[1] in mine
        )
        assert plan.memory[gpu].peak_bytes == plan.memory[gpu].saved_bytes == kept
    assert audit(plan).in_flight == tuple(
        max(stored(s, op, late, tau) for op in order if stages[op[1]][2] == stages[s][2])
        for s in range(len(stages))
    )


def pattern(seed: int) -> tuple[Chain, Stages, int, dict[Task, int]]:
    """A chain on two GPUs, and starts in a period by (17)-(20): windows that are not aligned.

    Starts are in the order in which a micro-batch meets the ops; F and B of a layer last as long.
    """
    draw = random.Random(seed)
    layers = draw.choice([2, 3, 4])
    costs = [draw.randint(1, 6) for _ in range(layers)]
    stages = singles([0, 1, *(draw.randrange(2) for _ in range(layers - 2))])
    of = chain(costs, saved_bytes=[100**i for i in range(layers)])
    loads = [sum(2 * costs[s] for s, _, at in stages if at == gpu) for gpu in (0, 1)]
    period, order = max(loads) + draw.randint(0, 2), compute_order(stages)
    tau = dict.fromkeys(order, 0)
    for gpu in (0, 1):
        tasks = [task for task in order if stages[task[1]][2] == gpu]
        draw.shuffle(tasks)
        begin = -draw.randint(0, costs[tasks[0][1]])
        for task in tasks:
            tau[task] = begin
            begin += costs[task[1]]
    return of, stages, period, tau


def lateness(of: Chain, period: int, tau: Mapping[Task, int]) -> dict[Task, int]:
    """Periods by which the next op is behind each op but the last: v + v' of (23)-(30)."""
    late = {}
    for one, two in pairwise(tau):
        end = tau[one] + of.layers[one[1]].forward_ns
        late[one] = (end > tau[two]) + (end > tau[two] + period)
    return late


def shifted(
    of: Chain, stages: Stages, period: int, tau: Mapping[Task, int], shift: Mapping[Task, int]
) -> Plan:
    """The plan of these starts, `shift` periods later each."""
    first = min(tau[task] + shift[task] * period for task in tau) // period
    times = {f"{task[1]}{task[0]}0": tau[task] + (shift[task] - first) * period for task in tau}
    options = {"cluster": uniform(2, 2**40), "semantics": "flush"}
    return handmade.plan(of, stages, period, times, **options)


def stored(stage: int, running: Task, late: Mapping[Task, int], tau: Mapping[Task, int]) -> int:
    """Micro-batches that `stage` keeps while `running` runs on its GPU (Lemma 10)."""
    order = [*tau]
    forward, backward = order.index((OpKind.F, stage)), order.index((OpKind.B, stage))
    begin = sum(late[op] for op in order[forward:backward])
    begun = tau[OpKind.F, stage] <= tau[running]
    return begin + begun - (tau[OpKind.B, stage] < tau[running])


def test_the_patterns_hold_every_case() -> None:
    """Some ops follow in the same period, some in the next (Figure 9), some two on (Figure 10)."""
    seen = set()
    for seed in range(30):
        of, _, period, tau = pattern(seed)
        seen |= {*lateness(of, period, tau).values()}
    assert seen == {0, 1, 2}


# --- Figure 8: when an output waits for the next layer on its GPU -------------------------------


@pytest.mark.parametrize("model", ["exact", "paper"])
@pytest.mark.parametrize("order", list(permutations((0, 1, 3))))
def test_an_output_waits_in_three_of_six_orders(
    order: tuple[int, ...], model: MemoryModel
) -> None:
    """While T_l = 3F runs, the output of T_l' = 0F waits for 1F where (22) says so."""
    of = handmade.chain(
        [(1, 0)] * 4,
        [
            {"output_bytes": 8, "output_gradient_bytes": 0},
            {},
            {},
            {"output_bytes": 100, "output_gradient_bytes": 0},
        ],
    )
    stages = [(0, 0, 0), (1, 1, 0), (2, 2, 1), (3, 3, 0)]
    places = [order.index(0), order.index(1), 0, order.index(3)]
    back = (places[3] + 1) % 3
    plan = placed(of, stages, 3, places, back, memory_model=model, semantics="flush")
    assert_right(plan)

    def before(one: int, two: int) -> bool:
        return order.index(one) < order.index(two)

    waits = before(0, 3) + before(3, 1) + before(1, 0) - 1
    assert waits in (0, 1)
    assert plan.memory[0].direct_bytes == 8 * waits
    assert waits == (order in [(0, 3, 1), (3, 1, 0), (1, 0, 3)])
