"""Machine code and plain Python compute the same, and a missing compiler is said."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from fractions import Fraction
from pathlib import Path
from random import Random

import numpy as np
import pytest

from pipeplan.ilp import Problem, incumbent, modulo_scheduling, solve
from pipeplan.ilp.bounds.load import load_bound
from pipeplan.ilp.clock import SearchClock
from pipeplan.ilp.compiled import COMPILING, NO_COMPILER, compile_s
from pipeplan.ilp.contiguous import recurrence, stage_choice
from pipeplan.ilp.incumbent import Incumbent
from pipeplan.ilp.local_search import (
    allocation_judge,
    allocation_moves,
    allocation_stages,
    allocation_steps,
    assignment_steps,
    layer_ways,
    peak_estimate,
    run_moves,
)
from pipeplan.ilp.local_search.allocation import Allocation
from pipeplan.ilp.local_search.allocation_walk import AllocationWalk
from pipeplan.ilp.local_search.annealing import SimulatedAnnealing
from pipeplan.ilp.local_search.assignment_annealing import AssignmentAnnealing
from pipeplan.ilp.local_search.list_scheduler import ModuloListScheduler
from pipeplan.ilp.recompute import labels
from pipeplan.ilp.recompute.dynamic_program import RecomputeDP
from pipeplan.ilp.recompute.options import list_options
from pipeplan.ilp.step.search import StepSearch
from tests import machine_code
from tests.equal_steps import equal
from tests.random_placements import random_costs
from tests.searches import limits
from tests.unit.ilp.test_recompute import costs_of, some_chain

ROOT = Path(__file__).parents[3]


def test_machine_code_computes_what_python_does() -> None:
    """Whole steps, periodic schedules, local search, options: all numbers are the same."""
    pytest.importorskip("numba")
    first, *rows = printed()
    other, *plain = printed(NUMBA_DISABLE_JIT="1")
    assert (first, other) == ("numba", "plain")
    assert rows == plain
    steps, periods = 21 * machine_code.STEPS, 5 * machine_code.PERIODS
    assert len(rows) == steps + periods + 4 * machine_code.CHAINS
    assert any(row.endswith("None") for row in rows[:steps])
    assert any(row.startswith("False") for row in rows[steps : steps + periods : 5])
    kinds = [rows[:steps], *(rows[steps + kind : steps + periods : 5] for kind in range(5))]
    for some in (*kinds, rows[steps + periods :]):
        assert len(set(some)) > 30


def test_caches_name_no_classes() -> None:
    """A cache that numba reads after an update may not ask for a class that is gone."""
    types = pytest.importorskip("numba").types
    costs = random_costs(Random(0), "exact", 2)
    layers, gpus = [0] * costs.layers, [0.0] * costs.gpus
    AssignmentAnnealing(costs, 50, layers, [1.0] * costs.layers, gpus, 0.1).anneal(Random(0), 9)
    placing = ModuloListScheduler(costs, [(0, costs.layers - 1, 0)], 1000)
    assert placing.place()
    placing.peaks()
    chain = some_chain(0, 4)
    RecomputeDP(costs_of(chain, 2, 100), options=list_options(chain)).shortest(1)
    walk = AllocationWalk(costs_of(chain, 2, 100), np.random.default_rng(0), recompute=True)
    walk.begin(Allocation((0,) * 4, frozenset()), 3.0, 100)
    walk.run(np.full(9, 0.1))
    modules = (
        *(allocation_judge, allocation_moves, allocation_stages, allocation_steps, layer_ways),
        *(run_moves, assignment_steps, modulo_scheduling, peak_estimate, labels, stage_choice),
    )
    seen = [
        each
        for module in modules
        for value in vars(module).values()
        for signature in getattr(value, "signatures", ())
        for each in signature
    ]
    assert len(seen) > 20
    assert not any(isinstance(each, types.BaseNamedTuple) for each in seen)


def test_compiling_counts_against_no_limit() -> None:
    """What numba compiles is timed, functions that it compiles for others but once."""
    numba = pytest.importorskip("numba")
    inner = numba.njit(lambda x: x + 1)
    outer = numba.njit(lambda x: inner(x))
    ModuloListScheduler(random_costs(Random(0), "exact", 2), [(0, 0, 0)], 1000).place()
    clock, began, before = SearchClock(), time.monotonic(), compile_s()
    assert outer(1) == 2
    took = compile_s() - before
    assert 0 < took <= time.monotonic() - began
    assert clock.spent <= clock.wall_s - took
    before = compile_s()
    assert outer(2) == 3
    assert compile_s() == before


def test_compiling_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a search, with what is known then, as what the strategy that runs does first."""
    numba = pytest.importorskip("numba")
    chain, costs = equal(2, split=False, memory=Fraction(1))
    problem = Problem(chain=chain, cluster=costs.cluster, ks=(1,))
    told: list[tuple[Fraction | None, Fraction, str]] = []

    def listen(
        _: float, period: Fraction | None, bound: Fraction, gap: object, phase: str
    ) -> None:
        if COMPILING in phase:
            told.append((period, bound, phase))

    history = solve(problem, progress=listen).history
    told.clear()
    solve(problem, progress=listen)
    assert not told
    python = stage_choice.best_stages.py_func  # type: ignore[attr-defined]
    monkeypatch.setattr(recurrence, "best_stages", numba.njit(python))
    assert len(solve(problem, progress=listen).history) == len(history)
    assert told == [(None, load_bound(costs), "contiguous: " + COMPILING)]


def printed(**environment: str) -> list[str]:
    """What a process of its own prints."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.machine_code"],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_missing_compiler_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, as a note of the plan."""
    _, costs = equal(2, split=False, memory=Fraction(1))
    for available, notes in ((True, []), (False, [NO_COMPILER])):
        monkeypatch.setattr(incumbent, "AVAILABLE", available)
        state = Incumbent(costs, limits())
        StepSearch(state)
        SimulatedAnnealing(state)
        assert state.notes == notes


MODULES = {
    "base": "from pipeplan.ilp.compiled import compiled\n@compiled\ndef more(x): return x + {}\n",
    "user": "from base import more\nfrom pipeplan.ilp.compiled import compiled\n"
    "@compiled\ndef twice(x): return more(more(x))\n",
}


def test_machine_code_follows_the_files_it_is_made_of(tmp_path: Path) -> None:
    """A function that is cached is made anew when a function of another file changes."""
    pytest.importorskip("numba")
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    code = "from user import twice; print(twice(1), sum(twice.stats.cache_hits.values()))"
    code = code.replace("twice.stats", "__import__('user').twice.stats")
    (tmp_path / "user.py").write_text(MODULES["user"])
    for added, expected in ((1, "3 0"), (1, "3 1"), (20, "41 0")):
        text = MODULES["base"].format(added)
        if not (tmp_path / "base.py").exists() or (tmp_path / "base.py").read_text() != text:
            (tmp_path / "base.py").write_text(text)
        done = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == expected
