"""Baselines of recomputation, to compare with: cuts first, recomputed segments afterwards.

Full: every stage is one recomputed segment and keeps its input alone (GPipe, Huang et al. 2019,
section 2.3). Two-phase: the cuts that are best without a memory limit, then those options of these
stages that give the shortest period and fit. Both are 1F1B plans with one stage per GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from pipeplan.ilp import search
from pipeplan.ilp.contiguous.dynamic_program import ContiguousDP
from pipeplan.ilp.contiguous.unconstrained import unconstrained_stages
from pipeplan.ilp.incumbent import Incumbent
from pipeplan.ilp.recompute.contracted_chain import contract
from pipeplan.ilp.recompute.dynamic_program import RecomputeDP
from pipeplan.ilp.recompute.options import list_options
from pipeplan.ilp.recompute.search_result import SearchResult
from pipeplan.ilp.runs import Run, Segment
from pipeplan.plan import Stage


@dataclass
class FixedStagesDP(ContiguousDP):
    """As `ContiguousDP`, for stages that are given: which GPU each takes, and its times."""

    stages: Sequence[Segment] = field(kw_only=True)

    def _closed_on(self, kind: int) -> NDArray[np.bool_]:
        closed = np.ones((self.costs.layers, self.costs.layers), dtype=np.bool_)
        for stage in self.stages:
            closed[stage] = False
        return closed | super()._closed_on(kind)


def full_recompute(state: Incumbent, stages: Sequence[Stage]) -> SearchResult | None:
    """These stages, each of them one run; None if that does not fit."""
    return _planned(
        state, [Run(*stage.layers) for stage in stages], [stage.layers for stage in stages]
    )


def two_phase(state: Incumbent) -> SearchResult | None:
    """The stages that are best without a limit, with the best of their options; None if none."""
    costs, first = state.costs, unconstrained_stages(state)
    if not first:
        return None
    offered = list_options(
        costs.chain, first=[stage.first for stage in first], go_on=lambda: False
    )
    offered = offered.only(first)
    stages = [stage.layers for stage in first]
    found: list[SearchResult | None] = []
    for messages in (False, True):
        solver = RecomputeDP(costs, state.most_in_flight, messages=messages, options=offered)
        second = solver.shortest(1)
        if second is not None:
            found.append(_planned(state, solver.runs(second), stages))
    return min((each for each in found if each), key=lambda each: each.cost, default=None)


def _planned(
    state: Incumbent, runs: Sequence[Run], stages: Sequence[Segment]
) -> SearchResult | None:
    """The shortest 1F1B plan of given stages and runs that fits."""
    chain = contract(state.costs.chain, runs)
    costs = replace(state.costs, chain=chain.chain)
    inner = Incumbent(costs, replace(state.options))
    number = {layer: n for n, piece in enumerate(chain.pieces) for layer in piece}
    given = [(number[first], number[last]) for first, last in stages]
    optimistic, careful = (
        FixedStagesDP(costs, state.most_in_flight, messages=messages, stages=given)
        for messages in (False, True)
    )
    search.offer_shortest(inner, optimistic, careful, 1)
    return SearchResult(inner, chain) if inner.best else None
