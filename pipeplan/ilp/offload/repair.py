"""Repair of a schedule that exceeds a memory, by offloading as little as possible.

GPUs do not share a host link, so each is repaired alone. On a GPU that needs too much, the stage
whose micro-batches rest longest offloads the fewest bytes that suffice, all copies first; where no
number of bytes suffices and the GPU has several stages, all that it can, and the next one follows.
What is saved of stages' inputs leaves as well only where this is not enough. Then copies stay
again as long as the GPU fits. Bytes are counted exactly; the rest of the schedule stays as it is.
Source: ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.memory import host_bytes, memory_rows, peak_terms
from pipeplan.ilp.memory_events import ExactMemoryEvents, MemoryEvent
from pipeplan.ilp.offload.byte_options import Sent, stage_options
from pipeplan.ilp.offload.copy_placement import Choice, CopyPlacement
from pipeplan.ilp.schedule import Schedule, StageOffload
from pipeplan.plan import OpKind

EVENT_S: Final = 3e-6
"""What an event in a count of peaks counts for where work is counted."""
SET_UP: Final = 5
"""Times that all events are listed or counted before something leaves."""


def _nobody(work: float) -> None:
    """Hears of work, and forgets it."""


def repair_by_offloading(
    costs: CostModel, schedule: Schedule, charge: Callable[[float], None] = _nobody
) -> Schedule | None:
    """The schedule with what must be offloaded, if then every GPU and the host fit; else None.

    Args:
        costs: of the exact memory model, with a host.
        schedule: with nothing offloaded on the GPUs that lack room.
        charge: hears of the work, in units of the limit.
    """
    host = costs.cluster.host
    assert host is not None
    over = {
        row.gpu: row.peak_bytes - row.budget_bytes
        for row in memory_rows(costs, schedule)
        if row.peak_bytes > row.budget_bytes
    }
    sweep = ExactMemoryEvents(costs, schedule)
    changes = list(sweep.events())
    charge(SET_UP * EVENT_S * len(changes))
    offloads = list(schedule.offloads)
    if any(schedule.stages[each.stage].gpu in over for each in offloads):
        return None
    for gpu, missing in over.items():
        own = [change for change in changes if change.gpu == gpu]
        mended = _Repair(costs, schedule, sweep, gpu, own, charge).repaired(missing)
        if mended is None:
            return None
        offloads += mended
    whole = replace(schedule, offloads=tuple(sorted(offloads, key=lambda each: each.stage)))
    fits_host = sum(host_bytes(costs, whole)) <= host.memory_bytes
    return whole if fits_host else None


@dataclass
class _Repair:
    """One GPU of a schedule, with its changes of bytes."""

    costs: CostModel
    schedule: Schedule
    sweep: ExactMemoryEvents
    gpu: int
    events: Sequence[MemoryEvent]
    charge: Callable[[float], None]

    def repaired(self, missing: int) -> tuple[StageOffload, ...] | None:
        """What must be offloaded for the GPU to fit; None if nothing is enough."""
        if self._states() + self._update() > self._budget:
            return None
        ways = (self._chosen(missing, inputs=inputs) for inputs in (False, True))
        return next((found for found in ways if found is not None), None)

    def _chosen(self, missing: int, *, inputs: bool) -> tuple[StageOffload, ...] | None:
        """The same where `inputs` of stages may leave, or must stay."""
        chosen: list[Choice] = []
        least: int | None = None
        for stage in self._by_rest():
            best: Choice | None = None
            for sent in self._worth_trying(stage, missing, chosen, inputs):
                tried = stage, sent
                offloads = self._placed([*chosen, tried])
                peak = self._peak(offloads)
                if peak <= self._budget:
                    return self._fewest(offloads)
                if least is None or peak < least:
                    least, best = peak, tried
            if best is not None:
                chosen.append(best)
        return None

    @property
    def _budget(self) -> int:
        return self.costs.budgets[self.gpu]

    def _hosted(self) -> list[int]:
        return [stage.id for stage in self.schedule.stages if stage.gpu == self.gpu]

    def _states(self) -> int:
        return sum(self.sweep.segment(stage).states for stage in self._hosted())

    def _update(self) -> int:
        """Bytes of the update that follows the drain."""
        if self.costs.semantics != "flush":
            return 0
        return max(self.sweep.segment(stage).optimizer for stage in self._hosted())

    def _by_rest(self) -> list[int]:
        """The GPU's stages, longest rest first."""

        def rest(stage: int) -> int:
            times = self.schedule.times
            pairs = zip(times[OpKind.F, stage], times[OpKind.B, stage], strict=True)
            return sum(due - begin for begin, due in pairs)

        return sorted(self._hosted(), key=lambda stage: (-rest(stage), stage))

    def _offered(self, stage: int, missing: int, inputs: bool) -> Iterator[Sent]:
        """What the stage can send, fewest bytes first; where it is alone, what could be enough."""
        this = self.schedule.stages[stage]
        times = self.schedule.times
        pairs = zip(times[OpKind.F, stage], times[OpKind.B, stage], strict=True)
        rest = sum(due - begin for begin, due in pairs)
        others = -(-rest // self.schedule.period)
        alone = len(self._hosted()) == 1
        covered = stage > 0 and self.schedule.stages[stage - 1].gpu == self.gpu
        for sent in stage_options(self.costs, this.first, this.last, covered=covered):
            size, _, enters = sent
            if enters <= inputs and (not alone or size * others >= missing):
                yield sent

    def _worth_trying(
        self, stage: int, missing: int, chosen: Sequence[Choice], inputs: bool
    ) -> list[Sent]:
        """What the stage can send: on a GPU of several all of it, or less if all is enough."""
        offered = list(self._offered(stage, missing if not chosen else 0, inputs))
        if len(self._hosted()) == 1 or not offered:
            return offered
        enough = self._peak(self._placed([*chosen, (stage, offered[-1])])) <= self._budget
        return offered if enough else offered[-1:]

    def _placed(self, chosen: Sequence[Choice]) -> tuple[StageOffload, ...]:
        """The better of two ways to place the transfers."""
        ways = CopyPlacement(self.costs, self.schedule, self.sweep)
        host = self.costs.cluster.host
        assert host is not None
        orders = (True, False) if host.duplex == "half" else (True,)
        placed = [ways.placed(chosen, back_first=first) for first in orders]
        return min(placed, key=self._peak)

    def _peak(self, offloads: Sequence[StageOffload]) -> int:
        self.charge(EVENT_S * len(self.events))
        leaving = [change for each in offloads for change in self.sweep.offload_events(each)]
        return self._states() + sum(peak_terms(self.schedule, [*self.events, *leaving]))

    def _fewest(self, offloads: tuple[StageOffload, ...]) -> tuple[StageOffload, ...]:
        """Copies stay, shortest rest first, as long as the GPU fits."""
        for index, each in enumerate(offloads):
            for copy in sorted(each.times, key=partial(_rest, each)):
                left = {c: pair for c, pair in offloads[index].times.items() if c != copy}
                tried = (*offloads[:index], replace(each, times=left), *offloads[index + 1 :])
                if self._peak(tried) <= self._budget:
                    offloads = tried
        return tuple(each for each in offloads if each.times)


def _rest(offloads: StageOffload, copy: int) -> int:
    leaves, returns = offloads.times[copy]
    return returns - leaves
