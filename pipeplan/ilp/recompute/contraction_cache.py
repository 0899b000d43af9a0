"""Contracted chains of one chain, cached for searches over sets of recomputed segments."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache, lru_cache, partial

from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.recompute.contracted_chain import ContractedChain, as_layer, contract
from pipeplan.ilp.runs import Run, Segment

LATEST = 256
"""Contracted chains that are remembered, with all that was counted of their segments."""


class ContractionCache:
    """Sets of runs of one chain on one cluster."""

    def __init__(self, costs: CostModel) -> None:
        """Begin with nothing; `costs` are of the chain as it is."""
        self._costs = costs
        self._layer = cache(partial(as_layer, costs.chain))
        self.of = lru_cache(maxsize=LATEST)(self._of)
        """The contracted chain of disjoint runs in order, and the same machines with it."""

    def _of(self, runs: tuple[Run, ...]) -> tuple[ContractedChain, CostModel]:
        chain = contract(self._costs.chain, runs, self._layer)
        return chain, chain.of(self._costs)


def clip_to_stages(runs: Sequence[Run], stages: Iterable[Segment]) -> tuple[Run, ...]:
    """The parts of `runs` that lie in one stage each; both are in order, stages without gaps."""
    found: list[Run] = []
    at = 0
    for first, last in stages:
        while at < len(runs) and runs[at].first <= last:
            run = runs[at]
            found.append(run.clip(first, last))
            if run.last > last:
                break
            at += 1
    return tuple(found)
