"""The planner: chain and cluster in, verified plan out.

The solver (`ilp`) claims a schedule, its bytes and bounds; the verifier and the simulator judge
the plan with formulas of their own. A disagreement between the voices is our bug, never a plan.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from importlib.util import find_spec
from typing import Literal

from pipeplan import __version__, lowering, simulator, verifier
from pipeplan.chain import Chain
from pipeplan.cluster import Cluster
from pipeplan.errors import (
    DeadlockError,
    InfeasibleError,
    InputError,
    InternalError,
    InvalidPlanError,
    TimeLimitError,
)
from pipeplan.ilp import coarse, feasibility, search
from pipeplan.ilp.clock import Clock, WorkClock
from pipeplan.ilp.costs import Costs
from pipeplan.ilp.incumbent import Incumbent, Options
from pipeplan.ilp.memory import in_flight, memory_rows
from pipeplan.ilp.objective import step_ns
from pipeplan.ilp.resume import warm
from pipeplan.ilp.schedule import Schedule, to_ops
from pipeplan.plan import Bounds, MemoryModel, Plan, Rational, Semantics, Solver

Progress = Callable[[float, Fraction | None, Fraction, float | None, str], None]
"""(elapsed s, best period per micro-batch in ns or None, bound in ns, gap or None, phase)."""

Method = Literal["auto", "contiguous", "paper-ilp"]

AUTO_K = (1, 2, 3)
MIN_MICROBATCHES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """What to plan for and how long to search.

    microbatches: per optimizer step; None takes enough for the plan (2bw), four per GPU (flush).
    k: micro-batches per period, or "auto" to try several where memory binds.
    method: "contiguous" keeps one stage per GPU; "paper-ilp" is the source's literal ILP (k = 1).
    gap: stop when (period - bound) / bound is at most this.
    workers: search threads; None uses one per core.
    deterministic: the same seed gives the same plan: limits count work instead of time.
    coarsen: search on this many groups of layers; "auto" does so for chains of very many layers.
    resume: a plan of the same chain to start from; its proofs are kept where all else is equal.
    """

    semantics: Semantics = "2bw"
    microbatches: int | None = None
    memory_model: MemoryModel = "exact"
    k: int | Literal["auto"] = "auto"
    method: Method = "auto"
    time_limit_s: float = 60.0
    gap: float = 0.0
    seed: int = 0
    workers: int | None = None
    deterministic: bool = False
    resume: Plan | None = None
    coarsen: int | Literal["auto", "off"] = "auto"

    def __post_init__(self) -> None:
        """Refuse what no search can honour."""
        _need(
            "microbatches", self.microbatches, self.microbatches is None or self.microbatches >= 1
        )
        _need("k", self.k, self.k == "auto" or 1 <= self.k <= 16)
        _need("time_limit_s", self.time_limit_s, self.time_limit_s > 0)
        _need("gap", self.gap, self.gap >= 0)
        _need("seed", self.seed, 0 <= self.seed < 2**31)
        _need("coarsen", self.coarsen, isinstance(self.coarsen, str) or self.coarsen >= 1)
        _need("workers", self.workers, self.workers is None or 1 <= self.workers <= 256)


def _need(name: str, value: object, good: bool) -> None:
    ranges = {
        "microbatches": "at least 1",
        "k": "auto or 1..16",
        "time_limit_s": "more than 0",
        "gap": "at least 0",
        "seed": "0..2**31-1",
        "coarsen": "auto, off or at least 1",
        "workers": "1..256",
    }
    if not good:
        raise InputError(f"config.{name}: got {value}, need {ranges[name]}")


def solve(
    chain: Chain, cluster: Cluster, config: Config | None = None, progress: Progress | None = None
) -> Plan:
    """The best plan found, verified by every voice, with proven bounds beside it.

    Args:
        chain: What is trained.
        cluster: GPUs and links.
        config: What to plan for and how long to search.
        progress: Called whenever the plan, the bound or the phase changes.

    Returns:
        A plan that keeps every rule of docs/model.md. Ctrl-C during the search returns the best so
        far.

    Raises:
        InfeasibleError: if it is proven that no plan exists.
        TimeLimitError: if the time ended before a plan was found.
        InputError: if the configuration or the sizes are out of range.
        InvalidPlanError: if the plan to resume from breaks a rule.
        InternalError: if our own voices disagree about a plan.
    """
    config = config or Config()
    costs = Costs(chain, cluster, config.semantics, config.memory_model)
    feasibility.check_sums(costs)
    state = Incumbent(costs, _options(costs, config), progress)
    if config.resume is not None:
        verifier.check(config.resume)
        warm(state, config.resume)
    _search(state, config)
    if state.best is None:
        raise _failure(state)
    plan = _assemble(state, config)
    _cross_check(plan, costs, state.best)
    state.enter("done")
    return plan


def _search(state: Incumbent, config: Config) -> None:
    """What the method says.

    Raises:
        InputError: if the method's solver is missing, or the paper's ILP cannot say the problem.
    """
    if config.method == "paper-ilp":
        _literal(state)
        return
    groups = _groups(state.costs, config)
    if groups is None:
        search.run(state)
    else:
        coarse.run(state, groups)


def _groups(costs: Costs, config: Config) -> int | None:
    """How many groups of layers to search on; None for the layers themselves."""
    if config.coarsen == "auto":
        return coarse.automatic(costs)
    if config.coarsen == "off" or config.coarsen >= costs.layers:
        return None
    if not costs.exact:
        raise InputError(
            f"config.coarsen: got {config.coarsen} with memory model 'paper', need 'exact' or off:"
            " its working bytes do not add up over merged layers. Plan without --coarsen."
        )
    return config.coarsen


def _literal(state: Incumbent) -> None:
    if find_spec("ortools") is None:
        raise InputError(
            "method paper-ilp: got no ortools, need it: pip install 'pipeplan[plan]',"
            " or use --method contiguous."
        )
    from pipeplan.ilp import literal  # only here: contiguous plans need no solver

    literal.search(state)


def _ks(config: Config) -> tuple[int, ...]:
    if config.k != "auto":
        return (config.k,)
    return (1,) if config.method == "paper-ilp" else AUTO_K


def default_microbatches(semantics: Semantics, gpus: int) -> int:
    """Micro-batches per optimizer step where none are asked for."""
    return max(MIN_MICROBATCHES, (4 if semantics == "flush" else 2) * gpus)


def _options(costs: Costs, config: Config) -> Options:
    return Options(
        microbatches=config.microbatches or default_microbatches(config.semantics, costs.gpus),
        limit_versions=config.semantics == "2bw" and config.microbatches is not None,
        ks=_ks(config),
        contiguous_only=config.method == "contiguous",
        time_limit_s=config.time_limit_s,
        gap=config.gap,
        seed=config.seed,
        workers=config.workers or min(16, os.cpu_count() or 1),
        deterministic=config.deterministic,
        clock=WorkClock() if config.deterministic else Clock(),
    )


def _failure(state: Incumbent) -> Exception:
    """The proof that no plan exists, or the admission that time ran out."""
    costs = state.costs
    if state.infeasible is not None:
        return InfeasibleError(state.infeasible)
    return TimeLimitError(
        f"planner: chain {costs.chain.name!r} on {costs.gpus} GPUs: no plan within"
        f" {state.options.time_limit_s:g} s, and none is ruled out."
        f" Give it more time, memory or GPUs.{''.join(f' ({note}.)' for note in state.notes)}"
    )


def _assemble(state: Incumbent, config: Config) -> Plan:
    """The plan file's content from the best schedule and all that is proven."""
    costs, schedule = state.costs, state.best
    assert schedule is not None
    microbatches = _microbatches(state, config, schedule)
    return Plan(
        chain=costs.chain,
        chain_digest=costs.chain.digest(),
        task_digest=costs.chain.task_digest,
        cluster=costs.cluster,
        semantics=costs.semantics,
        microbatches=microbatches,
        memory_model=costs.memory_model,
        k=schedule.k,
        period_ns=schedule.period,
        step_ns=step_ns(costs, schedule, microbatches),
        stages=schedule.stages,
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
            contiguous_period_ns=_rational(state.contiguous) if state.contiguous else None,
            notes=tuple(state.notes),
        ),
    )


def _microbatches(state: Incumbent, config: Config, schedule: Schedule) -> int:
    """As asked for; else the default, raised to what (R6) needs."""
    if config.microbatches is not None or config.semantics == "flush":
        return state.options.microbatches
    return max(state.options.microbatches, max(in_flight(state.costs, schedule)) - 1)


def _rational(value: Fraction) -> Rational:
    return value.numerator, value.denominator


def _cross_check(plan: Plan, costs: Costs, schedule: Schedule) -> None:
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
    if audit.in_flight != in_flight(costs, schedule):
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
