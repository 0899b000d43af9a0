"""Neighbours of a step: other stages (borders, GPUs, splits, their number) or another rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Final

from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.step.instance import StepInstance
from pipeplan.ilp.step.list_scheduler import DispatchingRule
from pipeplan.ilp.step.placements import stages_of
from pipeplan.ilp.step.rules import PATIENCE, shortest_op
from pipeplan.plan import Stage

SIZES: Final = (0.02, 0.1, 0.3, 1.0)
"""Standard deviations of a change of ranks, in loads."""
BORDERS: Final = (-2, -1, 1, 2)
"""Layers by which a border moves."""
RUNS: Final = 0.5
"""How often layers go from one stage to any other one, rather than over a border or two."""
ALIKE: Final = 0.5
"""How often that one is on the same GPU, whose work stays what it is."""
RULE_MOVES: Final = (0.475, 0.2, 0.125, 0.0625, 0.1375)
"""How often ranks, ranks of single ops, patience, spacing and limits change if no stage does."""
STAGE_MOVES: Final = (0.7, 0.2, 0.04, 0.03, 0.03)
"""How often borders move, two stages change GPUs, one changes its GPU or whether it is split,
one is cut in two, and two become one."""
STAGES: Final = (0.1, 0.9)
"""How often stages change rather than the rule: at least, and at most."""

Neighbour = tuple[tuple[Stage, ...], DispatchingRule]


class Moves:
    """Random changes, which pins and ties allow."""

    def __init__(self, costs: CostModel, random: Random) -> None:
        self.costs, self.random = costs, random
        self._of_stages: tuple[Callable[[_Draft], object], ...] = (
            self._move_borders,
            self._swap,
            self._reassign,
            self._cut,
            self._merge,
        )
        self._of_rules: tuple[Callable[[StepInstance, DispatchingRule], DispatchingRule], ...] = (
            self._other_ranks,
            self._other_shifts,
            self._other_patience,
            self._other_spacing,
            self._other_limit,
        )

    def neighbour(
        self, of: StepInstance, rule: DispatchingRule, due_to_stages: float
    ) -> Neighbour | None:
        """Stages and a rule of which one is new; None if that is not allowed.

        Args:
            of: with the stages that are known.
            rule: that is known.
            due_to_stages: the share of the idle time that stages alone can shorten, 0 to 1. As
                often stages change rather than the rule.
        """
        least, most = STAGES
        if self.random.random() < min(most, max(least, due_to_stages)):
            return self._other_stages(of, rule)
        (change,) = self.random.choices(self._of_rules, RULE_MOVES)
        return of.origin, change(of, rule)

    def _other_stages(self, of: StepInstance, rule: DispatchingRule) -> Neighbour | None:
        (change,) = self.random.choices(self._of_stages, STAGE_MOVES)
        draft = _Draft(of, rule)
        change(draft)
        if not all(one < other for one, other in pairwise([*draft.cuts, self.costs.layers])):
            return None
        stages = stages_of(self.costs, draft.cuts, draft.placement, draft.splits)
        if not (self.costs.keeps_ties(stages) and self.costs.keeps_pins(stages)):
            return None
        forward, backward, weight = map(tuple, draft.ranks)
        limits = tuple(draft.limits)
        changed = replace(rule, ranks=(forward, backward, weight), in_flight=limits)
        if len(stages) != len(of.stages):
            changed = replace(changed, shifts={})
        return stages, changed

    def _move_borders(self, draft: _Draft) -> None:
        """One border or two move, or layers go from one stage to another, often of the same GPU.

        Then all borders between the two move alike, so that no other stage grows or shrinks.
        """
        random, stages = self.random, len(draft.cuts)
        if stages < 2:
            return
        if random.random() < RUNS:
            one = random.randrange(stages)
            others = [s for s in range(stages) if s != one]
            alike = [s for s in others if draft.placement[s] == draft.placement[one]]
            other = random.choice(alike if alike and random.random() < ALIKE else others)
            by = random.choice(BORDERS)
            for border in range(min(one, other), max(one, other)):
                draft.cuts[border + 1] += by
            return
        for _ in range(random.choice((1, 1, 2))):
            draft.cuts[random.randrange(1, stages)] += random.choice(BORDERS)

    def _swap(self, draft: _Draft) -> None:
        one, other = self.random.choices(range(len(draft.cuts)), k=2)
        placement = draft.placement
        placement[one], placement[other] = placement[other], placement[one]

    def _reassign(self, draft: _Draft) -> None:
        stage = self.random.randrange(len(draft.cuts))
        if self.random.random() < 0.5:
            draft.placement[stage] = self.random.randrange(self.costs.gpus)
        else:
            draft.splits[stage] = not draft.splits[stage]

    def _cut(self, draft: _Draft) -> None:
        """Both parts keep the ranks; what comes second has the later one."""
        stage = self.random.randrange(len(draft.cuts))
        behind = [*draft.cuts[1:], self.costs.layers][stage]
        if behind - draft.cuts[stage] < 2:
            return
        draft.cuts.insert(stage + 1, self.random.randrange(draft.cuts[stage] + 1, behind))
        draft.placement.insert(
            stage + self.random.randrange(2), self.random.randrange(self.costs.gpus)
        )
        draft.double(stage)

    def _merge(self, draft: _Draft) -> None:
        if len(draft.cuts) > 1:
            stage = self.random.randrange(len(draft.cuts) - 1)
            del draft.cuts[stage + 1], draft.placement[stage + self.random.randrange(2)]
            draft.drop(stage)

    def _other_ranks(self, of: StepInstance, rule: DispatchingRule) -> DispatchingRule:
        """A few ranks, or all of one kind on one GPU, move by a random amount."""
        random, load = self.random, of.load_ns
        ranks = [list(row) for row in rule.ranks]
        if random.random() < 0.2:
            kind, by = random.randrange(3), random.gauss(0, 1) * random.choice(SIZES) * load
            for stage in random.choice([own for own in of.hosted if own]):
                ranks[kind][stage] += by
        else:
            for _ in range(random.choice((1, 1, 2, 3))):
                kind, stage = random.randrange(3), random.randrange(len(of.stages))
                ranks[kind][stage] += random.gauss(0, 1) * random.choice(SIZES) * load
        forward, backward, weight = map(tuple, ranks)
        return replace(rule, ranks=(forward, backward, weight))

    def _other_shifts(self, of: StepInstance, rule: DispatchingRule) -> DispatchingRule:
        """One op moves by a random amount, or goes back to where all of its kind are."""
        random, m = self.random, of.microbatches
        shifts = dict(rule.shifts)
        if shifts and random.random() < 0.25:
            del shifts[random.choice(list(shifts))]
            return replace(rule, shifts=shifts)
        stage, number = random.randrange(len(of.stages)), random.randrange(m)
        place = (random.randrange(3), stage, number if number < m / 2 else number - m)
        by = random.gauss(0, 1) * random.choice(SIZES) * of.load_ns
        return replace(rule, shifts=shifts | {place: shifts.get(place, 0) + by})

    def _other_patience(self, of: StepInstance, rule: DispatchingRule) -> DispatchingRule:
        return replace(rule, patience=int(self.random.choice(PATIENCE) * shortest_op(of)))

    def _other_spacing(self, of: StepInstance, rule: DispatchingRule) -> DispatchingRule:
        return replace(rule, spacing=rule.spacing * self.random.lognormvariate(0, 0.2))

    def _other_limit(self, of: StepInstance, rule: DispatchingRule) -> DispatchingRule:
        limits = list(rule.in_flight)
        stage = self.random.randrange(len(limits))
        other = limits[stage] + self.random.choice((-2, -1, 1, 2))
        limits[stage] = min(of.microbatches, max(1, other))
        return replace(rule, in_flight=tuple(limits))


class _Draft:
    """Stages and what a rule says of each, as lists."""

    def __init__(self, of: StepInstance, rule: DispatchingRule) -> None:
        self.of = of
        self.cuts = [stage.first for stage in of.origin]
        self.placement = [stage.gpu for stage in of.origin]
        self.splits = [stage.split_backward for stage in of.origin]
        # The first stage is never split (S1): it says what a stage that takes its place shall be.
        self.splits[0] |= any(self.splits)
        self.ranks = [list(row) for row in rule.ranks]
        self.limits = list(rule.in_flight)

    def double(self, stage: int) -> None:
        """The stage is two: half of its forward comes first, half of its backward last."""
        half: Sequence[float] = (self.of.forward[stage] / 2, -self.of.backward[stage] / 2, 0)
        for row, later in zip(self.ranks, half, strict=True):
            row.insert(stage + 1, row[stage] + max(0, later))
            row[stage] += max(0, -later)
        self.limits.insert(stage + 1, self.limits[stage])
        self.splits.insert(stage + 1, self.splits[stage])

    def drop(self, stage: int) -> None:
        """The stage and the next one are one: its forward begins with the first."""
        forward, backward, weight = self.ranks
        del forward[stage + 1], backward[stage], weight[stage]
        del self.limits[stage], self.splits[stage]
