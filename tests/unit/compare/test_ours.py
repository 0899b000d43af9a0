"""Our own rows of a comparison, and searches in other processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from fractions import Fraction
from functools import partial
from math import isqrt
from typing import Any

import pytest

from pipeplan import planner, verifier
from pipeplan.baselines import splits
from pipeplan.baselines.listed import Lists, listed_plan
from pipeplan.chain import Chain
from pipeplan.cluster import Cluster
from pipeplan.compare import Absent, Row, ours
from pipeplan.compare.ours import CONTIGUOUS, OURS, Found
from pipeplan.compare.rows import row_of
from pipeplan.errors import PipeplanError
from pipeplan.jobs import Job, run_jobs
from pipeplan.plan import Bounds, OpKind, Plan
from pipeplan.planner import Config, Progress
from tests.baselines import chain, setting
from tests.compared import eager_row, machines

LONG = partial(time.sleep, 3600)
"""Longer than a test may take."""


def found(memory: int, free: Row | Absent, contiguous: Row | Absent) -> Found:
    """What the planner might have said of two GPUs of `memory` bytes."""
    return Found(machines(memory), free, contiguous)


def test_what_was_found_for_other_memory_competes_where_it_fits() -> None:
    """A faster plan from less or more memory is taken and sound, one that does not fit is not."""
    slow, fast = eager_row(OURS, (1, 1), 1000), eager_row(OURS, (3, 3), 1000)
    none = Absent(CONTIGUOUS, "time")
    enough = max(fast.peak_bytes)
    scarce = found(enough - 1, slow.on(machines(enough - 1)), none)
    here = found(enough, Absent(OURS, "time"), none)
    ample = found(1000, fast, none)
    everywhere = [scarce, here, ample]
    for row in ours.our_rows(here, everywhere):
        assert isinstance(row, Row)
        assert row.period_ns == fast.period_ns
        assert row.budget_bytes == (enough, enough)
        assert "other memory" in row.detail
        assert verifier.verify(row.plan) == ()
    assert [row.name for row in ours.our_rows(here, everywhere)] == [OURS, CONTIGUOUS]
    assert ours.our_rows(scarce, everywhere)[0] is scarce.free
    assert ours.our_rows(ample, everywhere)[0] is fast
    assert ours.our_rows(here, [here]) == (here.free, none)


def test_a_free_plan_is_no_contiguous_one() -> None:
    """A plan with two stages on a GPU goes to our first row only."""
    of = setting(chain([(1, 1)] * 4), 2, memory=1000)
    stages = splits.to_stages((1, 2, 4), (0, 1, 0))
    plan = listed_plan(of.outline(stages, "flush", "test"), two_turns(), 1)
    row = replace(row_of(OURS, plan), period_ns=Fraction(1))
    here = found(1000, Absent(OURS, "time"), Absent(CONTIGUOUS, "time"))
    free, contiguous = ours.our_rows(here, [found(2000, row, Absent(CONTIGUOUS, "time"))])
    assert isinstance(free, Row)
    assert contiguous == here.contiguous


def two_turns() -> Lists:
    """One micro-batch through stages 0, 1, 2 on GPUs 0, 1, 0 and back."""
    there = [(OpKind.F, stage, 0) for stage in range(3)]
    back = [(OpKind.B, stage, 0) for stage in range(3)]
    return [[there[0], there[2], back[2], back[0]], [there[1], back[1]]]


def test_bounds_hold_for_less_memory_only() -> None:
    """More memory allows more plans: a bound proven there holds here, not the other way."""

    def proven(memory: int, bound: int) -> Found:
        row = eager_row(OURS, (1, 1), memory)
        solver = row.plan.solver.model_copy(update={"bounds": Bounds(any=(bound, 1))})
        plan = row.plan.model_copy(update={"solver": solver})
        return found(memory, replace(row, plan=plan), Absent(CONTIGUOUS, "time"))

    less, more = proven(500, 4), proven(1000, 6)
    assert ours.largest_bound(less, [less, more]) == 6
    higher = proven(500, 9)
    fast = found(1000, eager_row(OURS, (3, 3), 1000), Absent(CONTIGUOUS, "time"))
    gaps = [ours.our_rows(each, [each, fast])[0] for each in (proven(1000, 4), proven(1000, 0))]
    assert [isinstance(row, Row) and row.plan.solver.gap for row in gaps] == [0.5, None]
    assert ours.largest_bound(more, [higher, more]) == 6
    nothing = found(9, Absent(OURS, "time"), Absent(CONTIGUOUS, "time"))
    assert ours.largest_bound(nothing, [nothing]) is None


def test_jobs_in_other_processes_give_what_they_give_here() -> None:
    """Two at once: same results in order, progress to the end; a failure arrives as it is."""
    jobs = [Job(f"{n} squared", partial(pow, n, 2)) for n in range(4)]
    heard: list[float] = []
    assert run_jobs(jobs, 2, lambda share, what: heard.append(share)) == [0, 1, 4, 9]
    assert heard == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert run_jobs(jobs, 1, lambda share, what: None) == [0, 1, 4, 9]
    with pytest.raises(ValueError, match="nonnegative"):
        run_jobs(
            [Job("bad", partial(isqrt, -1)), Job("good", partial(isqrt, 4))],
            2,
            lambda share, what: None,
        )


@pytest.mark.parametrize("processes", [1, 2])
def test_ctrl_c_keeps_what_is_done_and_ends_the_rest_at_once(processes: int) -> None:
    """Jobs that are done have their results, the others none."""
    jobs: list[Job[object]] = [Job("done", partial(pow, 3, 2)), *[Job("long", LONG)] * 3]

    def tell(share: float, _: str) -> None:
        if share >= 0.25:
            raise KeyboardInterrupt

    assert run_jobs(jobs, processes, tell) == [9, None, None, None]


def test_ctrl_c_before_the_first_is_passed_on() -> None:
    """Of several processes `test_ctrl_c_is_heard_by_the_parent_alone` says so."""

    def tell(share: float, _: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_jobs([Job("long", LONG)], 1, tell)


def test_an_interrupted_search_is_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a search would compare nothing: what it has found so far is left out with its job."""

    def interrupted(of: Chain, cluster: Cluster, config: Config, hear: Progress) -> Plan:
        def heard(*row: Any) -> None:
            if row[1] is not None and row[4] != "interrupted":
                raise KeyboardInterrupt
            hear(*row)

        return planner.solve(of, cluster, config, heard)

    monkeypatch.setattr(ours, "solve", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ours.find_ours(chain([(2, 3), (2, 4)], sizes=[3, 0], saved=10), machines(1000), Config())


def test_a_killed_process_is_named_not_waited_for() -> None:
    """Whoever kills it, the comparison ends and says so."""
    dies: Job[object] = Job("dies", partial(os._exit, 9))
    lives: Job[object] = Job("lives", partial(pow, 2, 2))
    with pytest.raises(PipeplanError, match="killed"):
        run_jobs([dies, lives], 2, lambda share, what: None)


def test_ctrl_c_is_heard_by_the_parent_alone() -> None:
    """A terminal sends it to all processes, also those that only begin: they end in silence."""
    program = """
import signal, time
from functools import partial
from pipeplan.jobs import Job, run_jobs
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell started us behind
jobs = [Job("sleep", partial(time.sleep, 300))] * 2
try:
    run_jobs(jobs, 2, lambda share, what: print(what, flush=True))
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""
    command = [sys.executable, "-c", program]
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **both, text=True, start_new_session=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "sleep\n"
        os.killpg(parent.pid, signal.SIGINT)
        assert parent.communicate(timeout=60) == ("interrupted\n", "")


def test_no_process_outlives_its_parent() -> None:
    """Whoever kills the comparison kills its searches: the pipe they all hold is closed."""
    program = """
import time
from functools import partial
from pipeplan.jobs import Job, run_jobs
jobs = [Job("sleep", partial(time.sleep, 300))] * 2
run_jobs(jobs, 2, lambda share, what: print(what, flush=True))
"""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "sleep\n"
        parent.kill()
        assert parent.communicate(timeout=60)[0] == ""
