"""Machine code and plain Python compute the same, and a missing compiler is said."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from fractions import Fraction
from pathlib import Path
from random import Random

import pytest

from pipeplan.ilp import Problem, incumbent, modulo_scheduling, solve
from pipeplan.ilp.bounds.load import load_bound
from pipeplan.ilp.clock import SearchClock
from pipeplan.ilp.compiled import COMPILING, NO_COMPILER, compile_s
from pipeplan.ilp.contiguous import recurrence, stage_choice
from pipeplan.ilp.incumbent import Incumbent
from pipeplan.ilp.local_search import assignment_steps, peak_estimate
from pipeplan.ilp.local_search.annealing import SimulatedAnnealing
from pipeplan.ilp.local_search.assignment_annealing import AssignmentAnnealing
from pipeplan.ilp.local_search.list_scheduler import ModuloListScheduler
from pipeplan.ilp.recompute import labels
from pipeplan.ilp.recompute.dynamic_program import RecomputeDP
from pipeplan.ilp.recompute.options import list_options
from pipeplan.ilp.step.search import StepSearch
from tests.equal_steps import equal
from tests.random_placements import random_costs
from tests.searches import limits
from tests.unit.ilp.test_recompute import costs_of, some_chain

ROOT = Path(__file__).parents[3]

CODE = """
import sys
if {missing}:
    sys.modules["numba"] = None
from dataclasses import replace
from fractions import Fraction
from random import Random
import numpy as np
from pipeplan.cluster import Host, uniform
from pipeplan.ilp.compiled import AVAILABLE
from pipeplan.ilp.cycle_ratio import minimize_period_for_order
from pipeplan.ilp.local_search.allocation import Allocation
from pipeplan.ilp.local_search.allocation_walk import AllocationWalk
from pipeplan.ilp.local_search.assignment_annealing import AssignmentAnnealing
from pipeplan.ilp.local_search.list_scheduler import ModuloListScheduler
from pipeplan.ilp.local_search.visit_cuts import VisitCuts
from pipeplan.ilp.step.cuts import CutSearch
from pipeplan.ilp.step.instance import instance
from pipeplan.ilp.step.list_scheduler import schedule_step
from pipeplan.ilp.step.placements import stages_of
from pipeplan.ilp.step.rules import random_rule
from tests.equal_steps import equal
from pipeplan.ilp.recompute.dynamic_program import RecomputeDP
from pipeplan.ilp.recompute.options import list_options
from tests.random_placements import random_costs, random_runs
from tests.unit.ilp.test_recompute import costs_of, some_chain

HOST = Host(memory_bytes=10**9, bandwidth_bytes_per_s=10**9)
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
random = Random(0)
for model in ("exact", "paper"):
    for _ in range(100):
        costs, k = random_costs(random, model, 3), random.choice((1, 1, 2, 3))
        runs, wait = random_runs(random, costs), (random.randint(0, 3), random.randint(0, 3))
        period = int(k * costs.load_ns(0, costs.layers - 1, 0) * random.choice((0.5, 0.7, 1)))
        centres = [copy * period // k for copy in range(k)]
        placing = ModuloListScheduler(costs, runs, period, centres, dict([(0, wait)]))
        done = placing.place()
        found = placing.schedule() if done else None
        print(done, placing.placed, found and (placing.peaks(), found))
        print(found and minimize_period_for_order(costs, found, 1))
        layers, gpus = range(costs.layers), range(3)
        units = AssignmentAnnealing(
            costs, period, [0 for _ in layers], [2.0 for _ in layers], [0.1 for _ in gpus], 0.02
        )
        units.anneal(random, 200)
        print(units.homes, units.total, units.overload, units.bytes)
        draws, heats = np.random.default_rng(k), np.full(100, 0.03)
        walk = AllocationWalk(costs, draws)
        walk.begin(Allocation((0,) * costs.layers, frozenset()), 3.0, max(1, period // k))
        print(walk.run(heats), walk.new, walk.closest)
        visits = VisitCuts(costs, (0, 1, 2, 1, 0), max(1, period // k), 1.1)
        visits.anneal(draws, 100)
        print(visits.homes, visits.excess)
for seed in range(12):
    chain = some_chain(seed, 6, options=seed % 3)
    ways = dict(offload=seed % 2 == 1, nested=seed % 4 > 1)
    listed = [list_options(chain, relaxed=relaxed, **ways) for relaxed in (False, True)]
    for offered in listed:
        print([each.tolist() for each in (offered.more, offered.saved, offered.peak, offered.ids)])
    found = RecomputeDP(costs_of(chain, 3, 50), options=listed[0]).shortest(1)
    print(found)
    if seed % 3:
        costs = replace(costs_of(chain, 3, 50), cluster=uniform(3, 50, host=HOST))
        draws = np.random.default_rng(seed)
        walk = AllocationWalk(costs, draws, recompute=True, host=HOST if seed % 2 else None)
        walk.begin(Allocation((0,) * 6, frozenset()), 3.0, costs.load_ns(0, 5, 0))
        for _ in range(20):
            walk.run(np.full(30, 0.1))
            if walk.waits:
                walk.judged(0.1)
        print(walk.new, walk.closest)
"""


def test_machine_code_computes_what_python_does() -> None:
    """80 rules and some cuts, with ample and scarce memory; 200 periodic schedules, allocations.

    As many walks from allocation to allocation, and cuts of visits. Options of 12 chains,
    contiguous plans with some of them. All numbers are the same.
    """
    pytest.importorskip("numba")
    first, *rows = printed(missing=False)
    other, *plain = printed(missing=True)
    assert (first, other) == ("numba", "plain")
    assert rows == plain
    assert len(rows) == 84 + 5 * 200 + 3 * 12 + 8
    assert any(row.endswith("None") for row in rows[:84])
    rows, options = rows[:1084], rows[1084:]
    assert len(set(options)) > 30
    assert any(row.startswith("False") for row in rows[84::5])
    for some in (rows[:84], *(rows[84 + kind :: 5] for kind in range(5))):
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
    seen = [
        each
        for module in (assignment_steps, modulo_scheduling, peak_estimate, labels, stage_choice)
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
