"""Local search for a step plan: rules, limits and cuts of several placements.

Every placement is scheduled with all initial rules; the best of them are improved in turn, the
better ones for longer (successive halving: Jamieson and Talwalkar 2016). A change that does not
make the step longer is kept. Steps of many micro-batches are searched with fewer: a rule says
what to do for any number. Source: ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf
from typing import Final

from pipeplan.ilp.incumbent import Incumbent
from pipeplan.ilp.memory import memory_rows
from pipeplan.ilp.step.instance import StepInstance, instance
from pipeplan.ilp.step.list_scheduler import DispatchingRule, StepTimes, as_schedule, schedule_step
from pipeplan.ilp.step.placements import balanced_cuts, placements, stages_of
from pipeplan.ilp.step.rules import PATIENCE, initial_rules, shortest_op
from pipeplan.plan import Stage

SEARCHED: Final = 4
"""Micro-batches per GPU with which rules are searched, where a step has more."""
KEPT: Final = 8
"""Candidates that local search begins with."""
OPENING: Final = 0.35
"""Share of the time for scheduling all placements with the initial rules."""
FIRST_RULES: Final = 12
"""Rules of each placement that the first round tries."""
SIZES: Final = (0.02, 0.1, 0.3, 1.0)
"""Standard deviations of a change of ranks, in loads."""
STAGE_S: Final = 2e-5
"""What a stage's micro-batch counts for where work is counted instead of time."""
TIGHTER: Final = 4
"""How often room is made smaller where the exact count of a schedule does not fit."""


@dataclass(slots=True)
class Candidate:
    """Stages and a rule, and the step they give."""

    cuts: tuple[int, ...]
    placement: tuple[int, ...]
    split: bool
    of: StepInstance
    rule: DispatchingRule
    times: StepTimes
    reserve: tuple[int, ...]
    """By GPU: bytes that exact counts of its schedules were beyond the scheduler's own."""

    @property
    def cost(self) -> float:
        """The end of the step; among equals, GPUs that end early are better."""
        return self.times.end + 0.1 * sum(self.times.ends) / len(self.times.ends)


@dataclass(slots=True)
class _Contender:
    """A placement before local search: its instance, the rules to try, the best so far."""

    cuts: tuple[int, ...]
    placement: tuple[int, ...]
    split: bool
    of: StepInstance
    rules: list[DispatchingRule]
    best: Candidate | None = None


class StepSearch:
    """One search, which goes on where it was left."""

    name = "step search"

    def __init__(self, state: Incumbent) -> None:
        """Repeatable for a seed."""
        self.state, self.random = state, state.random(self.name)
        self.microbatches = state.options.microbatches
        self.searched = min(self.microbatches, SEARCHED * state.costs.gpus)
        self._candidates: list[Candidate] | None = None

    def run(self, seconds: float) -> None:
        """Search for so long at most."""
        state = self.state
        end = state.elapsed + min(seconds, state.remaining)
        if self._candidates is None:
            state.set_phase(f"{self.name}: placements")
            self._candidates = self._opening(state.elapsed + OPENING * (end - state.elapsed))
        state.set_phase(self.name)
        while self._candidates and not self._over(end):
            slice_s = (end - state.elapsed) / (2 * len(self._candidates))
            for candidate in self._candidates:
                self._improve(candidate, min(end, state.elapsed + slice_s))
            self._candidates.sort(key=lambda each: each.cost)
            if len(self._candidates) > 1:
                self._candidates = self._candidates[: (len(self._candidates) + 1) // 2]

    def _over(self, end: float) -> bool:
        return self.state.done or self.state.options.clock.spent >= end

    def _opening(self, end: float) -> list[Candidate]:
        """The best rules of the best placements: all play, and after each round the worse half go.

        Every round tries as many rules of each placement that is left as all before together.
        """
        entries = list(self._entries())
        tried, rounds = 0, FIRST_RULES
        while entries and not self._over(end):
            for entry in entries:
                for rule in entry.rules[tried : tried + rounds]:
                    self._try(entry, rule)
                    if self._over(end):
                        break
                if entry.best is not None:
                    self._offer(entry.best)
            tried, rounds = tried + rounds, 2 * rounds
            entries.sort(key=lambda each: each.best.cost if each.best else inf)
            entries = entries[: max(KEPT, (len(entries) + 1) // 2)]
            if all(tried >= len(entry.rules) for entry in entries):
                break
        return [entry.best for entry in entries if entry.best is not None][:KEPT]

    def _entries(self) -> Iterator[_Contender]:
        """Every placement with balanced cuts, backwards split where that is known, and whole."""
        costs = self.state.costs
        can_split = any(costs.may_split(layer, layer) for layer in range(1, costs.layers))
        for placement in placements(costs):
            cuts = balanced_cuts(costs, placement)
            for split in (True, False) if can_split else (False,):
                stages = stages_of(costs, cuts, placement, split=split)
                if not (costs.keeps_ties(stages) and costs.keeps_pins(stages)):
                    continue
                of = instance(costs, stages, self.searched)
                rules = list(initial_rules(of))
                self.random.shuffle(rules)
                yield _Contender(cuts, placement, split, of, rules)

    def _try(self, entry: _Contender, rule: DispatchingRule) -> None:
        best = entry.best
        times = self._scheduled(entry.of, rule, best.times.end + 1 if best else inf)
        if times is None:
            return
        reserve = (0,) * self.state.costs.gpus
        new = Candidate(entry.cuts, entry.placement, entry.split, entry.of, rule, times, reserve)
        if best is None or new.cost < best.cost:
            entry.best = new

    def _scheduled(
        self, of: StepInstance, rule: DispatchingRule, horizon: float
    ) -> StepTimes | None:
        self.state.options.clock.charge(STAGE_S * len(of.stages) * of.microbatches)
        return schedule_step(of, rule, horizon)

    def _improve(self, candidate: Candidate, end: float) -> None:
        """Change the rule or the cuts; what does not make the step longer stays."""
        before, best = candidate.times.end, candidate.times.end
        while not self._over(end):
            new = self._changed(candidate)
            if new is None or new.cost > candidate.cost:
                continue
            candidate.cuts, candidate.of = new.cuts, new.of
            candidate.rule, candidate.times = new.rule, new.times
            if candidate.times.end < best:
                best = candidate.times.end
                if self.microbatches == self.searched:
                    self._offer(candidate)
        if best < before:
            self._offer(candidate)

    def _changed(self, old: Candidate) -> Candidate | None:
        """A neighbour, scheduled; None if its step would surely be longer."""
        random, cuts, of, rule = self.random, old.cuts, old.of, old.rule
        kind = random.random()
        if kind < 0.2 and len(cuts) > 1:
            moved = self._moved_cut(old)
            if moved is None:
                return None
            cuts, of = moved
        elif kind < 0.75:
            rule = self._other_ranks(of, rule)
        elif kind < 0.85:
            rule = replace(rule, patience=int(random.choice(PATIENCE) * shortest_op(of)))
        elif kind < 0.9:
            rule = replace(rule, spacing=rule.spacing * random.lognormvariate(0, 0.2))
        else:
            rule = self._other_limit(of, rule)
        times = self._scheduled(of, rule, old.times.end * 1.1 + 1)
        if times is None:
            return None
        return Candidate(cuts, old.placement, old.split, of, rule, times, old.reserve)

    def _moved_cut(self, old: Candidate) -> tuple[tuple[int, ...], StepInstance] | None:
        """One border goes a layer or two to either side."""
        cuts = list(old.cuts)
        index = self.random.randrange(1, len(cuts))
        cuts[index] += self.random.choice((-2, -1, 1, 2))
        behind = [*cuts[1:], self.state.costs.layers]
        if not all(first < second for first, second in zip(cuts, behind, strict=True)):
            return None
        costs = self.state.costs
        stages = stages_of(costs, cuts, old.placement, split=old.split)
        if not (costs.keeps_ties(stages) and costs.keeps_pins(stages)):
            return None
        return tuple(cuts), self._instance(stages, old.reserve)

    def _instance(self, stages: tuple[Stage, ...], reserve: tuple[int, ...]) -> StepInstance:
        made = instance(self.state.costs, stages, self.searched)
        room = [own - more for own, more in zip(made.room, reserve, strict=True)]
        return replace(made, room=room)

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

    def _other_limit(self, of: StepInstance, rule: DispatchingRule) -> DispatchingRule:
        limits = list(rule.in_flight)
        stage = self.random.randrange(len(limits))
        limits[stage] = min(
            of.microbatches, max(1, limits[stage] + self.random.choice((-2, -1, 1, 2)))
        )
        return replace(rule, in_flight=tuple(limits))

    def _offer(self, candidate: Candidate) -> None:
        """The candidate's whole step; with less room where the exact count is over."""
        state, best = self.state, self.state.best
        known = self.microbatches == self.searched
        if known and best is not None and candidate.times.end >= best.period:
            return
        rule = self._for_all(candidate.rule)
        for _ in range(TIGHTER):
            of = replace(candidate.of, microbatches=self.microbatches)
            times = self._scheduled(of, rule, inf)
            if times is None:
                return
            schedule = as_schedule(of, times)
            if state.offer(schedule):
                return
            rows = memory_rows(state.costs, schedule)
            over = [max(0, row.peak_bytes - row.budget_bytes) for row in rows]
            if not any(over):
                return
            pairs = zip(candidate.reserve, over, strict=True)
            candidate.reserve = tuple(own + more for own, more in pairs)
            candidate.of = self._instance(of.stages, candidate.reserve)

    def _for_all(self, rule: DispatchingRule) -> DispatchingRule:
        """What was no limit for fewer micro-batches is none for all."""
        limits = tuple(
            self.microbatches if limit == self.searched else limit for limit in rule.in_flight
        )
        return replace(rule, in_flight=limits)
