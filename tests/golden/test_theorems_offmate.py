"""Theorem 4.2.1 of X. Zhao's thesis: offloading parameters without idle time is 3-partition."""

from __future__ import annotations

from itertools import combinations

import pytest

from pipeplan.device_program import DeviceProgram, InstructionKind
from pipeplan.operator_graph import Operation, OperatorGraph, Phase, Storage, StorageKind
from pipeplan.remat import HostLink
from pipeplan.remat.programs import Placement, ProgramOutcome, judge

_UNIT = 10**9
_KIND = InstructionKind


class Instance:
    """Figure 4.2 with m = 2: layers of weight V, layers of time 1, layers of weights x.

    The forward of time m is m forwards of time 1 here, since copies begin between operations.
    """

    def __init__(self, numbers: tuple[int, ...], share: int) -> None:
        self.numbers, self.share = numbers, share
        self.parts = len(numbers) // 3
        self.storages: list[Storage] = []
        self.operations: list[Operation] = []
        self.heavy = [self._weight(f"w {k}", share) for k in range(self.parts)]
        self.light = [self._weight(f"x {n}", size) for n, size in enumerate(numbers)]
        self.forwards = [self._run(Phase.FORWARD, (), _UNIT) for _ in range(self.parts)]
        reads = tuple(value for value, _ in self.light)
        self.turn = self._run(Phase.FORWARD, reads, 0)
        self.back_light = [self._back(value, made) for value, made in self.light]
        self.waits = [self._run(Phase.INPUT_GRADIENT, (), _UNIT) for _ in range(self.parts)]
        self.back_heavy = [self._back(value, made) for value, made in self.heavy]
        self.updates = {
            made: self._run(Phase.UPDATE, (value, made), 0, (value,))
            for value, made in (*self.heavy, *self.light)
        }
        self.graph = OperatorGraph(
            name="3-partition",
            storages=tuple(self.storages),
            operations=tuple(self.operations),
            outputs=(),
        )

    def _weight(self, name: str, size: int) -> tuple[int, int]:
        self.storages.append(Storage(name=name, bytes=size, kind=StorageKind.PARAMETER))
        gradient = Storage(name=f"{name} gradient", bytes=size, kind=StorageKind.GRADIENT)
        self.storages.append(gradient)
        return len(self.storages) - 2, len(self.storages) - 1

    def _run(
        self, phase: Phase, reads: tuple[int, ...], time: int, writes: tuple[int, ...] = ()
    ) -> int:
        self.operations.append(
            Operation(name=str(phase), phase=phase, reads=reads, writes=writes, time_ns=time)
        )
        return len(self.operations) - 1

    def _back(self, value: int, made: int) -> int:
        return self._run(Phase.INPUT_GRADIENT, (value,), 0, (made,))

    def judged(self, sets: tuple[tuple[int, ...], ...]) -> ProgramOutcome:
        """Figure 4.3's schedule, in which set j of light weights comes and goes at once."""
        lines: list[tuple[InstructionKind, int]] = []
        for k, chosen in enumerate(sets):
            heavy = self.heavy[k][0]
            lines += [(_KIND.PREFETCH, self.light[n][0]) for n in chosen]
            lines += [(_KIND.COPY, heavy), (_KIND.RUN, self.forwards[k])]
            lines += [(_KIND.WAIT, heavy), (_KIND.FREE, heavy)]
            lines += [(_KIND.WAIT, self.light[chosen[-1]][0])]
        lines += [(_KIND.RUN, self.turn), (_KIND.END_F, 0)]
        for n, (_, made) in enumerate(self.light):
            lines += self._trained(self.back_light[n], made)
        for k, chosen in enumerate(sets):
            heavy, made = self.heavy[k]
            light = [self.light[n][0] for n in chosen]
            lines += [(_KIND.PREFETCH, heavy)]
            lines += [(_KIND.COPY, each) for each in light]
            lines += [(_KIND.RUN, self.waits[k]), (_KIND.WAIT, light[-1]), (_KIND.WAIT, heavy)]
            lines += [(_KIND.FREE, each) for each in light]
            lines += self._trained(self.back_heavy[k], made)
        lines += [(_KIND.END_I, 0)]
        begin = Placement(
            frozenset(value for value, _ in self.heavy),
            frozenset(value for value, _ in self.light),
        )
        budget = (self.parts + 1) * self.share
        link = HostLink(self.share, duplex=True)
        return judge(self.graph, DeviceProgram.of(lines), budget, link, begin)

    def _trained(self, backward: int, made: int) -> list[tuple[InstructionKind, int]]:
        return [(_KIND.RUN, backward), (_KIND.RUN, self.updates[made]), (_KIND.FREE, made)]


@pytest.mark.parametrize("numbers", [(4, 3, 3, 4, 3, 3), (4, 4, 3, 3, 3, 3), (7, 5, 8, 6, 9, 5)])
def test_no_idle_time_is_a_three_partition(numbers: tuple[int, ...]) -> None:
    """Of all triples, those that sum to V keep the memory and the time 2m, and no others."""
    share = sum(numbers) // 2
    instance = Instance(numbers, share)
    without_idle = []
    for first in combinations(range(6), 3):
        rest = tuple(n for n in range(6) if n not in first)
        outcome = instance.judged((first, rest))
        kept = not outcome.violations and outcome.makespan_ns == 4 * _UNIT
        assert kept is (sum(numbers[n] for n in first) == share)
        without_idle.append(kept)
    assert any(without_idle)


def test_numbers_without_a_partition_leave_the_device_idle() -> None:
    """No triple of these has half the sum, so no such schedule is in time and memory."""
    numbers = (8, 2, 2, 2, 2, 2)
    instance = Instance(numbers, sum(numbers) // 2)
    for first in combinations(range(6), 3):
        outcome = instance.judged((first, tuple(n for n in range(6) if n not in first)))
        assert outcome.violations or outcome.makespan_ns > 4 * _UNIT
