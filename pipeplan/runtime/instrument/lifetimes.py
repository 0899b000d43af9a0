"""When each storage of a sample came and went, and whether its stage keeps what it hands on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from pipeplan.memory_terms import Purpose
from pipeplan.program import ActionKind
from pipeplan.runtime.instrument.storage_log import HandedOn, Performed, StorageSample

_BACKWARDS = (ActionKind.B, ActionKind.I)


@dataclass(slots=True)
class Lifetimes:
    """A sample by storages; each has a number of its own, whatever its name was."""

    changes: list[tuple[int, int]] = field(default_factory=list)
    """(number, bytes more or fewer)."""
    come: list[int] = field(default_factory=list)
    """By number: the place of its first change."""
    gone: list[int | None] = field(default_factory=list)
    """By number: the place of the change that ends it; None: it outlives the sample."""
    before: dict[int, tuple[Purpose, int]] = field(default_factory=dict)
    """Purpose and stage of states before the first action."""
    settled: dict[int, tuple[Purpose, int]] = field(default_factory=dict)
    """The same before the step itself."""
    handed: dict[tuple[Purpose, int, int], tuple[tuple[int, bool], ...]] = field(
        default_factory=dict
    )
    """By purpose, stage and micro-batch: numbers, and whether anything else referred to them."""

    @classmethod
    def of(cls, sample: StorageSample) -> Lifetimes:
        """Numbers the storages in the order in which they come."""
        found = cls()
        alive: dict[int, list[int]] = {}
        waiting = list(reversed(sample.handed))
        for place, (name, difference) in enumerate(sample.changes):
            found._meet(sample, place, alive, waiting)
            entry = alive.get(name)
            if entry is None:
                entry = alive[name] = [len(found.gone), 0]
                found.come.append(place)
                found.gone.append(None)
            entry[1] += difference
            found.changes.append((entry[0], difference))
            if not entry[1]:
                found.gone[entry[0]] = place
                del alive[name]
        found._meet(sample, len(sample.changes), alive, waiting)
        return found

    def _meet(
        self,
        sample: StorageSample,
        place: int,
        alive: dict[int, list[int]],
        waiting: list[HandedOn],
    ) -> None:
        """What is said of storages as they are before the change at `place`."""
        for states, found in ((sample.before, self.before), (sample.settled, self.settled)):
            if place == states.place:
                known = ((alive.get(name), owner) for name, owner in states.owners.items())
                found.update({entry[0]: owner for entry, owner in known if entry})
        while waiting and waiting[-1].place <= place:
            told = waiting.pop()
            pairs = zip(told.names, told.shared, strict=True)
            self.handed[told.purpose, told.stage, told.microbatch] = tuple(
                (alive[name][0], shared) for name, shared in pairs if name in alive
            )

    def begins(self, done: Performed) -> list[int]:
        """The storages that an action makes, in order."""
        return [n for place, n in self._changed(done) if self.come[n] == place]

    def ends(self, done: Performed) -> list[int]:
        """The storages that an action gives up, in order."""
        return [n for place, n in self._changed(done) if self.gone[n] == place]

    def _changed(self, done: Performed) -> Iterator[tuple[int, int]]:
        """Place and storage of each change while an action runs."""
        for place in range(done.begin, done.end):
            yield place, self.changes[place][0]

    def alive_at(self, number: int, place: int) -> bool:
        """Whether the storage is there before the change at `place`."""
        gone = self.gone[number]
        return gone is None or gone >= place


class Kept:
    """Which storages that a stage hands on it keeps as well."""

    def __init__(self, lives: Lifetimes, actions: list[Performed]) -> None:
        self._lives = lives
        self._actions = {
            (done.action.kind, done.action.stage, done.action.microbatch): done for done in actions
        }
        self._usual: dict[tuple[Purpose, int, int], bool] = {}
        for (purpose, stage, microbatch), numbers in lives.handed.items():
            for index, (number, shared) in enumerate(numbers):
                known = self._known(purpose, stage, microbatch, number, shared)
                if known is not None:
                    self._usual[purpose, stage, index] = known
        self.come_back = dict(self._for_both())
        """Number -> stage and micro-batch that keep it, though it comes for the next stage."""

    def among(self, purpose: Purpose, stage: int, microbatch: int) -> set[int]:
        """Those of one micro-batch; one whose end the sample does not hold is as others are."""
        found = set()
        handed = self._lives.handed.get((purpose, stage, microbatch), ())
        for index, (number, shared) in enumerate(handed):
            known = self._known(purpose, stage, microbatch, number, shared)
            usual = self._usual.get((purpose, stage, index), False)
            if usual if known is None else known:
                found.add(number)
        return found

    def _known(
        self, purpose: Purpose, stage: int, microbatch: int, number: int, shared: bool
    ) -> bool | None:
        """What the storage's life says; None: the sample ends too early.

        One that dies in the W of the next stage, or goes to the host with that, may be kept by it
        alone, or by both: then it counts who referred to it.
        """
        if purpose in (Purpose.SENT_F, Purpose.SENT_B):
            free = ActionKind.FREE_F if purpose is Purpose.SENT_F else ActionKind.FREE_B
            done = self._actions.get((free, stage, microbatch))
            return None if done is None else self._lives.alive_at(number, done.end)
        if purpose is Purpose.DIRECT_B:
            done = self._actions.get((ActionKind.W, stage, microbatch))
            if done is not None:
                return self._lives.alive_at(number, done.begin)
            return None if self._lives.gone[number] is None else False
        if self._leaves_with_next(stage, microbatch, number):
            return shared
        back = self._backward(stage, microbatch)
        if back is None:
            return None if self._lives.gone[number] is None else False
        behind = self._actions.get((ActionKind.W, stage + 1, microbatch))
        gone = self._lives.gone[number]
        of_next = behind is not None and gone is not None and behind.begin <= gone < behind.end
        return self._lives.alive_at(number, back.begin) and (shared or not of_next)

    def _for_both(self) -> Iterator[tuple[int, tuple[int, int]]]:
        """What comes back for a stage and is kept by the one before, too.

        It comes in the order in which it was given up, of each micro-batch the same.
        """
        shared = {
            number
            for (purpose, *_), numbers in self._lives.handed.items()
            if purpose is Purpose.DIRECT_F
            for number, also in numbers
            if also
        }
        lent: dict[int, set[int]] = {}
        for (kind, stage, _), done in self._actions.items():
            if kind is ActionKind.FREE_O:
                gone = enumerate(self._lives.ends(done))
                lent.setdefault(stage, set()).update(at for at, each in gone if each in shared)
        for (kind, stage, microbatch), done in self._actions.items():
            if kind is ActionKind.PREFETCH and microbatch is not None:
                for at, each in enumerate(self._lives.begins(done)):
                    if at in lent.get(stage, ()):
                        yield each, (stage - 1, microbatch)

    def _leaves_with_next(self, stage: int, microbatch: int, number: int) -> bool:
        """Whether the storage goes as what the next stage has on the host is given up."""
        done = self._actions.get((ActionKind.FREE_O, stage + 1, microbatch))
        gone = self._lives.gone[number]
        return done is not None and gone is not None and done.begin <= gone < done.end

    def _backward(self, stage: int, microbatch: int) -> Performed | None:
        found = (self._actions.get((kind, stage, microbatch)) for kind in _BACKWARDS)
        return next((done for done in found if done is not None), None)
