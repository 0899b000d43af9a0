"""Which steps of a run are sampled, and what is recorded of them.

The first step by which all states of optimizers are there (`SETTLED`), and then one in `EVERY`:
that costs nothing that a long run would notice (docs/explanation/runtime.md). Of a shorter run it
is the last step. Under 2bw micro-batches of the step before are still there when a step begins, so
counting begins with that one.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Self

from torch import Tensor

from pipeplan.memory_terms import GpuTerms, Instant, Purpose
from pipeplan.plan import Semantics
from pipeplan.program import Action, ActionKind
from pipeplan.runtime.build import Worker
from pipeplan.runtime.instrument.attribution import memory_of
from pipeplan.runtime.instrument.states import host_states, labelled_states
from pipeplan.runtime.instrument.storage_log import (
    HandedOn,
    Performed,
    States,
    StorageLog,
    StorageSample,
    names,
    shared,
)
from pipeplan.runtime.interfaces import MemoryMeter
from pipeplan.runtime.job import SessionOptions
from pipeplan.runtime.supervision.flight_recorder import now_ns

_TO_HOST = (ActionKind.OFFLOAD, ActionKind.F)
"""Behind these there may be more on the host: an input leaves with its forward."""
EVERY = 1000
"""Steps from one that is sampled to the next."""
SETTLED: dict[Semantics, int] = {"flush": 1, "2bw": 3}
"""Steps before the first one that is sampled; updates that wait under 2bw come two steps late."""


def sampled(
    log: StorageLog | None, semantics: Semantics, options: SessionOptions
) -> SampledSteps | None:
    """The sampled steps of a session; None where it shall have none."""
    if log is None or not options.samples_bytes:
        return None
    return SampledSteps(log, semantics, always=options.counts_bytes)


class SampledSteps(MemoryMeter):
    """Records sampled steps of one rank; of several the one with the largest peak is kept."""

    def __init__(self, log: StorageLog, semantics: Semantics, *, always: bool = False) -> None:
        """Takes the log that counts.

        Args:
            log: of the rank.
            semantics: under 2bw a sample reaches one step back.
            always: whether the log counts the whole run anyway.
        """
        self._log = log
        self._reach = 1 if semantics == "2bw" else 0
        self._settled = SETTLED[semantics]
        self._always = always
        self._first: int | None = None
        self._sample: StorageSample | None = None
        self._reached = False
        """Whether the step that the open sample is for has begun."""
        self._last = 0
        """The last step that has begun while it was open."""
        self._best: tuple[tuple[bool, int], StorageSample] | None = None
        log.idle = not always

    def watch(self, worker: Worker) -> None:
        """Samples what `worker` does from now on."""
        self._worker = worker
        worker.executor.watch(self)

    def begin_step(self, step: int) -> None:
        """See `MemoryMeter`."""
        if self._first is None or step < self._first:
            self._first = step
        if self._sample is not None and step > self._sample.step:
            self._close()
        if self._sample is None and (wanted := self._wanted(step)) is not None:
            self._open(wanted)
        if self._sample is not None:
            self._reached = step == self._sample.step
            self._last, self._sample.first = step, len(self._sample.actions)
            self._sample.settled = self._states()
            self._sample.on_host = host_states(self._worker)

    def _wanted(self, step: int) -> int | None:
        """The step to be sampled that counting must begin for now, if there is one.

        It begins with the first step: a run may end before any other.
        """
        done = step - (self._first or 0)
        if done <= self._settled:
            return step - done + self._settled
        steps = range(step, step + self._reach + 1)
        return next((each for each in steps if (each - step + done + 1) % EVERY == 0), None)

    def _states(self) -> States:
        """What lives for the whole run, counted from now on if it was not."""
        owners: dict[int, tuple[Purpose, int]] = {}
        for purpose, stage, tensor in labelled_states(self._worker):
            self._log.count([tensor])
            for name in names([tensor]):
                owners.setdefault(name, (purpose, stage))
        return States(self._log.place, owners)

    def _open(self, step: int) -> None:
        sample = self._sample = StorageSample(step)
        self.samples, self._reached, self._log.idle = True, False, False
        self._log.open(sample)
        sample.before = self._states()
        if not self._always:
            self._log.__enter__()  # type: ignore[no-untyped-call]

    def _close(self) -> None:
        sample = self._sample
        assert sample is not None
        if not self._always:
            self._log.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._log.close()
        self._sample, self.samples, self._log.idle = None, False, not self._always
        if sample.actions and sample.actions[-1].end < 0:
            sample.actions.pop()  # it failed
        if not sample.actions[sample.first :]:
            return
        sample.step = self._last
        rank = self._reached, max(accumulate(change for _, change in sample.changes))
        if self._best is None or rank > self._best[0]:
            self._best = rank, sample

    def __enter__(self) -> Self:
        """Around a run, from an empty pipeline to an empty one."""
        return self

    def __exit__(self, *error: object) -> None:
        """It has ended or failed."""
        if self._sample is not None:
            self._close()

    def begin(self, action: Action) -> None:
        """See `MemoryMeter`."""
        assert self._sample is not None
        self._sample.actions.append(Performed(action, self._log.place, now_ns()))

    def end(self, action: Action) -> None:
        """See `MemoryMeter`."""
        assert self._sample is not None
        done = self._sample.actions[-1]
        done.end, done.end_ns = self._log.place, now_ns()
        if action.kind in _TO_HOST:
            held = ((i, size) for i, s in self._worker.stages.items() for size in s.host_sizes)
            self._sample.host.append(tuple(held))

    def hand_on(
        self, purpose: Purpose, stage: int, microbatch: int, tensors: list[Tensor]
    ) -> None:
        """See `MemoryMeter`."""
        assert self._sample is not None
        place = self._log.place
        told = HandedOn(purpose, stage, microbatch, place, names(tensors), shared(tensors))
        self._sample.handed.append(told)

    @property
    def changes(self) -> int:
        """How often a storage came or went in what was kept of the sampled step."""
        return len(self._best[1].changes) if self._best else 0

    def memory(self) -> tuple[int, GpuTerms] | None:
        """(step, 1 being the first of the run; what was measured of it); None where none was."""
        if not self._worker.stages:
            return 1, GpuTerms(instants=(Instant(time_ns=0, action="", terms=()),))
        if self._best is None:
            return None
        _, sample = self._best
        return sample.step - (self._first or 0) + 1, memory_of(sample)
