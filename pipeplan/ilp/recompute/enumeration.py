"""Exhaustive enumeration for few layers: every set of recomputed segments on every allocation.

A set of segments gives a contracted chain (`contracted_chain`), and each allocation of a chain is
decided in exact ns and bytes by branch and bound or by CP-SAT (`exact.enumeration`). What is
proven of all of them holds for every plan, whatever it recomputes. Recomputation takes time: most
nodes have a lower bound above the best period known and are never solved. Source: ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Final

from pipeplan.ilp.bounds.load import load_bound
from pipeplan.ilp.cpsat.period_search import upper_bound
from pipeplan.ilp.cpsat.variables import Instance
from pipeplan.ilp.exact.allocations import NODE_S, allocations
from pipeplan.ilp.exact.enumeration import BestFirstEnumeration, Node, nodes
from pipeplan.ilp.incumbent import Incumbent
from pipeplan.ilp.recompute.contracted_chain import ContractedChain, contract
from pipeplan.ilp.recompute.joint_incumbent import JointIncumbent
from pipeplan.ilp.recompute.search_result import SearchResult
from pipeplan.ilp.runs import Run, Runs

SET_S: Final = 2e-4
"""What a set of runs counts for where work is counted instead of time: its chain is contracted."""
MOST: Final = 80_000
"""Allocations of all contracted chains together up to which each is looked at."""

Found = tuple[Incumbent, ContractedChain]


def recompute_sets(options: Sequence[int]) -> Iterator[Runs]:
    """Every set of disjoint runs, each in order and with every set of runs in it; none first.

    Args:
        options: how many each layer has.
    """
    yield from _behind(0, options)


def _behind(first: int, options: Sequence[int]) -> Iterator[Runs]:
    """Every set of runs of the layers from `first` on."""
    if first == len(options):
        yield ()
        return
    for rest in _behind(first + 1, options):
        yield rest
    for last in range(first, len(options)):
        # Those in it end before it does; programs lie outside of runs.
        for inner in _behind(first, [0] * last):
            for rest in _behind(last + 1, options):
                yield (Run(first, last, inner=inner), *rest)
    for number in range(options[first]):
        for rest in _behind(first + 1, options):
            yield (Run(first, first, number), *rest)


def count_sets(options: Sequence[int]) -> int:
    """How many sets `recompute_sets` has."""
    plain = [1]
    for size in range(1, len(options)):
        plain.append(_count([0] * size, plain))
    return _count(options, plain)


def _count(options: Sequence[int], plain: Sequence[int]) -> int:
    """The same, by how many sets so many layers without options have."""
    behind = [1]
    for count in reversed(options):
        # A run of n + 1 layers holds a set of its first n, and n layers fewer are behind it.
        runs = sum(inner * rest for inner, rest in zip(plain, behind, strict=False))
        behind.insert(0, (1 + count) * behind[0] + runs)
    return behind[0]


def decide(joint: JointIncumbent, kept: Fraction, seconds: float) -> None:
    """The shortest plan over all sets of runs, allocations and orders, as far as the time goes.

    It has the fewest micro-batches per period that are allowed; where that is one, the bound on
    such plans rises to what is proven. Nothing is tried where there is too much to try.

    Args:
        joint: the whole search, which takes what is found, also where the user ends it; only
            plans shorter than its best one are sought.
        kept: a bound on the period of plans that recompute nothing, one micro-batch each.
        seconds: time for it, listing what is to be tried included.
    """
    state, best = joint.state, joint.best.state.best
    state.set_phase("recompute enumeration")
    end = state.elapsed + seconds
    k = state.model_ks[0]
    high = None if best is None else int(-(-best.per_microbatch * k // 1)) - 1
    listed = _listed(state, high, k, kept if k == 1 else Fraction(0), end)
    if listed is None:
        return
    chains, asked = listed
    if high is None:
        serial = [upper_bound(inner, Instance(inner.costs, (), k=k)) for inner, _ in chains]
        high = max(serial, default=0)
    each = BestFirstEnumeration(state, k)
    try:
        decided = each.run(asked, end - state.elapsed, high)
    finally:
        for inner, chain in chains:
            if inner.best is not None:
                joint.take(SearchResult(inner, chain))
    proven = decided and each.unresolved is None and not state.options.offload
    if proven and joint.period is None:
        state.infeasible = _nothing_fits(state)


def _listed(
    state: Incumbent, high: int | None, k: int, kept: Fraction, end: float
) -> tuple[list[Found], list[Node]] | None:
    """The contracted chain of every set of runs whose load allows `high` ns, and its allocations.

    None if they are too many, or time is over.
    """
    chains: list[Found] = []
    asked: list[Node] = []
    options = [len(layer.options) for layer in state.costs.chain.layers]
    if count_sets(options) > MOST:
        return None
    clock = state.options.clock
    for runs in recompute_sets(options):
        if clock.spent >= end:
            return None
        clock.charge(SET_S)
        chain = contract(state.costs.chain, runs)
        costs = chain.of(state.costs)
        if high is not None and load_bound(costs) * k > high:
            continue
        # a copy: what is proven of this set of runs later says nothing of the others
        inner = Incumbent(costs, state.options, state.report, bounds=dict(state.bounds))
        inner.phase = state.phase
        homes = allocations(costs)
        if homes is None or len(asked) + len(homes) > MOST:
            return None
        clock.charge(NODE_S * len(homes))
        chains.append((inner, chain))
        asked += nodes(inner, homes, Fraction(0) if chain.runs else kept)
    return chains, asked


def _nothing_fits(state: Incumbent) -> str:
    return (
        f"chain {state.costs.chain.name!r}: no plan exists, whatever is recomputed: on every"
        " allocation of its layers some GPU's memory is exceeded, even by one micro-batch at a"
        " time. More memory or more GPUs would help."
    )
