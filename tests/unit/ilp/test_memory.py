"""The solver's own byte count: numbers by hand, and the verifier's on the same schedules."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pipeplan import verifier
from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.memory import fits, in_flight, memory_rows
from pipeplan.ilp.schedule import Schedule, overlap, unrolled
from pipeplan.ilp.segment_tables import segment_tables
from pipeplan.plan import OpKind, Plan
from tests import handmade


def claim(plan: Plan) -> tuple[CostModel, Schedule]:
    """The plan as the solver sees it."""
    times: dict[tuple[OpKind, int], list[int]] = {}
    for op in sorted(plan.ops, key=lambda op: op.copy_):
        time = op.shift * plan.period_ns + op.start_ns
        times.setdefault((op.kind, op.stage), []).append(time)
    starts = {op: tuple(row) for op, row in times.items()}
    costs = CostModel(plan.chain, plan.cluster, plan.semantics, plan.memory_model)
    return costs, Schedule(plan.stages, plan.period_ns, plan.k, starts)


def test_one_gpu_by_hand() -> None:
    """Two layers, one stage: states, what is kept, the larger working set."""
    chain = handmade.chain(
        [(2, 3), (2, 3)],
        [
            {"weight_bytes": 10, "output_bytes": 4, "saved_bytes": 5, "gradient_bytes": 10},
            {"saved_input_bytes": 4, "saved_bytes": 7, "backward_workspace_bytes": 2},
        ],
    )
    plan = handmade.plan(chain, [(0, 1, 0)], 10, {"0F0": 0, "0B0": 4})
    (row,) = memory_rows(*claim(plan))
    # A = 5 + 4 + 7; during B of layer 1 also workspace 2 and the gradient of 4 that it makes
    assert (row.states_bytes, row.saved_bytes, row.working_bytes) == (30, 16, 6)
    assert row.peak_bytes == 52


@pytest.mark.parametrize("model", ["exact", "paper"])
@pytest.mark.parametrize("semantics", ["2bw", "flush"])
@pytest.mark.parametrize("later", range(0, 60, 7))
def test_equals_the_verifier(model: str, semantics: str, later: int) -> None:
    """A schedule with several stages on a GPU, sends moved: the same rows, term by term."""
    plan = handmade.moved(
        handmade.base(memory_model=model, semantics=semantics), "0B0", 140 + later // 3
    )
    plan = handmade.moved(plan, "1SEND_B0", 115 + later // 4)
    told = verifier.audit(plan)
    assert memory_rows(*claim(plan), claims=True) == told.memory
    assert in_flight(*claim(plan)) == told.in_flight


def test_unrolling_changes_nothing() -> None:
    """Written with three micro-batches a period, a schedule needs the same bytes."""
    costs, schedule = claim(handmade.base())
    peaks = [row.peak_bytes for row in memory_rows(costs, schedule)]
    three = unrolled(schedule, 3)
    assert [row.peak_bytes for row in memory_rows(costs, three)] == peaks
    assert in_flight(costs, three) == in_flight(costs, schedule)


def test_fits_compares_to_the_byte() -> None:
    """A peak that equals the budget fits, one more does not."""
    row = memory_rows(*claim(handmade.base()))[0]
    exact = row.model_copy(update={"budget_bytes": row.peak_bytes})
    assert fits([exact])
    assert not fits([exact.model_copy(update={"budget_bytes": row.peak_bytes - 1})])


def test_overlap_counts_half_open_intervals() -> None:
    """Ends before begins; an interval longer than the period overlaps itself."""
    assert overlap(10, [(0, 10)]) == 1
    assert overlap(10, [(0, 11)]) == 2
    assert overlap(10, [(0, 4), (4, 8)]) == 1
    assert overlap(10, [(3, 3)]) == 0


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("model", ["exact", "paper"])
def test_tables_equal_segments(model: Any, waits: bool) -> None:
    """The arrays of the DP hold what each segment holds, for every pair of layers."""
    sizes = ("output_bytes", "saved_bytes", "weight_bytes", "forward_workspace_bytes")
    more = ("backward_workspace_bytes", "gradient_bytes", "optimizer_workspace_bytes")
    layers = [
        {name: (7 * i + 5 * j * j) % 11 for j, name in enumerate(sizes + more)} for i in range(6)
    ]
    for i in range(6):
        layers[i]["saved_output_bytes"] = layers[i]["output_bytes"] // 2
        layers[i]["saved_input_bytes"] = layers[i - 1]["output_bytes"] if i else 0
        layers[i]["optimizer_workspace_bytes"] *= 20 if waits else 1
        layers[i]["waiting_gradient_bytes"] = 1 if waits and i in (1, 4) else 0
    chain = handmade.chain([(1, 1)] * 6, layers, input_bytes=3)
    costs = replace(claim(handmade.base())[0], chain=chain, memory_model=model)
    for beside in (False, True):
        tables = segment_tables(costs, beside=beside)
        for first in range(6):
            for last in range(first, 6):
                size, at = costs.segment(first, last, beside), (first, last)
                assert (tables.saved[at], tables.forward[at]) == (size.saved, size.forward)
                assert (tables.backward[at], tables.states[at]) == (size.backward, size.states)
                assert (tables.optimizer[at], tables.late[at]) == (size.optimizer, size.late)
                assert tables.running[at] == size.running
    assert (tables.late > 0).any() == (waits and model == "exact")
