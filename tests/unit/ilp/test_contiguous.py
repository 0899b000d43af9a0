"""The contiguous optimum: the DP against its own definition and against all partitions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from fractions import Fraction
from itertools import combinations, count
from random import Random

import pytest

from pipeplan.cluster import Cluster, Gpu, Links, Pair, uniform
from pipeplan.ilp import search
from pipeplan.ilp.bounds.load import contiguous_bound
from pipeplan.ilp.clock import DeterministicClock, OutOfTimeError
from pipeplan.ilp.contiguous.dynamic_program import (
    ContiguousDP,
    ContiguousPartition,
)
from pipeplan.ilp.contiguous.partition_schedule import schedule_partition
from pipeplan.ilp.contiguous.recurrence import extend_one_span
from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.incumbent import Incumbent
from pipeplan.ilp.memory import fits, in_flight, memory_rows
from pipeplan.ilp.symmetry import gpu_classes
from tests import handmade
from tests.searches import limits


def costs(times: list[tuple[int, int]], cluster: Cluster, **fields: list[int]) -> CostModel:
    """Costs of a hand-made chain under 2bw and the exact memory model."""
    layers = [{name: row[i] for name, row in fields.items()} for i in range(len(times))]
    return CostModel(handmade.chain(times, layers), cluster, "2bw", "exact")


@pytest.mark.parametrize(("seconds", "most"), [(1e-6, 0), (0.05, 8), (60, 10**6)])
def test_longer_periods_of_a_step_keep_the_time(
    seconds: float, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under flush periods longer than the shortest are tried only while there is time."""
    chain = handmade.chain([(300 + n, 500 - n) for n in range(9)], [{} for _ in range(9)])
    of = CostModel(chain, uniform(3, 10, bandwidth_bytes_per_s=10**9), "flush", "exact")
    state = Incumbent(of, limits(time_limit_s=seconds, clock=DeterministicClock()))
    state.raise_bound("any", Fraction(1))
    solver = ContiguousDP(of)
    search.offer_shortest(state, solver, ContiguousDP(of, messages=True), 1)
    assert state.best is not None
    asked, solve = list[int](), ContiguousDP.solve

    def counted(
        self: ContiguousDP, period: int, *, over: Callable[[], bool]
    ) -> ContiguousPartition | None:
        asked.append(period)
        if over():
            raise OutOfTimeError
        return solve(self, period)

    monkeypatch.setattr(ContiguousDP, "solve", counted)
    search._shorter_steps(state, solver)
    assert len(asked) <= most
    assert (len(asked) >= 20) == (seconds == 60)
    asked.clear()
    monkeypatch.setattr(ContiguousDP, "limit", lambda *_: lambda: True)
    search._shorter_steps(state, solver)
    assert len(asked) <= 1, "a slow program has a share of the time"
    assert bool(asked) == (state.remaining > 0)


def best(of: CostModel) -> ContiguousPartition:
    """The shortest partition, which must exist."""
    found = ContiguousDP(of).shortest(1)
    assert found is not None
    return found


def test_push_skips_to_the_next_period() -> None:
    """Work that would pass a multiple of the period starts behind it."""
    assert extend_one_span(0, 4, 10) == 4
    assert extend_one_span(4, 6, 10) == 10
    assert extend_one_span(4, 7, 10) == 17
    assert extend_one_span(10, 3, 10) == 13


def test_load_only() -> None:
    """Without memory limits the period is the smallest largest load."""
    of = costs([(1, 1), (2, 2), (1, 1)], uniform(2, 100))
    assert best(of).period == 6


def test_transfers_count_once_per_link() -> None:
    """Half duplex adds both transfers of a cut on one link, full duplex does not."""
    sizes = [7, 0]
    for duplex, period in (("half", 12), ("full", 10)):
        cluster = uniform(2, 10**6, bandwidth_bytes_per_s=10**9, duplex=duplex)
        of = costs([(4, 6), (3, 3)], cluster, output_bytes=sizes)
        assert best(of).period == (14 if duplex == "half" else period)


def test_half_duplex_fuses_when_the_link_is_slower() -> None:
    """A cut whose transfers last longer than everything on one GPU is not made."""
    cluster = uniform(2, 10**6, bandwidth_bytes_per_s=10**9, duplex="half")
    of = costs([(4, 6), (3, 3)], cluster, output_bytes=[20, 0])
    assert best(of).stages[0].layers == (0, 1)
    assert best(of).period == 16


def test_memory_forces_fewer_copies() -> None:
    """A first stage that can keep one micro-batch only waits for its return."""
    saved = [5, 0]
    roomy = costs([(2, 2), (2, 2)], uniform(2, 10), saved_bytes=saved)
    tight = costs([(2, 2), (2, 2)], uniform(2, 9), saved_bytes=saved)
    assert best(roomy).period == 4
    assert best(tight).period == 8


def test_tied_layers_are_not_parted() -> None:
    """Layers that share a parameter stay in one stage, with all between them."""
    chain = handmade.chain([(1, 1)] * 3, [{"parameters": ("w",)}, {}, {"parameters": ("w",)}])
    of = CostModel(chain, uniform(3, 100), "2bw", "exact")
    assert [stage.layers for stage in best(of).stages] == [(0, 2)]


def test_order_of_unequal_gpus() -> None:
    """The big layer goes to the GPU with memory, the heavy one to the fast GPU."""
    cluster = Cluster(
        gpus=(
            Gpu(name="small fast", memory_bytes=10, speed=2.0),
            Gpu(name="large slow", memory_bytes=100, speed=1.0),
        )
    )
    of = costs([(4, 4), (8, 8)], cluster, weight_bytes=[40, 1])
    found = best(of)
    assert [stage.gpu for stage in found.stages] == [1, 0]
    assert found.period == 8


def test_classes_of_gpus() -> None:
    """Twins share speed, memory and links; one special link splits its ends off."""
    cluster = uniform(3, 10)
    assert gpu_classes(costs([(1, 1)], cluster)) == [[0, 1, 2]]
    special = cluster.model_copy(
        update={"links": Links(pairs=(Pair(source=0, target=1, latency_ns=5),))}
    )
    assert len(gpu_classes(costs([(1, 1)], special))) > 1


@functools.cache
def _eight_kinds() -> CostModel:
    """Ten layers on eight GPUs of which no two are alike: 1024 states of the dynamic program."""
    of = costs([(100 + 7 * n, 130 + 11 * n) for n in range(10)], uniform(8, 100))
    gpus = tuple(
        gpu.model_copy(update={"memory_bytes": 60 - 5 * index, "speed": 1 + index / 10})
        for index, gpu in enumerate(of.cluster.gpus)
    )
    kinds = of.cluster.model_copy(update={"gpus": gpus})
    layers = [{"saved_bytes": 4, "weight_bytes": 1} for _ in range(10)]
    times = [(layer.forward_ns, layer.backward_ns) for layer in of.chain.layers]
    return CostModel(handmade.chain(times, layers), kinds, "2bw", "exact")


@functools.cache
def _best_of_eight_kinds() -> ContiguousPartition:
    """Which takes seconds."""
    return best(_eight_kinds())


def test_a_bisection_that_is_over_says_what_it_refuted() -> None:
    """What it found is feasible, what it refuted is not, and the bound lies between."""
    of = _eight_kinds()
    solver = ContiguousDP(of)
    assert solver.is_slow
    best = _best_of_eight_kinds()
    looks = count()
    solver.solve(1, over=lambda: next(looks) < 0)
    question = next(looks)
    assert question > 1000
    for questions in (2, 5.5):
        left = iter([False] * int(questions * question))
        refuted, found = solver.bisect(1, lambda left=left: next(left, True))
        assert found is not None
        assert refuted < best.period <= found.period
        assert solver.solve(refuted) is None
        left = iter([False] * int(questions * question))
        bound = contiguous_bound(of, 1, lambda left=left: next(left, True))
        assert bound is not None
        assert bound <= best.period
        assert (bound > 1) == (questions > 2)
    with pytest.raises(OutOfTimeError):
        solver.bisect(1, lambda: True)
    assert contiguous_bound(of, 1, lambda: True) == 1


def test_one_order_of_gpus_is_quick_and_valid() -> None:
    """The cluster's order has few states, claims no proof, and is no shorter than all orders."""
    of = _eight_kinds()
    quick = ContiguousDP(of, in_order=True)
    assert not quick.is_slow
    assert not quick.complete
    found = quick.shortest(1)
    assert found is not None
    assert found.period > _best_of_eight_kinds().period
    assert fits(memory_rows(of, schedule_partition(of, found)))


def test_many_kinds_of_gpus_have_a_plan_in_no_time() -> None:
    """Without time for all orders there is the plan of one, and a bound that holds."""
    of = _eight_kinds()
    state = Incumbent(of, limits(time_limit_s=1e-6, clock=DeterministicClock()))
    state.raise_bound("any", Fraction(1))
    assert search.contiguous(state)
    assert state.best is not None
    shortest = _best_of_eight_kinds().period
    assert state.bounds["contiguous"] <= shortest <= state.best.period


def test_most_in_flight_is_kept() -> None:
    """With at most two micro-batches in flight the four stages cannot all be busy."""
    of = costs([(1, 1)] * 4, uniform(4, 100))
    free, limited = ContiguousDP(of).shortest(1), ContiguousDP(of, most=2).shortest(1)
    assert free is not None
    assert limited is not None
    assert free.period == 2
    assert limited.period == 4
    assert max(in_flight(of, schedule_partition(of, limited))) <= 2


@pytest.mark.parametrize("seed", range(12))
def test_equals_all_partitions(seed: int) -> None:
    """On random chains: no partition, tried one by one, has a shorter feasible period."""
    random = Random(seed)
    count, gpus = random.randint(2, 5), random.randint(2, 3)
    duplex = random.choice(["half", "full"])
    cluster = uniform(
        gpus, random.randint(12, 40), bandwidth_bytes_per_s=10**9, duplex=duplex, latency_ns=1
    )
    times = [(random.randint(1, 4), random.randint(1, 4)) for _ in range(count)]
    of = costs(
        times,
        cluster,
        saved_bytes=[random.randint(0, 8) for _ in range(count)],
        output_bytes=[random.randint(0, 3) for _ in range(count)],
    )
    found = ContiguousDP(of).shortest(1)
    assert (None if found is None else found.period) == _by_hand(of, count, gpus)
    if found is not None:
        for side in (True, False):
            schedule = schedule_partition(of, found, gradients_wait=side)
            rows = memory_rows(of, schedule)
            messages = max(row.message_bytes for row in rows)
            assert fits(rows) or messages > 0


def _by_hand(of: CostModel, count: int, gpus: int) -> int | None:
    """The shortest period over all partitions, V by its definition, stage by stage."""
    half = of.cluster.links.duplex == "half"
    for period in range(1, 200):
        for stages in range(1, min(gpus, count) + 1):
            for cuts in combinations(range(1, count), stages - 1):
                if _fits_at(of, [0, *cuts, count], period, half=half):
                    return period
    return None


def _fits_at(of: CostModel, borders: list[int], period: int, *, half: bool) -> bool:
    span = 0
    for index in reversed(range(len(borders) - 1)):
        first, last = borders[index], borders[index + 1] - 1
        if last + 1 < borders[-1]:
            transfers = of.send_forward_ns(last, 0, 1), of.send_backward_ns(last, 1, 0)
            if (sum(transfers) if half else max(transfers)) > period:
                return False
            span = _next(span, sum(transfers), period) if half else span + sum(transfers)
        load = of.load_ns(first, last, 0)
        if load > period:
            return False
        span = _next(span, load, period)
        size = of.segment(first, last)
        copies = -(-span // period)
        peak = size.states + (copies - 1) * size.saved
        if peak + max(size.forward, size.saved + size.backward) > of.budgets[0]:
            return False
    return True


def _next(span: int, load: int, period: int) -> int:
    """The smallest end at or behind span + load whose work does not cross a period's border."""
    end = span + load
    while (end - load) // period != (end - 1) // period:
        end += 1
    return end
