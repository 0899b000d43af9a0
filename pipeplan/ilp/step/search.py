"""Search for a step plan: random rules for all placements, then annealing of the best ones.

All placements with their cuts play with random rules, and after each round the worse half go; the
best are improved by simulated annealing, the better ones for longer (successive halving: Jamieson
and Talwalkar 2016). Where that ends, rules are drawn anew: random restarts, each twice as long as
the one before. Steps of many micro-batches are searched with fewer: a rule says what to do for any
number. Source: ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from math import inf, log
from typing import Final

import numpy as np

from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.incumbent import Incumbent
from pipeplan.ilp.memory import memory_rows
from pipeplan.ilp.runs import Runs
from pipeplan.ilp.schedule import Schedule
from pipeplan.ilp.step.candidates import EARLY, Candidate, Contender
from pipeplan.ilp.step.cuts import CutSearch
from pipeplan.ilp.step.instance import StepInstance, instance
from pipeplan.ilp.step.list_scheduler import DispatchingRule, StepTimes, as_schedule, schedule_step
from pipeplan.ilp.step.moves import Moves
from pipeplan.ilp.step.placements import placements, stages_of
from pipeplan.ilp.step.rules import random_rule
from pipeplan.plan import Stage

SEARCHED: Final = 4
"""Micro-batches per GPU with which rules are searched, where a step has more."""
KEPT: Final = 4
"""Candidates that local search begins with."""
OPENING: Final = 0.35
"""Share of the time for scheduling all placements with random rules, at most."""
FIRST_RULES: Final = 2
"""Rules of each contender that the first round of the first draw tries."""
SLACK: Final = 1.15
"""A contender's step that is that much longer than another one's is given up."""
CUTS_S: Final = 0.002
"""What finding cuts counts for where work is counted."""
EVENT_S: Final = 0.16e-6
"""What an event of list scheduling counts for where work is counted instead of time."""
SET_UP: Final = 400
"""Events that every try counts for besides its own, so that tries without any end, too."""
STANDS: Final = 0.001
"""Local search that shortens a step by less has found nothing."""
LOCAL: Final = 2.0
"""Time of local search in times of the draw before it; its rounds have equal shares."""
ROUNDS: Final = 3
"""Of local search until one candidate has been improved alone."""
GROWTH: Final = 2
"""How many times as many rules the next draw begins with."""
TEMPERATURE: Final = 0.001
"""At the start of a slice, as a share of the step."""
NEVER: Final = 10**18
"""End of a step that does not fit: every other one is better."""
TIGHTER: Final = 4
"""How often room is made smaller where the exact count of a schedule does not fit."""


class StepSearch:
    """One search, which goes on where it was left."""

    name = "step search"

    def __init__(self, state: Incumbent) -> None:
        """Repeatable for a seed."""
        self.state, self.random = state, state.random(self.name)
        state.note_missing_compiler()
        self.moves = Moves(state.costs, self.random)
        self.microbatches = state.options.microbatches
        self.searched = min(self.microbatches, SEARCHED * state.costs.gpus)
        self._beyond_searched = self.microbatches - self.searched
        self._candidates: list[Candidate] = []
        """Of this draw, the best one first; none: rules are to be drawn."""
        self._all: list[Contender] = []
        self._waiting: Iterator[Contender] | None = None
        self._rules, self._round_s = FIRST_RULES, 0.0
        self._expected: float = inf
        """Least step of an offer, expected of fewer micro-batches and the load: all take long."""
        self._shortest = inf
        """Of the opening."""

    def run(self, seconds: float) -> None:
        """Search for so long at most, and for a share of it where no plan is known or found.

        One contender plays at least, also where no time is left.
        """
        state = self.state
        begin, seconds = state.elapsed, min(seconds, state.remaining)
        in_vain, end = begin + OPENING * seconds, begin + seconds
        while not (self._all and self._over(end)):
            if not self._candidates:
                self._draw(end)
                if not self._all or (self._best() is None and self._over(in_vain)):
                    return
            else:
                state.set_phase(self.name)
                self._round(end)

    def _draw(self, end: float) -> None:
        """The best candidates of all contenders, whose rules are drawn anew."""
        state = self.state
        state.set_phase(f"{self.name}: placements")
        begin = state.elapsed
        opened = begin + OPENING * (end - begin)
        for contender in chain(tuple(self._all), self._entered()):
            contender.best = None
            self._play(contender, self._rules, opened)
            if self._over(opened):
                break
        self._candidates = self._leaders(self._rules, opened)
        self._round_s = LOCAL * (state.elapsed - begin) / ROUNDS
        self._rules *= GROWTH

    def _entered(self) -> Iterator[Contender]:
        """Contenders that no draw has had time for; they are known from then on."""
        self._waiting = self._waiting or self._contenders()
        for contender in self._waiting:
            self._all.append(contender)
            yield contender

    def _round(self, end: float) -> None:
        """Improve every candidate; the worse half go, and the last one that nothing improves."""
        shortest, left = self._candidates[0].cost, len(self._candidates)
        for candidate in self._candidates:
            self._improve(candidate, min(end, self.state.elapsed + self._round_s / left))
        self._candidates.sort(key=lambda each: each.cost)
        improved = self._candidates[0].cost < (1 - STANDS) * shortest
        if left > 1:
            del self._candidates[(left + 1) // 2 :]
        elif not (improved or self._over(end)):
            self._candidates.clear()

    def _over(self, end: float) -> bool:
        return self._spent(end) or self.state.closed

    def _spent(self, end: float) -> bool:
        """`_over` where nothing is offered: looks are free."""
        return self.state.options.clock.spent >= end

    def _leaders(self, rules: int, end: float) -> list[Candidate]:
        """Contenders play, and after each round the worse half go; the best of the last ones.

        Every round tries as many rules of each contender that is left as all before together.
        """
        contenders = sorted(self._all, key=lambda each: each.best.cost if each.best else inf)
        while len(contenders) > KEPT and not self._over(end):
            contenders = contenders[: max(KEPT, (len(contenders) + 1) // 2)]
            rules *= 2
            for contender in contenders:
                self._play(contender, rules, end)
            contenders.sort(key=lambda each: each.best.cost if each.best else inf)
        found = [contender.best for contender in contenders if contender.best is not None]
        return found[:KEPT]

    def _contenders(self) -> Iterator[Contender]:
        """Every placement with its cuts, first the best plan's stages where they are others."""
        every = list(placements(self.state.costs))
        for stages in chain(self._beyond(every), self._stages(self.state.costs, every)):
            yield Contender(self._instance(stages, ()))

    def _beyond(self, every: Sequence[tuple[int, ...]]) -> Iterator[tuple[Stage, ...]]:
        """The best plan's stages, which no cuts of `every` may have: a start, pins or ties."""
        best, costs = self.state.best, self.state.costs
        gpus = () if best is None else tuple(stage.gpu for stage in best.stages)
        if best is None or (gpus in every and not (costs.pins or costs.tied_groups)):
            return
        cuts = [stage.first for stage in best.stages]
        for split in self._splits:
            yield stages_of(costs, cuts, gpus, [split] * len(cuts))

    @property
    def _splits(self) -> tuple[bool, ...]:
        """Whether backwards are split: both are tried where layers tell what that takes."""
        return (True, False) if self.state.costs.splits else (False,)

    def _stages(
        self, costs: CostModel, every: Sequence[tuple[int, ...]]
    ) -> Iterator[tuple[Stage, ...]]:
        """Placements with their cuts, backwards split where that is known, and whole."""
        for split in self._splits:
            search = CutSearch(costs, self.random, self.microbatches, split=split)
            for placement in every:
                for cuts in search.all(placement):
                    self.state.options.clock.charge(CUTS_S)
                    stages = stages_of(costs, cuts, placement, [split] * len(cuts))
                    if not (costs.keeps_ties(stages) and costs.keeps_pins(stages)):
                        continue
                    yield stages

    def _play(self, contender: Contender, rules: int, end: float) -> None:
        """Try so many random rules; the best one so far is offered."""
        for _ in range(rules):
            best, rule = contender.best, random_rule(contender.of, self.random)
            reserve = best.reserve if best else (0,) * self.state.costs.gpus
            horizon = min(
                best.times.end + 1 if best else inf,
                SLACK * self._shortest - self._beyond_ns(contender.of),
            )
            times = self._scheduled(contender.of, rule, horizon)
            if times is not None:
                expected = times.end + self._beyond_ns(contender.of)
                self._shortest = min(self._shortest, expected)
                new = Candidate(contender.of, rule, times, reserve, self._beyond_searched)
                if best is None or new.cost < best.cost:
                    contender.best = new
            if self._spent(end):
                break
        if contender.best is not None:
            self._offer(contender.best)
            contender.of = contender.best.of

    def _beyond_ns(self, of: StepInstance) -> int:
        """What the busiest GPU works for the micro-batches that are not searched."""
        return self._beyond_searched * of.load_ns

    def _scheduled(
        self, of: StepInstance, rule: DispatchingRule, horizon: float
    ) -> StepTimes | None:
        times, events = schedule_step(of, rule, horizon)
        self._charge(events)
        return times

    def _charge(self, events: int) -> None:
        self.state.options.clock.charge(EVENT_S * (SET_UP + events))

    def _improve(self, candidate: Candidate, end: float) -> None:
        """Simulated annealing over the rule and the cuts; the candidate becomes the best one."""
        clock, random = self.state.options.clock, self.random
        begin, first, now = clock.spent, candidate.times.end, replace(candidate)
        try:
            while not self._spent(end):
                left = (end - clock.spent) / (end - begin)
                warmth = TEMPERATURE * left * candidate.cost
                new = self._changed(now, now.cost - warmth * log(1 - random.random()))
                if new is None:
                    continue
                now = new
                if now.cost < candidate.cost:
                    candidate.of, candidate.rule, candidate.times = now.of, now.rule, now.times
        finally:  # the user may end the search amid a slice
            if candidate.times.end < first:
                self._offer(candidate)

    def _changed(self, old: Candidate, most: float) -> Candidate | None:
        """A neighbour, scheduled; None if it would cost more than `most`."""
        found = self._neighbour(old)
        if found is None:
            self._charge(0)
            return None
        of, rule = found
        least = EARLY * of.mean_ns + self._beyond_ns(of)
        times = self._scheduled(of, rule, most - least + 1)
        if times is None:
            return None
        new = Candidate(of, rule, times, old.reserve, old.beyond)
        return new if new.cost <= most else None

    def _neighbour(self, old: Candidate) -> tuple[StepInstance, DispatchingRule] | None:
        """Other stages or another rule; None where they are not allowed."""
        found = self.moves.neighbour(old.of, old.rule, old.due_to_stages)
        if found is None:
            return None
        stages, rule = found
        if stages is old.of.origin:
            return old.of, rule
        return self._with_less(self._instance(stages, old.of.runs), old.reserve), rule

    def _instance(self, stages: tuple[Stage, ...], runs: Runs) -> StepInstance:
        """The instance of stages of the chain as it is."""
        return instance(self.state.costs, stages, self.searched)

    def _with_less(self, made: StepInstance, reserve: tuple[int, ...]) -> StepInstance:
        gpus = made.gpus.copy()
        gpus["room"] -= np.array(reserve)
        return replace(made, gpus=gpus)

    def _best(self) -> Schedule | None:
        """The best schedule known."""
        return self.state.best

    def _accept(self, of: StepInstance, schedule: Schedule) -> bool:
        """Whether a schedule fits; it is kept if it is the best."""
        return self.state.offer(schedule)

    def _offer(self, candidate: Candidate) -> None:
        """The candidate's whole step; with less room, from then on, where exact bytes are over.

        The bytes of all micro-batches take long to count: those of the ones that are searched come
        first, which are mostly over where the others are. What may leave for the host may be over.
        """
        known = self.microbatches == self.searched
        ahead = not known and not self.state.options.offload
        for _ in range(TIGHTER):
            best, of = self._best(), candidate.of
            expected = candidate.times.end + self._beyond_ns(of)
            if best is not None and expected >= (best.period if known else self._expected):
                return
            over = _beyond_memory(of, as_schedule(of, candidate.times)) if ahead else []
            if not any(over):
                whole = self._all_microbatches(candidate)
                if whole is None:
                    return
                if self._accept(of, whole):
                    self._expected = min(self._expected, expected)
                    return
                over = _beyond_memory(of, whole)
            if not any(over):
                return
            pairs = zip(candidate.reserve, over, strict=True)
            reserve = tuple(own + more for own, more in pairs)
            again = self._instance(of.origin, of.runs)
            candidate.of, candidate.reserve = self._with_less(again, reserve), reserve
            fitting = self._scheduled(candidate.of, candidate.rule, inf)
            candidate.times = fitting or candidate.times._replace(end=NEVER)

    def _all_microbatches(self, candidate: Candidate) -> Schedule | None:
        """The whole step by the candidate's rule; None if there is no room."""
        of, times = candidate.of, candidate.times
        if self.microbatches == self.searched:
            return as_schedule(of, times)
        of = replace(of, microbatches=self.microbatches)
        found = self._scheduled(of, self._for_all(candidate.rule), inf)
        return None if found is None else as_schedule(of, found)

    def _for_all(self, rule: DispatchingRule) -> DispatchingRule:
        """What was no limit for fewer micro-batches is none for all."""
        limits = tuple(
            self.microbatches if limit == self.searched else limit for limit in rule.in_flight
        )
        return replace(rule, in_flight=limits)


def _beyond_memory(of: StepInstance, schedule: Schedule) -> list[int]:
    """Exact bytes of each GPU beyond its memory."""
    rows = memory_rows(of.costs, schedule)
    return [max(0, row.peak_bytes - row.budget_bytes) for row in rows]
