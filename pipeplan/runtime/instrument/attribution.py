"""What the storages of a sampled step were for: the terms of docs/reference/model.md, measured.

Nothing here knows a size that was planned. A storage belongs to the operation that made it while
that runs. Behind it, how long the storage lives says what it was for: what a message or the next
stage takes away was handed on, what stays until the backward was saved. While an operation runs,
its micro-batch counts as saved what is saved of it before (a backward) or afterwards (a forward);
all else of it is workspace.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pipeplan.memory_terms import Curve, GpuTerms, Instant, Key, Purpose, Term, counted
from pipeplan.program import Action, ActionKind
from pipeplan.runtime.instrument.lifetimes import Kept, Lifetimes
from pipeplan.runtime.instrument.storage_log import Performed, StorageSample

K, P = ActionKind, Purpose
_Label = tuple[Purpose, int, int]
"""Purpose, stage, micro-batch; -1 for what belongs to none."""
_OTHER: _Label = (P.OTHER, 0, -1)
_WORK = {K.F: P.WORK_F, K.B: P.WORK_B, K.I: P.WORK_I, K.W: P.WORK_W, K.OPT: P.UPDATE}
_COMES = {K.RECV_F: P.RECEIVED_F, K.RECV_B: P.RECEIVED_B, K.PREFETCH: P.SAVED}
_OWN = {K.F: P.SAVED, K.B: P.SAVED, K.I: P.SAVED, K.W: P.SAVED_FOR_W}


def memory_of(sample: StorageSample) -> GpuTerms:
    """The terms of one rank in the step of `sample`, which has at least one action."""
    return _Sweep(sample).memory()


@dataclass(frozen=True, slots=True)
class _StorageMoment:
    """Bytes by label at one instant, and of them those of the operation that runs."""

    sizes: dict[_Label, int]
    running: int


class _Sweep:
    """Goes through the changes once, with a label on each storage."""

    def __init__(self, sample: StorageSample) -> None:
        self._sample = sample
        self._lives = Lifetimes.of(sample)
        self._kept = Kept(self._lives, sample.actions)
        self._label: dict[int, _Label] = {}
        self._bytes: dict[int, int] = {}
        self._members: dict[_Label, set[int]] = {}
        self._sizes: dict[_Label, int] = {}
        self._run: _Label | None = None
        """The label of all that the operation works on that runs."""
        self._births = _OTHER
        """The label of what comes now."""

    def memory(self) -> GpuTerms:
        """All instants of the step."""
        actions, worst = self._sample.actions, self._worst_places()
        self._pass(0, actions[0].begin)
        found: dict[str, Instant] = {}
        curve: list[tuple[int, tuple[Key, ...]]] = []
        begin_ns = actions[self._sample.first].begin_ns
        for index, done in enumerate(actions):
            if index == self._sample.first:
                self._settle()
            until = self._next(index)
            terms, left = self._perform(done, until, worst[index])
            if index < self._sample.first:
                continue
            time = done.begin_ns - begin_ns
            instant = Instant(time_ns=time, action=str(done.action), terms=counted(terms))
            curve += [(time, terms), (done.end_ns - begin_ns, left)]
            known = found.get(instant.kind)
            if known is None or instant.size > known.size:
                found[instant.kind] = instant
        ranked = sorted(found.values(), key=lambda each: -each.size)
        return GpuTerms(instants=tuple(ranked), host=self._host(), curve=_curve(curve))

    def _settle(self) -> None:
        """What has come to stay since the first action."""
        for number, (purpose, stage) in self._lives.settled.items():
            if number in self._label:
                self._relabel([number], (purpose, stage, -1))

    def _worst_places(self) -> list[int]:
        """Per action the first place, up to the next one's, before which most bytes live.

        What only hands bytes on or gives them back counts from its end, as in a prediction.
        """
        levels, level = [0], 0
        for _, difference in self._lives.changes:
            level += difference
            levels.append(level)
        spans = (
            range(done.begin if done.action.kind in _WORK else done.end, self._next(index) + 1)
            for index, done in enumerate(self._sample.actions)
        )
        return [max(span, key=levels.__getitem__) for span in spans]

    def _next(self, index: int) -> int:
        actions = self._sample.actions
        if index + 1 < len(actions):
            return actions[index + 1].begin
        return len(self._lives.changes)

    def _perform(
        self, done: Performed, until: int, worst: int
    ) -> tuple[tuple[Key, ...], tuple[Key, ...]]:
        """The terms at the worst place of one action, and what it leaves."""
        own = self._begin(done.action)
        moment = self._pass(done.begin, done.end, worst)
        after = self._end(done.action)
        if done.action.kind is K.F:
            own = after
        left = self._moment()
        moment = self._pass(done.end, until, worst) if moment is None else moment
        assert moment is not None
        return tuple(_things(moment, done.action, own)), tuple(_things(left, done.action, 0))

    def _pass(self, begin: int, end: int, worst: int = -1) -> _StorageMoment | None:
        """Applies changes; what is held before the one at `worst`, if that is among them."""
        found = self._moment() if worst == begin else None
        for place in range(begin, end):
            self._change(*self._lives.changes[place])
            if place + 1 == worst:
                found = self._moment()
        return found

    def _moment(self) -> _StorageMoment:
        running = self._sizes.get(self._run, 0) if self._run else 0
        kept = {key: size for key, size in self._sizes.items() if key != self._run and size}
        return _StorageMoment(kept, running)

    def _change(self, number: int, difference: int) -> None:
        label = self._label.get(number)
        if label is None:
            label = self._label[number] = self._first_label(number)
            self._members.setdefault(label, set()).add(number)
        self._bytes[number] = self._bytes.get(number, 0) + difference
        self._sizes[label] = self._sizes.get(label, 0) + difference
        if not self._bytes[number]:
            del self._bytes[number], self._label[number]
            self._members[label].discard(number)

    def _first_label(self, number: int) -> _Label:
        """Of a storage that comes now, or was there before the first action."""
        if owner := self._lives.before.get(number):
            return (*owner, -1)
        if keeper := self._kept.come_back.get(number):
            return (P.SAVED, *keeper)
        return self._births

    def _relabel(self, numbers: Iterable[int], label: _Label) -> None:
        for number in list(numbers):
            before, size = self._label[number], self._bytes[number]
            self._members[before].discard(number)
            self._sizes[before] -= size
            self._label[number] = label
            self._members.setdefault(label, set()).add(number)
            self._sizes[label] = self._sizes.get(label, 0) + size

    def _begin(self, action: Action) -> int:
        """Gives the operation what it works on; bytes that its micro-batch has saved before."""
        kind, stage = action.kind, action.stage
        number = -1 if action.microbatch is None else action.microbatch
        if kind in _COMES:
            self._births = (_COMES[kind], stage, number)
        if kind not in _WORK:
            return 0
        self._run = self._births = (_WORK[kind], stage, number)
        taken: list[_Label] = []
        if kind is K.F:
            taken = [(P.RECEIVED_F, stage, number), (P.DIRECT_F, stage - 1, number)]
        elif kind in (K.B, K.I):
            taken = [(P.RECEIVED_B, stage, number), (P.DIRECT_B, stage + 1, number)]
        own = (_OWN[kind], stage, number) if kind in _OWN else None
        size = self._sizes.get(own, 0) if own and kind is not K.F else 0
        if own and kind is not K.F:
            taken.append(own)
        for label in taken:
            self._relabel(self._members.get(label, ()), self._run)
        return size

    def _end(self, action: Action) -> int:
        """Says what the operation's storages are for now; bytes that its micro-batch has saved."""
        kind, stage, run = action.kind, action.stage, self._run
        self._run, self._births = None, _OTHER
        if run is None:
            return 0
        number = run[2]
        rest: _Label = _OTHER
        if kind is K.F:
            rest = (P.SAVED, stage, number)
        elif kind is K.I:
            rest = (P.SAVED_FOR_W, stage, number)
        elif kind is K.OPT:
            rest = (P.OPTIMIZER, stage, -1)
        if kind in (K.F, K.B, K.I):
            self._hand_on(action, run, keeps=kind is not K.B)
        self._relabel(self._members.get(run, ()), rest)
        return self._sizes.get(rest, 0)

    def _hand_on(self, action: Action, run: _Label, *, keeps: bool) -> None:
        forward, stage, number = action.kind is K.F, action.stage, run[2]
        for purpose in (P.SENT_F, P.DIRECT_F) if forward else (P.SENT_B, P.DIRECT_B):
            numbers = (each for each, _ in self._lives.handed.get((purpose, stage, number), ()))
            kept = self._kept.among(purpose, stage, number) if keeps else set()
            mine = (each for each in numbers if self._label.get(each) == run and each not in kept)
            self._relabel(set(mine), (purpose, stage, number))

    def _host(self) -> tuple[Term, ...]:
        most = max(self._sample.host, key=lambda held: sum(size for _, size in held), default=())
        return counted([*((P.SAVED, *each) for each in most), *self._sample.on_host])


def _things(moment: _StorageMoment, action: Action, own: int) -> Iterator[Key]:
    """One entry per micro-batch, message or kind of state; 0 bytes where nothing is."""
    yield from ((label[0], label[1], size) for label, size in moment.sizes.items())
    if moment.running:
        saved = min(own, moment.running)
        yield _OWN.get(action.kind, P.UPDATE), action.stage, saved
        yield _WORK[action.kind], action.stage, moment.running - saved


def _curve(points: list[tuple[int, tuple[Key, ...]]]) -> Curve:
    rows = []
    for time, things in points:
        row: dict[Purpose, int] = {}
        for purpose, _, size in things:
            row[purpose] = row.get(purpose, 0) + size
        rows.append((time, row))
    return Curve.of(rows)
