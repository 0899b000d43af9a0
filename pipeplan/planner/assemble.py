"""The plan file's content from what the search found, and every voice's word on it."""

from __future__ import annotations

from fractions import Fraction

from pipeplan import __version__, lowering, simulator, verifier
from pipeplan.errors import DeadlockError, InternalError, InvalidPlanError
from pipeplan.ilp.again.solved import Solved
from pipeplan.ilp.facts.memory import in_flight, memory_rows, not_updated
from pipeplan.ilp.facts.schedule import Schedule, to_ops
from pipeplan.ilp.state.objective import step_ns
from pipeplan.plan import Bounds, Plan, Rational, Solver
from pipeplan.planner.config import Config


def assemble(solved: Solved, config: Config) -> Plan:
    """The plan file's content from the best schedule and all that is proven."""
    state, chain = solved.state, solved.chain
    costs, schedule = state.costs, state.best
    assert schedule is not None
    microbatches = _microbatches(solved, config, schedule)
    return Plan(
        chain=chain,
        chain_digest=chain.digest(),
        task_digest=chain.task_digest,
        cluster=costs.cluster,
        semantics=costs.semantics,
        microbatches=microbatches,
        memory_model=costs.memory_model,
        k=schedule.k,
        period_ns=schedule.period,
        step_ns=step_ns(costs, schedule, microbatches),
        stages=solved.stages,
        ops=to_ops(costs, schedule),
        memory=memory_rows(costs, schedule),
        solver=Solver(
            status="optimal" if state.bound == schedule.per_microbatch else "feasible",
            bounds=Bounds(**{name: _rational(value) for name, value in state.bounds.items()}),
            gap=state.gap,
            gap_bound=state.gap_bound,
            seconds=round(state.options.clock.wall_s, 3),
            seed=config.seed,
            version=__version__,
            method=config.method,
            most_microbatches=state.options.microbatches if state.options.limit_versions else None,
            pins=costs.pins,
            contiguous_period_ns=_rational(state.contiguous) if state.contiguous else None,
            notes=tuple(state.notes),
        ),
    )


def _microbatches(solved: Solved, config: Config, schedule: Schedule) -> int:
    """As asked for; else the default, raised to what (R6) needs."""
    state = solved.state
    if config.microbatches is not None or config.semantics == "flush":
        return state.options.microbatches
    return max(state.options.microbatches, max(not_updated(state.costs, schedule)) - 1)


def _rational(value: Fraction) -> Rational:
    return value.numerator, value.denominator


def cross_check(plan: Plan, solved: Solved) -> None:
    """Every voice must agree with the solver's claim.

    Raises:
        InternalError: if one does not.
    """
    violations = verifier.verify(plan)
    if violations:
        listed = "; ".join(str(violation) for violation in violations[:5])
        raise _bug(plan, f"the verifier refuses the plan: {listed}")
    audit = verifier.audit(plan)
    if audit.memory != plan.memory:
        raise _bug(plan, f"memory: solver {plan.memory}, verifier {audit.memory}")
    if solved.state.best is None or audit.in_flight != in_flight(
        solved.state.costs, solved.state.best
    ):
        raise _bug(plan, f"in flight: verifier {audit.in_flight}")
    try:
        simulator.check(plan, lowering.lower(plan))
    except (InvalidPlanError, DeadlockError) as error:
        raise _bug(plan, f"the simulator refuses the plan: {error}") from error


def _bug(plan: Plan, what: str) -> InternalError:
    return InternalError(
        f"planner: chain {plan.chain.name!r} on {len(plan.cluster.gpus)} GPUs: {what}."
        " Please report this with the chain and the cluster."
    )
