"""The plan file's content from what the search found, and every voice's word on it."""

from __future__ import annotations

from fractions import Fraction

from pipeplan import __version__, lowering, simulator, verifier
from pipeplan.errors import DeadlockError, InternalError, InvalidPlanError
from pipeplan.ilp import Problem, Solution
from pipeplan.plan import Bounds, Plan, Rational, Solver
from pipeplan.planner.config import Config


def assemble(problem: Problem, found: Solution, config: Config) -> Plan:
    """The plan file's content from the best schedule and all that is proven."""
    chain = problem.chain
    return Plan(
        chain=chain,
        chain_digest=chain.digest(),
        task_digest=chain.task_digest,
        cluster=problem.cluster,
        semantics=problem.semantics,
        microbatches=found.microbatches,
        memory_model=problem.memory_model,
        k=found.k,
        period_ns=found.period_ns,
        step_ns=found.step_ns,
        stages=found.stages,
        ops=found.ops,
        memory=found.memory,
        solver=Solver(
            status="optimal" if found.optimal else "feasible",
            bounds=Bounds(**{name: _rational(value) for name, value in found.bounds.items()}),
            gap=found.gap,
            gap_bound=found.gap_bound,
            seconds=round(found.seconds, 3),
            seed=config.seed,
            version=__version__,
            method=config.method,
            most_microbatches=problem.microbatches if problem.limit_versions else None,
            pins=problem.pins,
            contiguous_period_ns=_rational(found.contiguous) if found.contiguous else None,
            notes=found.notes,
            history=found.history,
        ),
    )


def _rational(value: Fraction) -> Rational:
    return value.numerator, value.denominator


def cross_check(plan: Plan, found: Solution) -> None:
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
    if audit.in_flight != found.in_flight:
        raise _bug(plan, f"in flight: solver {found.in_flight}, verifier {audit.in_flight}")
    try:
        simulator.check(plan, lowering.lower(plan))
    except (InvalidPlanError, DeadlockError) as error:
        raise _bug(plan, f"the simulator refuses the plan: {error}") from error


def _bug(plan: Plan, what: str) -> InternalError:
    return InternalError(
        f"planner: chain {plan.chain.name!r} on {len(plan.cluster.gpus)} GPUs: {what}."
        " Please report this with the chain and the cluster."
    )
