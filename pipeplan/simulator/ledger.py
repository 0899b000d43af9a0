"""The byte ledger: what each rank holds after every event of its tape, in the tape's order.

Allocations and releases happen at fixed places of the tape (docs/reference/model.md, O7). Only the
end of a compute is no entry; it is put where (O5) has it, between the entries before and after it
in time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from pipeplan.plan import OpKind
from pipeplan.simulator.charges import HOST, SAVED, WORKING, Charges
from pipeplan.simulator.engine import Times
from pipeplan.simulator.tape import Does, Entry, Ops, number


class Level(NamedTuple):
    """What a rank holds right after one event, beside its states; bytes and ns."""

    time: int
    saved: int
    working: int
    direct: int
    message: int
    host: int
    """What waits in the host's memory, no part of the total."""
    entry: int
    """Its index on the tape."""
    is_end: bool
    """Whether it is the end of the entry's compute."""
    counts: bool
    """Whether the model looks at this instant (the paper looks only at starts of computes)."""

    @property
    def total(self) -> int:
        """All bytes beside the states."""
        return self.saved + self.working + self.direct + self.message


class RankLedger:
    """One rank's ledger.

    `in_flight` and `unversioned` are filled while `levels` runs.
    """

    def __init__(
        self, charges: Charges, times: Times, rank: int, tape: list[Entry], steps: int | None
    ) -> None:
        """`steps`: micro-batches per optimizer step if weights have two versions, else None."""
        self._charges, self._times, self._rank, self._tape = charges, times, rank, tape
        self._steps = steps
        self._level = [0] * 5
        self._away: set[tuple[int, int]] = set()
        """(stage, micro-batch) that the host has."""
        self._shared: set[tuple[int, int]] = set()
        """(stage, micro-batch) whose W needs what the stage before still counts."""
        self._flying: dict[int, int] = {}
        self._updated: dict[int, int] = {}
        self.in_flight: dict[int, int] = {}
        """Per stage, the most micro-batches at once between start of F and end of B (or I)."""
        self.unversioned: tuple[int, int] | None = None
        """(stage, micro-batch) whose F comes before the weights that it must use exist."""

    def levels(self) -> Iterator[Level]:
        """What the rank holds after each event; an OPT and a compute without length are two."""
        ends, duration = self._times.end, self._times.ops.duration
        running: tuple[int, int, int] | None = None
        for index, when in enumerate(self._times.when[self._rank]):
            does, op, microbatch = self._tape[index]
            if running is not None and not self._precedes(index, when, running):
                yield self._end(*running)
                running = None
            if does == Does.COMPUTE:
                yield self._start(index, when, op, microbatch)
                running = (ends[op][microbatch] or 0, index, op)
                if not duration[op]:
                    yield self._end(*running)
                    running = None
                continue
            if does == Does.OPT:
                self._updated[op] = self._updated.get(op, 0) + 1
                self._level[WORKING] += self._charges.update[op]
                yield self._now(when, index)
                self._level[WORKING] -= self._charges.update[op]
            else:
                self._pass(does, op, microbatch)
            yield self._now(when, index)
        if running is not None:
            yield self._end(*running)

    def _precedes(self, index: int, when: int, running: tuple[int, int, int]) -> bool:
        """Whether the entry comes before the end of the compute that runs: only a FREE can."""
        end, computing, compute = running
        does, op, microbatch = self._tape[index]
        if does != Does.FREE or when > end:
            return False
        if when < end:
            return True
        position = self._times.ops.position
        mine, other = (microbatch, position[op]), (self._tape[computing][2], position[compute])
        return self._times.ops.duration[op] > 0 and mine < other

    def _pass(self, does: int, op: int, microbatch: int) -> None:
        """A message or a copy to or from the host."""
        term, difference = self._charges.beside(does, op)
        self._level[term] += difference
        if does == Does.OFFLOAD:
            self._away.add((Ops.stage(op), microbatch))

    def _start(self, index: int, when: int, op: int, microbatch: int) -> Level:
        stage, ops = Ops.stage(op), self._times.ops
        if op == ops.backward(stage):
            if (stage, microbatch) in self._away:
                self._away.remove((stage, microbatch))
                self._level[HOST] -= self._charges.back[op]
            self._unshare(stage + 1, microbatch)
        if Ops.kind(op) is OpKind.F:
            flying = self._flying[stage] = self._flying.get(stage, 0) + 1
            self.in_flight[stage] = max(self.in_flight.get(stage, 0), flying)
            updated = self._updated.get(ops.backward(stage), 0)
            if self._steps is not None and microbatch - updated > self._steps:
                self.unversioned = self.unversioned or (stage, microbatch)
        self._add(self._charges.start[op])
        return self._now(when, index)

    def _unshare(self, stage: int, microbatch: int) -> None:
        """What W needs of the stage before is its own from now on, if it waits for it."""
        if (stage, microbatch) in self._shared:
            self._shared.remove((stage, microbatch))
            self._level[SAVED] += self._charges.shared[number(OpKind.I, stage)]

    def _end(self, time: int, index: int, op: int) -> Level:
        kind, stage, microbatch = Ops.kind(op), Ops.stage(op), self._tape[index][2]
        if op == self._times.ops.backward(stage):
            self._flying[stage] = self._flying.get(stage, 0) - 1
            if self._charges.shared[op]:
                self._shared.add((stage, microbatch))
        elif kind is OpKind.W:
            self._unshare(stage, microbatch)
        self._add(self._charges.end[op])
        return self._now(time, index, is_end=True)

    def _add(self, change: list[int]) -> None:
        level = self._level
        for term, difference in enumerate(change):
            level[term] += difference

    def _now(self, time: int, index: int, *, is_end: bool = False) -> Level:
        starts_only = self._charges.starts_only
        counts = not starts_only or (self._tape[index][0] == Does.COMPUTE and not is_end)
        saved, working, direct, message, host = self._level
        return Level(time, saved, working, direct, message, host, index, is_end, counts)
