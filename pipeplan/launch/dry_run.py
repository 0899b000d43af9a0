"""`--clock sleep` and `--clock virtual`: the plan on these ranks, before there is a model."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any

import torch

from pipeplan.launch import ending, results
from pipeplan.launch.options import LaunchOptions
from pipeplan.plan import Plan
from pipeplan.program import Pattern
from pipeplan.runtime.dry_run.clock import RankClock
from pipeplan.runtime.dry_run.planned_times import PlannedTimes
from pipeplan.runtime.dry_run.run import DryRun, Kind, dry_run, make_clock
from pipeplan.runtime.interfaces import Observer
from pipeplan.runtime.startup.process_group import join
from pipeplan.runtime.supervision.period_meter import PeriodMeter, Periods
from pipeplan.runtime.transport.base import Transport
from pipeplan.runtime.transport.gloo import GlooTransport, LocalTransport
from pipeplan.runtime.transport.torchrun_env import TorchrunEnv
from pipeplan.units import format_ns


def run(options: LaunchOptions, place: TorchrunEnv, plan: Plan, pattern: Pattern) -> int:
    """Run `plan` dry; returns the exit code, or ends the process if anything fails."""
    torch.set_num_threads(1)
    made: DryRun | None = None
    transport: GlooTransport | LocalTransport | None = None
    try:
        transport = join(place, options.timeout_ns)
        kind: Kind = "virtual" if options.clock == "virtual" else "sleep"
        clock = make_clock(kind)
        listener = Listener(plan, clock)
        made = dry_run(
            plan,
            pattern,
            options.steps,
            listener,
            clock,
            times=PlannedTimes.of(plan, scale=options.time_scale),
        )
        transport.gather(None)  # all start together
        listener.begin = clock.now()
        made.run(transport)
        _finish(options, plan, transport, listener)
        transport.close()
    except Exception as error:
        ending.fail(error, place, made.recorder if made else None, options.out, transport)
    return 0


@dataclass(frozen=True, slots=True)
class Heard:
    """What one rank heard; only the rank of the last stage hears of periods and steps."""

    periods: Periods | None
    best_step_ns: int | None
    elapsed_ns: int


class Listener(Observer):
    """The executor's observer in a dry run."""

    def __init__(self, plan: Plan, clock: RankClock) -> None:
        self.begin = 0
        """When the rank began."""
        self._last = len(plan.stages) - 1
        self._clock = clock
        self._meter = PeriodMeter(plan.k, plan.microbatches, drains=plan.semantics == "flush")
        self._updates: list[int] = []

    def backward(self, microbatch: int, end_ns: int) -> None:
        """See `Observer`."""
        self._meter.mark(microbatch, end_ns)

    def updated(self, stage: int, step: int) -> None:
        """See `Observer`."""
        if stage == self._last:
            self._updates.append(self._clock.now())

    def heard(self) -> Heard:
        """What this rank knows at the end."""
        elapsed = self._clock.now() - self.begin
        if not self._updates:
            return Heard(None, None, elapsed)
        steps = [b - a for a, b in zip(self._updates, self._updates[1:], strict=False)]
        first = self._updates[0] - self.begin
        return Heard(self._meter.result(), min(steps, default=first), elapsed)


def _finish(options: LaunchOptions, plan: Plan, transport: Transport, listener: Listener) -> None:
    """Rank 0 says what all heard."""
    ranks = transport.gather(listener.heard())
    if transport.rank:
        return
    content = _content(options, plan, ranks)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        results.write(options.out / "run.json", content)
    if options.json:
        print(json.dumps(content), flush=True)
    else:
        print(_text(options, content), file=sys.stderr, flush=True)


def _content(options: LaunchOptions, plan: Plan, ranks: list[Heard]) -> dict[str, Any]:
    """run.json of a dry run: no task, no losses, no bytes."""
    teller = next(rank for rank in ranks if rank.periods)
    periods = teller.periods
    scale = options.time_scale
    return {
        "format": results.FORMAT,
        "clock": options.clock,
        "time_scale": float(scale),
        "plan_digest": plan.digest(),
        "semantics": plan.semantics,
        "microbatches": plan.microbatches,
        "k": plan.k,
        "steps": options.steps,
        "complete": True,
        "instrumented": False,
        "predicted": {
            "period_ns": round(plan.period_ns * scale),
            "step_ns": round(plan.step_ns * scale),
            "peak_bytes": [row.peak_bytes for row in plan.memory],
        },
        "measured": {
            "period_ns": periods.best_window_ns if periods else None,
            "period_window": periods.window if periods else None,
            "median_period_ns": periods.median_ns if periods else None,
            "step_ns": teller.best_step_ns,
            "elapsed_ns": max(rank.elapsed_ns for rank in ranks),
            "first_loss": None,
            "last_loss": None,
            "peak_bytes": [None for _ in ranks],
        },
        "versions": results.library_versions(),
    }


def _text(options: LaunchOptions, content: dict[str, Any]) -> str:
    predicted, measured = content["predicted"], content["measured"]
    period, step = measured["period_ns"], measured["step_ns"]
    return (
        f"dry run: {options.steps} steps of {content['microbatches']} micro-batches on the"
        f" {options.clock} clock in {format_ns(measured['elapsed_ns'])}\n"
        f"period {format_ns(round(period)) if period else '-'}"
        f" (planned {format_ns(predicted['period_ns'])}, of k = {content['k']})\n"
        f"step   {format_ns(step)} (planned {format_ns(predicted['step_ns'])})"
    )
