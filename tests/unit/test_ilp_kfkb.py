"""Eager cycles of contiguous partitions: what they gain, and that their floor holds."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations, pairwise

from pipeplan.chain import Chain, Layer
from pipeplan.cluster import uniform
from pipeplan.ilp.bounds import any_bound
from pipeplan.ilp.costs import Costs
from pipeplan.ilp.incumbent import Incumbent, Options
from pipeplan.ilp.kfkb import EagerSearch
from pipeplan.ilp.search import contiguous
from pipeplan.plan import Stage


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
    costs = Costs(_chain(), uniform(gpus, memory), "2bw", "exact")
    options = Options(
        microbatches=8,
        limit_versions=False,
        ks=ks,
        contiguous_only=True,
        time_limit_s=30.0,
        gap=0.0,
        seed=0,
        workers=1,
        deterministic=True,
    )
    state = Incumbent(costs, options)
    state.prove("any", any_bound(costs))
    contiguous(state)
    return state


def test_figure_four_gains_from_two_micro_batches() -> None:
    """1F1B needs 8 ns at 4 bytes; a cycle of several micro-batches reaches the load, 6 ns."""
    state = _state(4)
    assert state.best is not None
    assert state.best.per_microbatch == 8
    EagerSearch(state).run(5.0)
    assert state.best.per_microbatch == 6
    assert state.best.k > 1


def test_a_fixed_k_is_kept() -> None:
    """Where k = 2 is asked for, no cycle of three or more is offered."""
    state = _state(4, ks=(2,))
    EagerSearch(state).run(5.0)
    assert state.best is not None
    assert state.best.k == 2
    assert state.best.per_microbatch == 6


def test_best_first_misses_no_partition() -> None:
    """The search ends with nothing better than the best over all partitions tried one by one."""
    for memory in (4, 5, 6, 9):
        state = _state(memory)
        EagerSearch(state).run(5.0)
        every = _state(memory)
        search = EagerSearch(every)
        for stages in _partitions(4, 4):
            search._add(stages)
        while search._heap:
            _, _, stages, caps = search._heap.pop()
            search._offer_cycles(stages, caps)
        assert state.best is not None
        assert every.best is not None
        assert state.best.per_microbatch == every.best.per_microbatch


def test_no_cycle_is_below_the_contiguous_bound() -> None:
    """The bound on contiguous plans of any k holds for every cycle found."""
    for memory in (4, 5, 6, 7, 9, 12):
        state = _state(memory)
        EagerSearch(state).run(5.0)
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
