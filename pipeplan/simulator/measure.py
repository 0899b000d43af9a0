"""What a finished run amounts to: counts, peaks, idle shares."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pipeplan.errors import InputError
from pipeplan.plan import MemoryRow, Plan
from pipeplan.program import Action
from pipeplan.simulator import costs
from pipeplan.simulator.charges import handovers, tensor_bytes
from pipeplan.simulator.engine import Times
from pipeplan.simulator.host_states import host_terms
from pipeplan.simulator.ledger import Level
from pipeplan.simulator.result import Peak
from pipeplan.simulator.tape import Does, Entry
from pipeplan.simulator.window import Window
from pipeplan.units import MAX_INT

_NOTHING = Level(0, 0, 0, 0, 0, 0, -1, is_end=False, counts=True)


@dataclass(slots=True)
class Peaks:
    """The largest levels of one rank, beside what it holds for ever; the first of equals."""

    framed: Level = _NOTHING
    """Within the window's frame."""
    overall: Level = _NOTHING
    fill: int = 0
    steady: int = 0
    drain: int = 0
    left: int = 0
    host: int = 0
    """The most in the host's memory."""
    most: int = -1
    most_framed: int = -1

    def watch(
        self, levels: Iterable[Level], tape: list[Entry], window: Window, *, flush: bool
    ) -> None:
        """Takes in all levels of the rank; under `flush` an OPT follows the drain."""
        begin, end = window.frame or (0, -1)
        total = 0
        for level in levels:
            time, saved, working, direct, message, host, entry, _, counts = level
            self.host = max(self.host, host)
            total = saved + working + direct + message
            if not counts:
                continue
            if total > self.most:
                self.most, self.overall = total, level
            if begin <= time < end and total > self.most_framed:
                self.most_framed, self.framed = total, level
            if flush and tape[entry][0] == Does.OPT:
                continue
            if time < window.first_exit:
                self.fill = max(self.fill, total)
            elif time <= window.last_entry:
                self.steady = max(self.steady, total)
            else:
                self.drain = max(self.drain, total)
        self.left = total

    @property
    def level(self) -> Level:
        """The peak: within the frame, unless something outside exceeds it."""
        return self.framed if self.most_framed >= self.most else self.overall

    def event(self, actions: tuple[Action, ...]) -> Peak:
        """Where the peak is."""
        level = self.level
        if level.entry < 0:
            return Peak(0, "")
        name = str(actions[level.entry])
        return Peak(level.time, f"end of {name}" if level.is_end else name)


def row(plan: Plan, gpu: int, peaks: Peaks, buffers: int) -> MemoryRow:
    """The memory row of a GPU at its peak, with `buffers` bytes of permanent message buffers."""
    states, level = costs.states_bytes(plan, gpu), peaks.level
    message = level.message + buffers
    total = states + level.saved + level.working + level.direct + message
    device = plan.cluster.gpus[gpu]
    if total > MAX_INT:
        raise InputError(f"GPU {gpu}: got a peak of {total} bytes, need at most {MAX_INT}")
    away = peaks.host + sum(size for _, _, size in host_terms(plan, gpu))
    if away > MAX_INT:
        raise InputError(f"GPU {gpu}: got {away} bytes on the host, need at most {MAX_INT}")
    return MemoryRow(
        gpu=gpu,
        states_bytes=states,
        saved_bytes=level.saved,
        working_bytes=level.working,
        direct_bytes=level.direct,
        message_bytes=message,
        peak_bytes=total,
        budget_bytes=device.memory_bytes - device.reserve_bytes,
        host_bytes=away,
    )


@dataclass(frozen=True, slots=True)
class MessageSlots:
    """(P5): the slots for the messages of one tensor at one end of a link."""

    gpu: int
    producer: int
    consumer: int
    """Ops."""
    received: bool
    size: int
    """Bytes of each."""
    count: int


def message_slots(plan: Plan, times: Times) -> Iterator[MessageSlots]:
    """(P5): slots that the messages of this run need; the paper model only."""
    if plan.memory_model != "paper":
        return
    for producer, transfer, consumer in handovers(times.ops):
        place = times.ops.place[transfer] if transfer is not None else 0
        if transfer is None or not isinstance(place, tuple):
            continue
        size = tensor_bytes(plan, producer)
        sent = max(1, _at_once(times.end[producer], times.end[transfer]))
        received = max(1, _at_once(times.start[transfer], times.start[consumer]))
        yield MessageSlots(place[0], producer, consumer, False, size, sent)
        yield MessageSlots(place[1], producer, consumer, True, size, received)


def buffers_bytes(plan: Plan, times: Times) -> list[int]:
    """(P5) per GPU: bytes of all slots."""
    total = [0] * len(plan.cluster.gpus)
    for slots in message_slots(plan, times):
        total[slots.gpu] += slots.size * slots.count
    return total


def _at_once(starts: list[int | None], ends: list[int | None]) -> int:
    """The most intervals [start, end) that share an instant."""
    begins = sorted(time for time in starts if time is not None)
    closes = sorted(time for time in ends if time is not None)
    most = closed = 0
    for opened, time in enumerate(begins, start=1):
        while closed < len(closes) and closes[closed] <= time:
            closed += 1
        most = max(most, opened - closed)
    return most


def idle_shares(plan: Plan, times: Times, window: tuple[int, int]) -> tuple[float, ...]:
    """Per GPU, the share of `window` in which it computes nothing."""
    begin, end = window
    busy = [0] * len(plan.cluster.gpus)
    for op, gpu in enumerate(times.ops.place):
        if not times.ops.kind(op).is_compute or isinstance(gpu, tuple):
            continue
        for start, stop in zip(times.start[op], times.end[op], strict=True):
            if start is not None and stop is not None:
                busy[gpu] += max(0, min(stop, end) - max(start, begin))
    length = end - begin
    return tuple(1 - each / length if length else 0.0 for each in busy)
