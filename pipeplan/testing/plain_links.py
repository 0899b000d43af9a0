"""Stages that pass time on links that cost what they cost: what the executor itself takes."""

from __future__ import annotations

from pipeplan.plan import Plan
from pipeplan.program import Pattern
from pipeplan.runtime.dry_run.clock import RankClock
from pipeplan.runtime.dry_run.planned_times import PlannedTimes
from pipeplan.runtime.dry_run.run import emulated_host_links, executor_of
from pipeplan.runtime.executor import Executor
from pipeplan.runtime.interfaces import Observer
from pipeplan.runtime.supervision.flight_recorder import FlightRecorder
from pipeplan.runtime.transport.base import Transport


def on_plain_links(
    plan: Plan, pattern: Pattern, transport: Transport, clock: RankClock, times: PlannedTimes
) -> Executor:
    """The executor of one rank whose ops pass time and whose messages are just messages."""
    ways = emulated_host_links(plan, clock, times)
    recorder = FlightRecorder(256, clock.now)
    return executor_of(plan, pattern, transport, clock, times, ways, Observer(), recorder)
