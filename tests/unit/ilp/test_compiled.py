"""Machine code and plain Python compute the same, and a missing compiler is said."""

from __future__ import annotations

import os
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from random import Random

import numpy as np
import pytest

from pipeplan.ilp.incumbent import Incumbent
from pipeplan.ilp.reservation_table import ReservationTable
from pipeplan.ilp.step import rules, search
from tests.equal_steps import equal
from tests.searches import limits

ROOT = Path(__file__).parents[3]

CODE = """
import sys
if {missing}:
    sys.modules["numba"] = None
from fractions import Fraction
from random import Random
from pipeplan.ilp.compiled import AVAILABLE
from pipeplan.ilp.step.cuts import CutSearch
from pipeplan.ilp.step.instance import instance
from pipeplan.ilp.step.list_scheduler import schedule_step
from pipeplan.ilp.step.placements import stages_of
from pipeplan.ilp.step.rules import random_rule
from tests.equal_steps import equal

print("numba" if AVAILABLE else "plain")
for split in (True, False):
    for memory in (Fraction(1, 3), Fraction(1)):
        _, costs = equal(3, split=split, memory=memory)
        stages = stages_of(costs, range(0, 12, 2), (0, 1, 2, 2, 1, 0), [split] * 6)
        of, random = instance(costs, stages, 5), Random(0)
        print(list(CutSearch(costs, random, 5, split=split).all((0, 1, 2, 0, 1, 2))))
        for horizon in (float("inf"), 6 * of.load_ns):
            for _ in range(10):
                times, events = schedule_step(of, random_rule(of, random), horizon)
                print(events, times and (times.starts.tolist(), times.end, times.ends))
"""


def test_machine_code_computes_what_python_does() -> None:
    """80 rules and some cuts, with ample and scarce memory: all numbers are the same."""
    pytest.importorskip("numba")
    first, *rows = printed(missing=False)
    other, *plain = printed(missing=True)
    assert (first, other) == ("numba", "plain")
    assert rows == plain
    assert len(rows) == 84
    assert any(row.endswith("None") for row in rows)
    assert len(set(rows)) > 30


def test_free_places_are_those_of_a_reservation_table() -> None:
    """Ops of some length, placed one after the other on one GPU until it is full."""
    random, none = Random(0), 0
    for _ in range(200):
        period, count = random.randint(4, 30), random.randint(1, 8)
        table, ns = ReservationTable(period), [random.randint(1, 6) for _ in range(count)]
        gpus, starts = np.zeros(count, np.int64), np.zeros(count, np.int64)
        placed, lengths = np.zeros(count, np.bool_), np.array(ns)
        for line in range(count):
            now, others = random.randint(0, 60), np.arange(line)
            found = rules._free(period, others, gpus, lengths, starts, placed, line, now)
            expected = table.earliest_fit(now, ns[line])
            assert found == (-1 if expected is None else expected)
            none += expected is None
            if expected is not None:
                table.add(expected, ns[line])
                starts[line], placed[line] = expected, True
    assert none > 20


def printed(*, missing: bool) -> list[str]:
    """What a process of its own prints."""
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(missing=missing)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_missing_compiler_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, as a note of the plan."""
    _, costs = equal(2, split=False, memory=Fraction(1))
    for available, notes in ((True, []), (False, [search.NO_COMPILER])):
        monkeypatch.setattr(search, "AVAILABLE", available)
        state = Incumbent(costs, limits())
        search.StepSearch(state)
        assert state.notes == notes
