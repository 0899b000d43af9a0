"""The paper's ILP against its own examples, a brute force over integer times, and the verifier."""

from __future__ import annotations

import random
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import pytest
from ortools.util.python.solve_interrupter import SolveInterrupter

from pipeplan import verifier
from pipeplan.chain import Chain, Layer
from pipeplan.cluster import Cluster, Gpu, Links, Pair, uniform
from pipeplan.errors import InputError
from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.memory import in_flight, memory_rows
from pipeplan.ilp.paper.method import Backend, PaperResult, solve
from pipeplan.ilp.schedule import to_ops
from pipeplan.plan import Bounds, Plan, Solver
from tests import grids
from tests.brute_period import brute_period

BACKENDS: tuple[Backend, ...] = ("cp-sat", "highs", "scip")
GB_S = 10**9
"""One byte per nanosecond."""


def chain_of(
    forward: Sequence[int],
    backward: Sequence[int] | None = None,
    *,
    stored: Sequence[int] | None = None,
    sizes: Sequence[int] | None = None,
    weights: Sequence[int] | None = None,
    shared: Sequence[int] = (),
) -> Chain:
    """A chain from the paper's vectors: `sizes` are a_0..a_L, layers in `shared` are tied."""
    count = len(forward)
    sizes = sizes or [0] * (count + 1)
    layers = tuple(
        Layer(
            name=f"l{i}",
            forward_ns=forward[i],
            backward_ns=(backward or forward)[i],
            output_bytes=sizes[i + 1],
            saved_bytes=stored[i] if stored else 0,
            weight_bytes=weights[i] if weights else 0,
            parameters=("tied",) if i in shared else (),
        )
        for i in range(count)
    )
    return Chain(name="c", input_bytes=sizes[0], layers=layers)


def costs_of(chain: Chain, gpus: int, memory: int, bandwidth: int | None = None) -> CostModel:
    """The paper's setting."""
    cluster = uniform(gpus, memory, bandwidth_bytes_per_s=bandwidth, duplex="half")
    return CostModel(chain, cluster, "2bw", "paper")


def verified_period(costs: CostModel, result: PaperResult) -> int:
    """The period of the result's plan, after the verifier found nothing wrong with it."""
    schedule = result.schedule
    assert schedule is not None
    assert result.bound is not None
    bound = (result.bound.numerator, result.bound.denominator)
    draft = Plan(
        chain=costs.chain,
        chain_digest=costs.chain.digest(),
        cluster=costs.cluster,
        microbatches=max(1, *in_flight(costs, schedule)),
        memory_model="paper",
        period_ns=schedule.period,
        step_ns=0,
        stages=schedule.stages,
        ops=to_ops(costs, schedule),
        memory=memory_rows(costs, schedule),
        solver=Solver(
            status="optimal" if result.status == "optimal" else "feasible",
            bounds=Bounds(k1=bound),
            gap=float(schedule.period / result.bound - 1),
            gap_bound="k1",
        ),
    )
    plan = draft.model_copy(update={"step_ns": verifier.audit(draft).step_ns})
    assert verifier.verify(plan) == ()
    return schedule.period


PAPER_EXAMPLES = {
    # section 4.2.1: totals 1, 2, 1 doubled, so that F and B are whole
    "non-contiguous": (chain_of([1, 2, 1]), 2, 0, 4),
    # figures 4 and 5 count stored activations only: saved bytes and empty boundaries
    "figure 4": (chain_of([3, 2, 2, 2], stored=[1, 2, 2, 4]), 4, 4, 8),
    "figure 5": (chain_of([1, 2, 1], stored=[2, 3, 2]), 2, 6, 5),
    "figure 5, more memory": (chain_of([1, 2, 1], stored=[2, 3, 2]), 2, 9, 4),
    # lemma 2, with three copies of each weight: no contiguous allocation fits
    "lemma 2": (chain_of([1, 1, 1], weights=[1, 2, 1]), 2, 6, 4),
}


@grids.each_value(name=list(PAPER_EXAMPLES), backend=BACKENDS)
def test_paper_examples_are_proven(name: str, backend: Backend) -> None:
    """Every backend proves the 1F1B optimum of each example in the paper."""
    chain, gpus, memory, period = PAPER_EXAMPLES[name]
    costs = costs_of(chain, gpus, memory)
    result = solve(costs, time_limit=60, backend=backend)
    assert (result.status, result.bound) == ("optimal", period)
    assert verified_period(costs, result) == period


def random_chain(seed: int, layers: int, longest: int) -> Chain:
    """Small numbers, everything above zero that the ILP needs above zero."""
    draw = random.Random(seed)
    return chain_of(
        [draw.randint(1, longest) for _ in range(layers)],
        [draw.randint(1, longest) for _ in range(layers)],
        stored=[draw.randint(0, 3) for _ in range(layers)],
        sizes=[draw.randint(0, 2) for _ in range(layers + 1)],
        weights=[draw.randint(0, 1) for _ in range(layers)],
    )


CASES = [
    pytest.param(
        seed,
        layers,
        longest,
        gpus,
        GB_S if wired else None,
        marks=() if seed in seeds[:most] else (pytest.mark.long,),
    )
    for layers, longest, gpus, wired, seeds, most in (
        (3, 2, 2, True, range(5), 3),
        (3, 2, 3, True, (2, 0), 1),
        (4, 2, 2, False, range(5), 3),
        (4, 2, 3, False, range(3), 2),
        (5, 1, 2, False, range(2), 1),
    )
    for seed in seeds
]


@pytest.mark.parametrize(("seed", "layers", "longest", "gpus", "bandwidth"), CASES)
def test_equals_brute_force(
    seed: int, layers: int, longest: int, gpus: int, bandwidth: int | None
) -> None:
    """The proven period equals the best of all integer schedules, down to the last byte."""
    chain = random_chain(seed, layers, longest)
    roomy = solve(costs_of(chain, gpus, 10**6, bandwidth), time_limit=60)
    assert roomy.schedule is not None
    rows = memory_rows(costs_of(chain, gpus, 10**6, bandwidth), roomy.schedule)
    peak = max(row.peak_bytes for row in rows)
    expected: int | None = 1
    for memory in (peak, peak - 1, peak * 3 // 4, peak // 2):
        costs = costs_of(chain, gpus, memory, bandwidth)
        result = solve(costs, time_limit=60)
        expected = expected and brute_period(chain, gpus, memory, bandwidth, least=expected)
        if expected is None:
            assert result.status == "infeasible"
        else:
            assert (result.status, result.bound) == ("optimal", expected)
            assert verified_period(costs, result) == expected


# --- what a caller relies on -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seed", "backend"),
    [
        (1, "scip"),
        (2, "highs"),
        *(
            pytest.param(*each, marks=pytest.mark.long)
            for each in ((0, "scip"), (0, "highs"), (1, "highs"), (2, "scip"))
        ),
    ],
)
def test_backends_agree(seed: int, backend: Backend) -> None:
    """HiGHS and SCIP on floats prove what CP-SAT proves on integers."""
    costs = costs_of(random_chain(seed, 4, 4), 2, 24, GB_S)
    exact = solve(costs, time_limit=60)
    other = solve(costs, time_limit=60, backend=backend)
    assert (other.status, other.bound) == (exact.status, exact.bound)
    if exact.schedule is not None:
        assert verified_period(costs, other) == exact.schedule.period


@pytest.mark.parametrize("gpus", [2, 3])
def test_real_sizes_are_proven_to_the_nanosecond(gpus: int) -> None:
    """Milliseconds and gigabytes are no harder and no less exact than small integers."""
    draw = random.Random(gpus)
    chain = chain_of(
        [draw.randint(10**6, 9 * 10**6) for _ in range(5)],
        [draw.randint(10**6, 9 * 10**6) for _ in range(5)],
        stored=[draw.randint(10**8, 9 * 10**8) for _ in range(5)],
        sizes=[draw.randint(10**6, 9 * 10**6) for _ in range(6)],
        weights=[draw.randint(10**7, 10**8) for _ in range(5)],
    )
    costs = costs_of(chain, gpus, 3 * 10**9, 12 * GB_S)
    result = solve(costs, time_limit=60)
    assert result.status == "optimal"
    assert verified_period(costs, result) == result.bound


def test_one_byte_decides() -> None:
    """In figure 5, layer 2 stores two micro-batches of 3 GB; one byte less is a longer period."""
    gb = 10**9
    chain = chain_of([1, 2, 1], stored=[2 * gb, 3 * gb, 2 * gb])
    assert solve(costs_of(chain, 2, 6 * gb), time_limit=60).bound == 5
    less = solve(costs_of(chain, 2, 6 * gb - 1), time_limit=60).bound
    assert less is not None
    assert less > 5


SLOTS = {
    "three GPUs, full links": (
        chain_of([5, 3, 6], [3, 6, 6], stored=[3, 0, 2], sizes=[0, 6, 7, 0]),
        35,
        3,
        21,
    ),
    "long waits": (chain_of([5, 1, 4], [3, 1, 1], stored=[5, 2, 2], sizes=[0, 4, 5, 0]), 38, 3, 8),
    "two GPUs": (chain_of([3, 1, 1], [3, 1, 1], stored=[2, 3, 2], sizes=[0, 3, 3, 0]), 17, 2, 6),
}


@pytest.mark.parametrize("name", SLOTS)
def test_second_slots_are_counted(name: str) -> None:
    """(P5) counts a second slot where a message waits longer than a period; the plan fits."""
    chain, memory, gpus, period = SLOTS[name]
    costs = costs_of(chain, gpus, memory, GB_S)
    counted = solve(costs, time_limit=60)
    assert verified_period(costs, counted) == counted.bound == period
    single = solve(costs, time_limit=60, count_slots=False)
    assert single.bound is not None
    assert single.bound <= period


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_in_flight_limit(limit: int) -> None:
    """(R6): no layer holds more micro-batches than allowed, and one at a time is sequential."""
    costs = costs_of(chain_of([2, 2, 2]), 3, 100)
    result = solve(costs, time_limit=60, in_flight_limit=limit)
    assert result.schedule is not None
    assert max(in_flight(costs, result.schedule)) <= limit
    assert result.bound == {1: 12, 2: 8, 3: 4}[limit]
    assert verified_period(costs, result) == result.bound


def test_tied_layers_share_a_gpu() -> None:
    """Layers that share a parameter name end up on one GPU, at the price of a longer period."""
    costs = costs_of(chain_of([2, 1, 1, 2], shared=(0, 3)), 2, 100)
    result = solve(costs, time_limit=60)
    assert verified_period(costs, result) == result.bound == 8
    assert result.schedule is not None
    assert result.schedule.stages[0].gpu == result.schedule.stages[-1].gpu
    free = solve(costs_of(chain_of([2, 1, 1, 2]), 2, 100), time_limit=60)
    assert free.bound == 6


def test_runs_become_stages() -> None:
    """Where one GPU can hold one micro-batch only, its layers run back to back as one stage."""
    costs = costs_of(chain_of([1, 2, 3], stored=[1, 1, 1], sizes=[1, 1, 1, 1]), 1, 5)
    result = solve(costs, time_limit=60)
    assert result.schedule is not None
    assert verified_period(costs, result) == 12
    assert [stage.layers for stage in result.schedule.stages] == [(0, 2)]


def test_infeasible_is_proven() -> None:
    """Weights that no allocation holds: infeasible, with neither schedule nor bound."""
    result = solve(costs_of(chain_of([1, 1, 1], weights=[1, 2, 1]), 2, 5), time_limit=60)
    assert (result.status, result.schedule, result.bound) == ("infeasible", None, None)


def test_time_limit_leaves_a_valid_bound() -> None:
    """Without time nothing is claimed but the trivial bound; the limit ends the search."""
    costs = costs_of(random_chain(5, 9, 50), 3, 60, GB_S)
    result = solve(costs, time_limit=0.01)
    assert result.status == "unknown"
    loads = [layer.forward_ns + layer.backward_ns for layer in costs.chain.layers]
    assert result.bound == Fraction(max(-(-sum(loads) // 3), *loads))


def test_an_interrupt_ends_the_search() -> None:
    """A caller's interrupt returns, with a valid bound and no error; the limit is an hour."""
    costs = costs_of(random_chain(5, 9, 50), 3, 60, GB_S)
    interrupter = SolveInterrupter()
    interrupter.interrupt()
    result = solve(costs, time_limit=3600, interrupter=interrupter)
    assert result.status == "unknown"


_FOUR = chain_of([1, 1, 1, 1])
_EQUAL = uniform(2, 10, duplex="half")


def _cluster(**changes: Any) -> Cluster:
    return _EQUAL.model_copy(update=changes)


@pytest.mark.parametrize(
    ("chain", "cluster", "model", "says"),
    [
        (_FOUR, _EQUAL, "exact", r"memory model: got 'exact', need 'paper'"),
        (_FOUR, uniform(2, 10), "paper", r"duplex: got 'full', need 'half'"),
        (_FOUR, _cluster(action_overhead_ns=3), "paper", r"action_overhead_ns: got 3, need 0"),
        (
            _FOUR,
            _cluster(gpus=(Gpu(name="a", memory_bytes=9), Gpu(name="b", memory_bytes=8))),
            "paper",
            r"gpus\[1\]: got 8 bytes",
        ),
        (
            _FOUR,
            uniform(3, 10, duplex="half").model_copy(
                update={
                    "links": Links(duplex="half", pairs=(Pair(source=0, target=1, latency_ns=1),))
                }
            ),
            "paper",
            r"links.pairs: got links of 2 kinds",
        ),
        (chain_of([1, 0]), _EQUAL, "paper", r"layers\[1\].forward_ns: got 0"),
        (chain_of([1] * 65), _EQUAL, "paper", r"got 65 layers, need at most 64"),
        (chain_of([2**50, 1]), _EQUAL, "paper", r"need at most 1125899906842624"),
    ],
)
def test_outside_the_papers_setting(chain: Chain, cluster: Cluster, model: Any, says: str) -> None:
    """Whatever the ILP cannot express is refused by name, with what it needs instead."""
    with pytest.raises(InputError, match=says):
        solve(CostModel(chain, cluster, "2bw", model), time_limit=1)


def test_unknown_backend() -> None:
    """A backend that the wheel lacks is refused, with those that exist."""
    with pytest.raises(InputError, match="need one of cp-sat, highs, scip"):
        solve(costs_of(_FOUR, 2, 10), time_limit=1, backend="cplex")  # type: ignore[arg-type]
