"""What the launch of a plan should measure."""

from __future__ import annotations

from pipeplan import lowering
from pipeplan.plan import Plan
from pipeplan.simulator import simulate

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
    pattern, m, lasting = lowering.lower(plan), plan.microbatches, plan
    if action_ns:
        lasting = _with_overhead(plan, action_ns)
    if plan.semantics == "2bw":
        period = simulate(lasting, pattern, clock="eager").period_ns
        return float((plan.period_ns if period is None else period) / plan.k)
    one, more = (
        simulate(lasting, pattern, microbatches=steps * m, clock="eager", updates=True).makespan_ns
        for steps in (1, 1 + STEPS)
    )
    return (more - one) / (STEPS * m)


def _with_overhead(plan: Plan, action_ns: float) -> Plan:
    """The plan with ops that take that much longer; they start where they did.

    So only its orders are left of it: lists of actions must be those of the plan itself.
    """
    more = round(action_ns)
    cluster = plan.cluster
    return plan.model_copy(
        update={
            "cluster": cluster.model_copy(
                update={"action_overhead_ns": cluster.action_overhead_ns + more}
            ),
            "ops": tuple(
                op.model_copy(update={"duration_ns": op.duration_ns + more})
                if op.kind.is_compute
                else op
                for op in plan.ops
            ),
        }
    )
