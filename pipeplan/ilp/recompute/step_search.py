"""The search for a step plan (`step.search`) in which stages also decide what they recompute.

Placements play with several sets of recomputed layers; local search then changes the sets, too.
Source: ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import inf
from typing import Final, NamedTuple

from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.recompute.contracted_chain import ContractedChain
from pipeplan.ilp.recompute.contraction_cache import ContractionCache, clip_to_stages
from pipeplan.ilp.recompute.joint_incumbent import JointIncumbent
from pipeplan.ilp.recompute.moves import mutate, options_of, ways
from pipeplan.ilp.runs import Run, Runs, Segment
from pipeplan.ilp.schedule import Schedule
from pipeplan.ilp.step.candidates import Candidate, Contender
from pipeplan.ilp.step.instance import StepInstance, instance
from pipeplan.ilp.step.list_scheduler import DispatchingRule
from pipeplan.ilp.step.placements import placements
from pipeplan.ilp.step.search import StepSearch
from pipeplan.plan import Stage

SETS: Final = 0.3
"""Share of the changes that are those of what is recomputed."""
IN_FLIGHT: Final = (1.0, 0.75, 0.5, 0.25)
"""Micro-batches of the whole chain for each GPU, for which sets of recomputed layers are made."""
PROBE: Final = 1
"""The placement with which sets are compared: V-shaped, each GPU twice."""
CONTRACTION_S: Final = 1e-3
"""What contracting runs counts for where work is counted."""


class RecomputeStepSearch(StepSearch):
    """As `StepSearch`, over the contracted chains of one chain."""

    name = "recompute step search"

    def __init__(self, joint: JointIncumbent) -> None:
        """Repeatable for a seed."""
        super().__init__(joint.state)
        self.joint, self._pieces = joint, ContractionCache(joint.state.costs)

    def _over(self, end: float) -> bool:
        return self._spent(end) or self.joint.closed

    def _best(self) -> Schedule | None:
        return self.joint.best.state.best

    def _accept(self, of: StepInstance, schedule: Schedule) -> bool:
        return self.joint.offer(self._contracted(of.origin, of.runs)[0], of.costs, schedule)

    def _contenders(self) -> Iterator[Contender]:
        """The best plan, then all placements, first with the sets that suit one of them."""
        best = self.joint.best
        if best.state.best is not None:
            known = tuple(sorted(best.contracted.runs)) if best.contracted else ()
            yield Contender(self._instance(best.stages, known))
        every = list(placements(self.state.costs))
        probe = every[min(PROBE, len(every) - 1)]
        steps: dict[Runs, float] = {}
        for runs in self._sets():
            steps[runs] = inf
            for contender in self._with(runs, [probe]):
                yield contender  # who asks for the next one has scheduled it
                if contender.best is not None:
                    steps[runs] = min(steps[runs], contender.best.cost)
        rest = [placement for placement in every if placement != probe]
        for runs in sorted(steps, key=steps.__getitem__):
            yield from self._with(runs, rest)

    def _with(self, runs: Runs, every: Sequence[tuple[int, ...]]) -> Iterator[Contender]:
        for stages in self._stages(self._pieces.of(runs)[1], every):
            yield Contender(self._instance(stages, runs))

    def _sets(self) -> list[Runs]:
        """Layers that run again so that some micro-batches of the whole chain fit; each set once.

        Those changes come first that free most bytes for their time. Runs alone make sets, too: a
        backward under an option is whole.
        """
        costs = self.state.costs
        size, memory = costs.segment(0, costs.layers - 1), sum(costs.budgets)
        variants = [self._pieces.of(runs)[1] for runs in ways(costs.chain)]
        every, alone = _changes(costs, variants), _changes(costs, variants[:1])
        sets: list[Runs] = []
        for share, changes in product(IN_FLIGHT, (every, alone)):
            over = share * costs.gpus * size.saved + size.states - memory
            chosen: dict[int, Run] = {}
            for change in changes:
                if over <= 0:
                    break
                chosen[change.run.first] = change.run
                over -= share * costs.gpus * change.freed
            sets.append(tuple(run for _, run in sorted(chosen.items())))
        return list(dict.fromkeys(sets))

    def _neighbour(self, old: Candidate) -> tuple[StepInstance, DispatchingRule] | None:
        if self.random.random() >= SETS:
            return super()._neighbour(old)
        stage, chain = self.random.choice(old.of.origin).layers, self.state.costs.chain
        options = options_of(chain, stage)
        runs = mutate(self.random, old.of.runs, stage, self._whole(stage), options)
        if runs == old.of.runs:
            return None
        return self._with_less(self._instance(old.of.origin, runs), old.reserve), old.rule

    def _whole(self, stage: Segment) -> list[Runs]:
        """A stage all of whose layers run alike."""
        inside = range(stage[0], stage[1] + 1)
        alike = [
            tuple(run for run in runs if run.first in inside)
            for runs in ways(self.state.costs.chain)
        ]
        return [(), (Run(*stage),), *(runs for runs in alike if runs)]

    def _instance(self, stages: tuple[Stage, ...], runs: Runs) -> StepInstance:
        self.state.options.clock.charge(CONTRACTION_S)
        contracted, costs = self._contracted(stages, runs)
        places = contracted.renumbered((stage.first, stage.last, stage.gpu) for stage in stages)
        mine = tuple(
            Stage(
                id=stage.id,
                layers=(first, last),
                gpu=gpu,
                split_backward=stage.split_backward and costs.may_split(first, last),
            )
            for stage, (first, last, gpu) in zip(stages, places, strict=True)
        )
        kept = tuple(sorted(contracted.runs))
        return instance(costs, mine, self.searched, origin=stages, runs=kept)

    def _contracted(
        self, stages: tuple[Stage, ...], runs: Runs
    ) -> tuple[ContractedChain, CostModel]:
        return self._pieces.of(clip_to_stages(runs, [stage.layers for stage in stages]))


class _Change(NamedTuple):
    """A layer runs in another way than before: bytes that are free for each ns, bytes, how."""

    worth: float
    freed: int
    run: Run


def _changes(costs: CostModel, variants: Sequence[CostModel]) -> list[_Change]:
    """What layers may do instead, the most worthwhile first; those of a layer follow each other.

    Args:
        costs: of the chain as it is.
        variants: of the chains whose layers run in other ways, in the order of `ways`; some may be
            left out at the end.
    """
    found: list[_Change] = []
    for layer in range(costs.layers):
        now = _taken(costs, layer)
        options = len(costs.chain.layers[layer].options)
        left = {
            Run(layer, layer, number - 1 if number else None): _taken(variant, layer)
            for number, variant in enumerate(variants[: 1 + options])
        }
        while left := {run: way for run, way in left.items() if way.saved < now.saved}:
            changes = [
                _Change(
                    (now.saved - way.saved) / max(1, way.ns - now.ns), now.saved - way.saved, run
                )
                for run, way in left.items()
            ]
            found.append(max(changes, key=lambda change: change[:2]))
            now = left[found[-1].run]
    return sorted(found, key=lambda change: -change.worth)


class _Taken(NamedTuple):
    """Of a layer: bytes from F to B, ns of both."""

    saved: int
    ns: int


def _taken(costs: CostModel, layer: int) -> _Taken:
    return _Taken(costs.segment(layer, layer, layer > 0).saved, costs.load_ns(layer, layer, 0))
