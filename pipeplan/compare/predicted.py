"""What the launch of a plan should measure."""

from __future__ import annotations

from functools import partial

from pipeplan import lowering
from pipeplan.plan import Plan
from pipeplan.simulator import OpTimes, simulate

STEPS = 2
"""Behind the first one, of a run under flush."""


def predicted_ns(plan: Plan, action_ns: float = 0.0) -> float:
    """What a run should measure, per micro-batch, as the simulator's eager clock has it.

    Ranks do not wait for planned times: under flush one that has updated begins the next step
    while others still end this one, so steps may follow each other faster than one step takes.

    Args:
        plan: a valid one.
        action_ns: what each op takes here beside its planned time.
    """
    pattern, m = lowering.lower(plan), plan.microbatches
    beside = round(action_ns)
    times: OpTimes = {
        (op.kind, op.stage): op.duration_ns + beside for op in plan.ops if op.kind.is_compute
    }
    replayed = partial(simulate, plan, pattern, clock="eager", op_times=times)
    if plan.semantics == "2bw":
        period = replayed().period_ns
        return float((plan.period_ns if period is None else period) / plan.k)
    one, more = (
        replayed(microbatches=steps * m, updates=True).makespan_ns for steps in (1, 1 + STEPS)
    )
    return (more - one) / (STEPS * m)
