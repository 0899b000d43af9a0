"""Bounds from sums: each on an instance made for it."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

from pipeplan import planner
from pipeplan.cluster import Cluster, Gpu, uniform
from pipeplan.ilp.bounds.assignment import find_feasible_assignment
from pipeplan.ilp.bounds.infeasibility import contiguous_reason, infeasibility_reason
from pipeplan.ilp.bounds.load import (
    closed_form_bound,
    contiguous_bound,
    load_bound,
    residency_bound,
)
from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.exact.allocations import lower_bound
from tests import handmade, searches


def costs(times: list[tuple[int, int]], cluster: Cluster, **fields: list[int]) -> CostModel:
    """Costs of a hand-made chain under 2bw and the exact memory model."""
    layers = [{name: row[i] for name, row in fields.items()} for i in range(len(times))]
    return CostModel(handmade.chain(times, layers), cluster, "2bw", "exact")


def test_average_load_is_exact() -> None:
    """9 ns of work on two GPUs take 9/2: k = 2 could reach it."""
    assert load_bound(costs([(1, 1), (1, 1), (1, 2), (1, 1)], uniform(2, 1))) == Fraction(9, 2)


def test_heaviest_layer() -> None:
    """No period is shorter than one layer's forward and backward."""
    assert load_bound(costs([(1, 1), (5, 5)], uniform(4, 1))) == 10


def test_pigeonhole() -> None:
    """Five equal layers on four GPUs: two share one."""
    assert load_bound(costs([(3, 3)] * 5, uniform(4, 1))) == 12


def test_overhead_counts_per_stage() -> None:
    """Every GPU that is used runs at least one stage: two overheads."""
    cluster = uniform(2, 1, action_overhead_ns=3)
    assert load_bound(costs([(2, 2), (2, 2)], cluster)) == 4 + 6


def test_speeds() -> None:
    """12 ns of work on speeds 2 and 1 take 4; rounding up each layer may only add."""
    gpus = (Gpu(name="a", memory_bytes=1, speed=2.0), Gpu(name="b", memory_bytes=1))
    assert load_bound(costs([(2, 2)] * 3, Cluster(gpus=gpus))) == 4


def test_slow_cut_merges() -> None:
    """A cut of 2 * 9 ns forces both layers together unless the period is that long."""
    for output, period in ((9, 16), (6, 12)):
        cluster = uniform(2, 1, bandwidth_bytes_per_s=10**9, duplex="half")
        assert load_bound(costs([(4, 4), (4, 4)], cluster, output_bytes=[output, 0])) == period


def test_tied_layers_are_one_item() -> None:
    """Two layers that share a parameter load one GPU together."""
    ties = [{"parameters": ("w",)}, {}, {"parameters": ("w",)}]
    chain = handmade.chain([(3, 3), (1, 1), (3, 3)], ties)
    assert load_bound(CostModel(chain, uniform(3, 1), "2bw", "exact")) == 12


def test_average_memory() -> None:
    """A layer of 5 bytes kept for 8 ns in 10 bytes of memory: at least 4 ns a micro-batch."""
    of = costs([(2, 2), (2, 2)], uniform(2, 5), saved_bytes=[5, 0])
    assert residency_bound(of) == 4
    assert closed_form_bound(of) == 4


def test_contiguous_bound_counts_whole_micro_batches() -> None:
    """A stage that holds one micro-batch waits for its whole way, whatever k."""
    of = costs([(2, 2), (2, 2)], uniform(2, 9), saved_bytes=[5, 0])
    assert contiguous_bound(of, 4) == 8


def test_contiguous_bound_without_room() -> None:
    """No contiguous plan at all is reported as None."""
    of = costs([(1, 1)] * 3, uniform(2, 4), weight_bytes=[1, 2, 1])
    assert contiguous_bound(of, 1) is None


def test_a_late_update_needs_the_input_of_its_stage_only() -> None:
    """Layer 1 alone would update beside its 1000 bytes of input; behind layer 0 it does not."""
    fields = {
        "output_bytes": [1000, 0],
        "gradient_bytes": [10, 10],
        "waiting_gradient_bytes": [10, 10],
        "optimizer_workspace_bytes": [0, 2500],
    }
    most = 40 + 2500
    of = costs([(1, 1), (1, 1)], uniform(1, most), **fields)
    assert of.segment(1, 1, True).running == 1000 + 2500
    assert of.segment(0, 1).running == 2500
    assert infeasibility_reason(of) is None
    assert infeasibility_reason(replace(of, pins=((0, 0), (1, 0)))) is None
    assert find_feasible_assignment(of, searches.limits(), 5).home == (0, 0)
    assert lower_bound(of, (0, 0), None) == 4
    plan = planner.solve(of.chain, of.cluster, planner.Config(k=1, microbatches=8, workers=1))
    assert (len(plan.stages), plan.period_ns) == (1, 4)
    assert [row.peak_bytes for row in plan.memory] == [most]
    over = infeasibility_reason(costs([(1, 1), (1, 1)], uniform(1, 2519), **fields))
    assert over is not None
    assert "layer 1" in over


def test_updates_in_the_midst_of_a_stage_wait_for_its_end() -> None:
    """Stage 0..1 peaks at 100 bytes, its update's: what layer 0 keeps is gone by then."""
    sizes = [{"saved_bytes": 10}, {"optimizer_workspace_bytes": 100}]
    costs = CostModel(handmade.chain([(1, 1), (1, 1)], sizes), uniform(1, 105), "2bw", "exact")
    assert find_feasible_assignment(costs, searches.limits(), 5).home == (0, 0)


def test_what_would_help_depends_on_what_is_too_much() -> None:
    """Against states alone recomputing does nothing; one version of the weights may be enough."""
    sizes = [{"weight_bytes": 10, "saved_bytes": 3}] * 2
    of = handmade.chain([(1, 1), (1, 1)], sizes)
    for semantics, memories, helps in (
        (
            "2bw",
            (23, 15),
            "More memory, more GPUs or semantics flush (one version of the weights)",
        ),
        ("2bw", (23, 21), "semantics flush (one version of the weights), a smaller micro-batch"),
        ("flush", (13, 11), "More memory, more GPUs, a smaller micro-batch or recompute auto"),
    ):
        gpus = tuple(Gpu(name="g", memory_bytes=memory) for memory in memories)
        machines = uniform(2, 1).model_copy(update={"gpus": gpus})
        reason = infeasibility_reason(CostModel(of, machines, semantics, "exact"))
        assert reason is not None
        assert helps in reason, semantics


def test_what_would_help_is_never_what_cannot() -> None:
    """Flush where weights are counted twice; a smaller micro-batch where states leave room."""
    light = handmade.chain([(1, 1), (1, 1)], [{"saved_bytes": 9}] * 2)
    sizes = [{"saved_bytes": 9, "weight_bytes": 9}]
    one, two = (handmade.chain([(1, 1)] * n, sizes * n) for n in (1, 2))
    for of, memory, model, flush, smaller in (
        (light, 12, "exact", False, True),
        (two, 40, "exact", True, True),
        (two, 60, "paper", False, True),
        (one, 20, "exact", True, True),
        (one, 17, "exact", False, False),
        (one, 30, "paper", False, True),
        (one, 26, "paper", False, False),
    ):
        reason = infeasibility_reason(CostModel(of, uniform(1, memory), "2bw", model))
        assert reason is not None
        assert ("semantics flush" in reason) == flush, reason
        assert ("smaller micro-batch" in reason) == smaller, reason


def test_pins_that_take_turns_are_named() -> None:
    """Where no contiguous plan keeps the pins nothing is said of bytes."""
    of = CostModel(
        handmade.chain([(1, 1)] * 4), uniform(2, 99), "2bw", "exact", pins=((0, 0), (2, 1), (3, 0))
    )
    reason = contiguous_reason(of)
    assert "layers 0 and 3 are pinned to GPU 0, layer 2 between them to GPU 1" in reason
    assert "memory" not in reason
    kept = contiguous_reason(replace(of, pins=((0, 0), (1, 0), (3, 1))))
    assert "with 3 layers pinned, some stage's states" in kept


def test_a_split_backward_needs_less_than_a_whole_one() -> None:
    """No layer is ruled out for a workspace that its halves do not have: (S4), (S5)."""
    halves = {
        "backward_weight_ns": 3000,
        "saved_for_weight_bytes": 200,
        "saved_input_bytes": 100,
        "saved_input_for_weight_bytes": 100,
        "backward_workspace_bytes": 1000,
    }
    chain = handmade.chain([(1000, 2000), (1000, 4000)], [{"output_bytes": 100}, halves])
    config = planner.Config(semantics="flush", microbatches=2, time_limit_s=1, deterministic=True)
    plan = planner.solve(chain, uniform(2, 700), config)
    assert [stage.split_backward for stage in plan.stages] == [False, True]
    assert infeasibility_reason(CostModel(chain, uniform(2, 700), "2bw", "exact")) is not None
