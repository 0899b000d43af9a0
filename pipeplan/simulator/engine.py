"""The clock: decides when each entry of each tape happens, in one pass over the data flow.

A rank is advanced until its next entry waits for a message; whatever completes the message wakes
it. No entry is looked at twice without cause, so a run costs time linear in its entries.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pipeplan.plan import OpKind
from pipeplan.simulator.links import LinkStates
from pipeplan.simulator.tape import Does, Entry, Ops, number

LONG_AGO = -(2**100)
"""Before anything a plan can name: when a rank on the plan clock became free."""


@dataclass(frozen=True, slots=True)
class Late:
    """An entry that could not happen when the plan says."""

    rank: int
    index: int
    due: int
    ready: int
    reason: str


@dataclass(frozen=True, slots=True)
class Times:
    """When everything happened, in ns. Lists are by op and micro-batch; None: it never did."""

    ops: Ops
    start: list[list[int | None]]
    end: list[list[int | None]]
    when: list[list[int]]
    """Per rank and entry: the start of a compute, the instant of anything else."""

    def rows(
        self,
    ) -> Iterator[tuple[OpKind, int, int | tuple[int, int], int, int, int]]:
        """(kind, stage, place, micro-batch, start, end) of every op that happened."""
        for op, starts in enumerate(self.start):
            kind, stage, place = self.ops.kind(op), self.ops.stage(op), self.ops.place[op]
            for microbatch, (start, end) in enumerate(zip(starts, self.end[op], strict=True)):
                if start is not None and end is not None:
                    yield kind, stage, place, microbatch, start, end


class Engine:
    """One run of all tapes.

    Args:
        ops: the plan's ops.
        tapes: the entries of each rank.
        microbatches: how many the tapes handle.
        links: which transfer a link takes next.
        due: per rank and entry the planned time, or None for the eager clock. On the plan clock
            nothing is ever delayed: an entry that is not ready goes on record in `late`.
        updates: whether OPT takes its time.
    """

    def __init__(
        self,
        ops: Ops,
        tapes: list[list[Entry]],
        microbatches: int,
        links: LinkStates,
        *,
        due: list[list[int]] | None = None,
        updates: bool = False,
    ) -> None:
        size = range(len(ops.present))
        self.times = Times(
            ops,
            [[None] * microbatches for _ in size],
            [[None] * microbatches for _ in size],
            [[] for _ in tapes],
        )
        self.late: list[Late] = []
        self.position = [0] * len(tapes)
        """Per rank, the entry that it has not passed yet."""
        self.issued: set[tuple[int, int]] = set()
        self.posted: set[tuple[int, int]] = set()
        """Transfers with one end ready; a PREFETCH is issued by the end of its OFFLOAD."""
        self.ops, self.tapes = ops, tapes
        self._away = {
            (ops.stage(op), microbatch)
            for tape in tapes
            for does, op, microbatch in tape
            if does == Does.OFFLOAD
        }
        self._links, self._due = links, due
        self._updates = updates
        self.now = [0 if due is None else LONG_AGO] * len(tapes)
        self.host = [LONG_AGO] * len(tapes)
        """Per rank, when its host is free."""
        self._versions: dict[int, tuple[int, int]] = {}
        """By stage, its optimizer steps so far and when the host had made the last of them."""
        self._ready: dict[tuple[int, int], int] = {}
        self._waiting: dict[tuple[int, int], list[int]] = {}

    def run(self) -> bool:
        """Runs to the end; whether every rank reached the end of its tape."""
        awake = list(range(len(self.tapes)))
        while True:
            while awake:
                self._advance(awake.pop())
            for op, microbatch, start in self._links.grant():
                end = start + self.ops.duration[op]
                self.times.start[op][microbatch] = start
                self.times.end[op][microbatch] = end
                if self.ops.kind(op) is OpKind.OFFLOAD:
                    back = number(OpKind.PREFETCH, self.ops.stage(op))
                    self._ready_end((back, microbatch), end, self.issued)
                awake += self._waiting.pop((op, microbatch), [])
            if not awake and self._links.idle():
                return all(
                    p == len(tape) for p, tape in zip(self.position, self.tapes, strict=True)
                )

    def _advance(self, rank: int) -> None:
        tape, when = self.tapes[rank], self.times.when[rank]
        for index in range(self.position[rank], len(tape)):
            does, op, microbatch = tape[index]
            if does == Does.COMPUTE:
                passed = self._compute(rank, index, op, microbatch)
            elif does == Does.FREE:
                passed = self._free(rank, op, microbatch)
            elif does == Does.OPT:
                if self._updates:
                    self._update(rank, self.ops.stage(op))
                else:
                    when.append(self.now[rank])
                passed = True
            else:
                passed = self._transfer(rank, index, op, microbatch)
            if not passed:
                self.position[rank] = index
                return
        self.position[rank] = len(tape)

    def _update(self, rank: int, stage: int) -> None:
        """An optimizer step; what the host does of it behind that, one stage after the other."""
        done, ready = self._versions.get(stage, (0, LONG_AGO))
        begin = max(self.now[rank], ready)
        self.times.when[rank].append(begin)
        self.now[rank] = begin + self.ops.update[stage]
        rest = self.ops.behind[stage]
        if rest:
            self.host[rank] = max(self.host[rank], self.now[rank]) + rest
        self._versions[stage] = done + 1, self.host[rank] if rest else LONG_AGO

    def _weights(self, op: int, microbatch: int) -> int:
        """When the host has brought the weights that a forward is the first to read (2bw)."""
        if self.ops.kind(op) is not OpKind.F:
            return LONG_AGO
        done, ready = self._versions.get(self.ops.stage(op), (0, LONG_AGO))
        return ready if microbatch >= (done + 1) * self.ops.step else LONG_AGO

    def needs(self, op: int, microbatch: int) -> tuple[int, ...]:
        """The ops of the micro-batch whose end a compute waits for."""
        before, stage = self.ops.before[op], self.ops.stage(op)
        chain = (before,) if before >= 0 else ()
        if op == self.ops.backward(stage) and (stage, microbatch) in self._away:
            return (*chain, number(OpKind.PREFETCH, stage))
        return chain

    def _compute(self, rank: int, index: int, op: int, microbatch: int) -> bool:
        arrival = LONG_AGO
        for needed in self.needs(op, microbatch):
            end = self.times.end[needed][microbatch]
            if end is None:
                self._waiting.setdefault((needed, microbatch), []).append(rank)
                return False
            arrival = max(arrival, end)
        now = max(self.now[rank], self._weights(op, microbatch))
        start = max(now, arrival)
        if self._due is not None:
            due = self._due[rank][index]
            if due < start:
                reason = "the GPU is busy or waits" if now >= arrival else "its input arrives"
                self.late.append(Late(rank, index, due, start, reason))
            start = due
        self.times.start[op][microbatch] = start
        self.times.end[op][microbatch] = self.now[rank] = start + self.ops.duration[op]
        self.times.when[rank].append(start)
        if self.ops.kind(op) is OpKind.F:
            away = number(OpKind.OFFLOAD, self.ops.stage(op)), microbatch
            if away in self.posted:  # it stands before: it begins with this
                self._ready_end(away, start, self.issued)
        return True

    def _transfer(self, rank: int, index: int, op: int, microbatch: int) -> bool:
        """A SEND, RECV, OFFLOAD or PREFETCH, if what it moves is there to be moved."""
        at, key, before = self.now[rank], (op, microbatch), self.ops.before[op]
        does = self.tapes[rank][index][0]
        sends = does in (Does.SEND, Does.OFFLOAD)
        is_made = not sends or self.times.end[before][microbatch] is not None
        if not is_made and op not in self.ops.with_forward:
            return False
        if does == Does.PREFETCH and (before, microbatch) not in self.issued:
            return False
        if self._due is not None:
            due = self._due[rank][index]
            if due < at:
                self.late.append(Late(rank, index, due, at, "the GPU is busy or waits"))
            at = due
        self.times.when[rank].append(at)
        if does == Does.OFFLOAD:
            self.posted.add(key)
        if is_made:
            self._ready_end(key, at, self.issued if sends else self.posted)
        return True

    def _ready_end(self, key: tuple[int, int], at: int, end: set[tuple[int, int]]) -> None:
        """One end of a transfer is ready: the second of the two hands it to its link."""
        end.add(key)
        self._ready[key] = max(at, self._ready.get(key, LONG_AGO))
        if key in self.issued and key in self.posted:
            self._links.offer(*key, self._ready.pop(key))

    def _free(self, rank: int, op: int, microbatch: int) -> bool:
        """Waits for the transfer. Bytes leave as it ends, even while a compute runs."""
        end, made = (self.times.end[each][microbatch] for each in (op, self.ops.before[op]))
        if end is None:
            self._waiting.setdefault((op, microbatch), []).append(rank)
            return False
        if made is not None:  # a forward that began with its OFFLOAD still uses what leaves
            end = max(end, made)
        when = self.times.when[rank]
        when.append(max(end, when[-1]) if when else end)
        self.now[rank] = max(self.now[rank], end)
        return True
