"""When each storage of a sample came and went, and whether its stage keeps what it hands on."""

from __future__ import annotations

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

        One that dies in the W of the next stage may be kept by that alone, or by both: then it
        counts who referred to it.
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
        back = self._backward(stage, microbatch)
        if back is None:
            return None if self._lives.gone[number] is None else False
        behind = self._actions.get((ActionKind.W, stage + 1, microbatch))
        gone = self._lives.gone[number]
        of_next = behind is not None and gone is not None and behind.begin <= gone < behind.end
        return self._lives.alive_at(number, back.begin) and (shared or not of_next)

    def _backward(self, stage: int, microbatch: int) -> Performed | None:
        found = (self._actions.get((kind, stage, microbatch)) for kind in _BACKWARDS)
        return next((done for done in found if done is not None), None)
