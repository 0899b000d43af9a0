"""What the plan claims against what its replay measured."""

from __future__ import annotations

from collections.abc import Iterator

from pipeplan.plan import Plan
from pipeplan.program import Pattern
from pipeplan.simulator.replay import simulate
from pipeplan.simulator.result import Discrepancy, Simulation, refuse_invalid


def check(plan: Plan, pattern: Pattern) -> Simulation:
    """The replay of `pattern` on the plan clock, if it confirms every number of `plan`.

    Raises:
        InvalidPlanError: if the replay fails or measures something else than the plan claims.
        DeadlockError: if ranks wait for each other for ever.
    """
    simulation = simulate(plan, pattern)
    refuse_invalid(list(disagreements(plan, simulation)), "plan")
    return simulation


def disagreements(plan: Plan, simulation: Simulation) -> Iterator[Discrepancy]:
    """Every number of `plan` that a replay on the plan clock does not confirm.

    Args:
        plan: the claim.
        simulation: its replay on the plan clock, of enough micro-batches for a steady state.
    """
    if simulation.period_ns != plan.period_ns:
        yield _differs("period", "plan", plan.period_ns, simulation.period_ns)
    if simulation.step_ns != plan.step_ns:
        yield _differs("step", "plan", plan.step_ns, simulation.step_ns)
    if len(plan.memory) != len(simulation.memory):
        yield _differs("memory", "plan", len(plan.memory), f"{len(simulation.memory)} rows")
    for gpu, (claim, row) in enumerate(zip(plan.memory, simulation.memory, strict=False)):
        for name in type(row).model_fields:
            got, need = getattr(claim, name), getattr(row, name)
            if got != need:
                yield _differs("memory", f"GPU {gpu}, {name}", got, need)
    for row in simulation.memory:
        if row.peak_bytes > row.budget_bytes:
            yield Discrepancy(
                "budget",
                f"GPU {row.gpu}",
                f"got {row.peak_bytes} bytes at once, need at most {row.budget_bytes}",
            )

    host, waiting = plan.cluster.host, sum(row.host_bytes for row in simulation.memory)
    if host is not None and waiting > host.memory_bytes:
        got, need = waiting, host.memory_bytes
        yield Discrepancy("host", "plan", f"got {got} bytes of all GPUs, need at most {need}")


def _differs(what: str, where: str, got: object, need: object) -> Discrepancy:
    return Discrepancy(what, where, f"got {got}, the replay has {need}")
