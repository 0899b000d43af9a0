"""Eager cycles of contiguous partitions: what they gain, and that their lower bound holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fractions import Fraction
from itertools import combinations, pairwise
from random import Random

from pipeplan.chain import Chain, Layer
from pipeplan.cluster import uniform
from pipeplan.ilp.bounds.load import closed_form_bound
from pipeplan.ilp.clock import DeterministicClock
from pipeplan.ilp.contiguous.in_flight_limits import in_flight_limits
from pipeplan.ilp.contiguous.initial_partitions import initial_partitions
from pipeplan.ilp.contiguous.kfkb_search import KFkBSearch
from pipeplan.ilp.contiguous.steady_states import SteadyStates, lower_bound, steps_of, variants
from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.incumbent import Incumbent
from pipeplan.ilp.memory import fits, memory_rows
from pipeplan.ilp.schedule import Schedule, chain_ops
from pipeplan.ilp.search import contiguous
from pipeplan.plan import MemoryModel, Stage
from pipeplan.self_timed import Order, eager_cycle, staircase
from pipeplan.testing.instances import machines
from pipeplan.testing.networks import build
from tests import handmade
from tests.searches import limits


def _chain() -> Chain:
    """Figure 4: F = B = 3, 2, 2, 2 and saved inputs 1, 2, 2, 4."""
    return Chain(
        name="figure4",
        layers=tuple(
            Layer(name=str(i), forward_ns=d, backward_ns=d, output_bytes=0, saved_bytes=s)
            for i, (d, s) in enumerate(zip((3, 2, 2, 2), (1, 2, 2, 4), strict=True))
        ),
    )


def _state(memory: int, gpus: int = 4, ks: tuple[int, ...] = (1, 2, 3)) -> Incumbent:
    costs = CostModel(_chain(), uniform(gpus, memory), "2bw", "exact")
    options = limits(ks=ks, contiguous_only=True, time_limit_s=30.0, deterministic=True)
    state = Incumbent(costs, options)
    state.raise_bound("any", closed_form_bound(costs))
    contiguous(state)
    return state


def test_figure_four_gains_from_two_micro_batches() -> None:
    """1F1B needs 8 ns at 4 bytes; a cycle of several micro-batches reaches the load, 6 ns."""
    state = _state(4)
    assert state.best is not None
    assert state.best.per_microbatch == 8
    KFkBSearch(state).run(5.0)
    assert state.best.per_microbatch == 6
    assert state.best.k > 1


def test_cycles_of_any_length_count() -> None:
    """On ResNet-18 in these stages it has 130 micro-batches, and PipeDream's partition it is."""
    ends = (0, 2, 4, 8, 10, 12, 14, 17)
    starts = (0, *(end + 1 for end in ends[:-1]))
    stages = tuple(
        Stage(id=n, layers=layers, gpu=n)
        for n, layers in enumerate(zip(starts, ends, strict=True))
    )
    cluster = machines(8, 11_265_171_142)
    state = Incumbent(CostModel(build("resnet18"), cluster, "2bw", "exact"), limits(ks=(1, 2)))
    next(SteadyStates(state, stages, (8,) * 8).expansions())
    assert state.best is not None
    assert state.best.k == 130
    assert state.best.per_microbatch == 46_209_811


def test_a_fixed_k_is_kept() -> None:
    """Where k = 2 is asked for, no cycle of three or more is offered."""
    state = _state(4, ks=(2,))
    KFkBSearch(state).run(5.0)
    assert state.best is not None
    assert state.best.k == 2
    assert state.best.per_microbatch == 6


def test_best_first_misses_no_partition() -> None:
    """The search ends with nothing better than the best over all partitions tried one by one."""
    for memory in (4, 5, 6, 9):
        state = _state(memory)
        KFkBSearch(state).run(5.0)
        every = _state(memory)
        for stages in _partitions(4, 4):
            caps = in_flight_limits(every.costs, stages, None)
            for _ in SteadyStates(every, stages, caps).expansions() if caps else ():
                pass
        assert state.best is not None
        assert every.best is not None
        assert state.best.per_microbatch == every.best.per_microbatch


def test_no_cycle_is_below_the_contiguous_bound() -> None:
    """The bound on contiguous plans of any k holds for every cycle found."""
    for memory in (4, 5, 6, 7, 9, 12):
        state = _state(memory)
        KFkBSearch(state).run(5.0)
        assert state.best is not None
        assert state.best.per_microbatch >= state.bounds.get("contiguous", Fraction(0))


def _partitions(layers: int, gpus: int) -> list[tuple[Stage, ...]]:
    found = []
    for number in range(gpus):
        for cuts in combinations(range(1, layers), number):
            borders = [0, *cuts, layers]
            found.append(
                tuple(
                    Stage(id=i, layers=(a, b - 1), gpu=i)
                    for i, (a, b) in enumerate(pairwise(borders))
                )
            )
    return found


def test_never_worse_than_an_input_limit() -> None:
    """No partition run eagerly under a limit for the input or a staircase beats the search."""
    random, met = Random(3), 0
    for _ in range(15):
        costs = _random_costs(random)
        state = _searched(costs)
        for stages in _partitions(costs.layers, costs.gpus):
            for schedule in _limited(costs, stages):
                if fits(memory_rows(costs, schedule)):
                    met += 1
                    assert state.best is not None
                    assert state.best.per_microbatch <= schedule.per_microbatch
    assert met > 180


def test_cycles_leave_out_nothing_that_differs() -> None:
    """Under every variant of the caps, whatever fits is no shorter than what the turns found."""
    random, met = Random(8), 0
    for _ in range(7):
        costs = _random_costs(random)
        for stages in _partitions(costs.layers, costs.gpus):
            caps = in_flight_limits(costs, stages, None)
            if caps is None:
                continue
            state = Incumbent(costs, _state(4).options)
            for _ in SteadyStates(state, stages, caps).expansions():
                pass
            for schedule in _eager(costs, stages, variants(caps)):
                if fits(memory_rows(costs, schedule)):
                    met += 1
                    assert state.best is not None
                    assert state.best.per_microbatch <= schedule.per_microbatch
    assert met > 175


def test_starts_have_room_or_balance() -> None:
    """Among the starts, for equal layers: a partition for each number of stages that may help."""
    costs = CostModel(_equal(12), uniform(12, 60), "2bw", "exact")
    state = Incumbent(costs, _state(4).options)
    state.raise_bound("any", closed_form_bound(costs))
    contiguous(state)
    assert state.best is not None
    found = {stages for stages in initial_partitions(state) if stages is not None}
    most = int(state.best.per_microbatch)
    assert all(lower_bound(costs, stages, (12,) * len(stages)) <= most for stages in found)
    assert len({len(stages) for stages in found}) > 1


def test_many_equal_layers_are_no_worse_than_pipedream() -> None:
    """Llama with 24 blocks on 32 GPUs at half the memory: PipeDream's exhaustive search has 997.2.

    Most partitions have the same lower bound there; the search went through them one by one.
    """
    cluster = uniform(32, 43_660_738_560, bandwidth_bytes_per_s=12 * 10**9, duplex="half")
    costs = CostModel(build("llama24"), cluster, "2bw", "exact")
    ends = {"gap": 0.669, "time_limit_s": 20.0, "clock": DeterministicClock()}
    state = Incumbent(costs, limits(ks=tuple(range(1, 9)), deterministic=True, **ends))
    state.raise_bound("any", closed_form_bound(costs))
    contiguous(state)
    KFkBSearch(state).run(20.0)
    assert state.best is not None
    assert state.best.per_microbatch < 997_200_000


def _equal(layers: int) -> Chain:
    return handmade.chain([(2, 3)] * layers, [{"output_bytes": 1, "saved_bytes": 6}] * layers)


def _random_costs(random: Random) -> CostModel:
    """Up to five layers with messages on three GPUs with little memory."""
    layers = random.randint(3, 5)
    times = [(random.randint(1, 5), random.randint(1, 9)) for _ in range(layers)]
    fields = [
        {"output_bytes": random.randint(0, 3), "saved_bytes": random.randint(1, 6)}
        for _ in range(layers)
    ]
    cluster = uniform(3, random.randint(15, 35), bandwidth_bytes_per_s=10**9, duplex="half")
    model: MemoryModel = random.choice(("exact", "paper"))
    return CostModel(handmade.chain(times, fields), cluster, "2bw", model)


def _searched(costs: CostModel) -> Incumbent:
    state = Incumbent(costs, _state(4).options)
    state.raise_bound("any", closed_form_bound(costs))
    contiguous(state)
    KFkBSearch(state).run(20.0)
    return state


def _limited(costs: CostModel, stages: tuple[Stage, ...]) -> Iterator[Schedule]:
    """What eager execution of a partition settles into, for every limit and order."""
    number = len(stages)
    for most in range(1, 2 * number + 1):
        yield from _eager(costs, stages, [(most,) * number, staircase(number, most)])


def _eager(
    costs: CostModel, stages: tuple[Stage, ...], limits: Iterable[tuple[int, ...]]
) -> Iterator[Schedule]:
    """What it settles into under each of the caps, in both orders."""
    orders: tuple[Order, ...] = ("alternate", "backward")
    for caps in limits:
        for order in orders:
            cycle = eager_cycle(steps_of(costs, stages), caps, order)
            if cycle is not None:
                times = dict(zip(chain_ops(stages), cycle.times, strict=True))
                yield Schedule(stages, cycle.period, cycle.k, times)
