"""Chain and cluster in, verified plan out.

The solver (`ilp`) claims a schedule, its bytes and bounds; the verifier and the simulator judge
the plan with formulas of their own. A disagreement between the voices is our bug, never a plan.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from importlib.util import find_spec
from typing import Final

from pipeplan import verifier
from pipeplan.chain import Chain
from pipeplan.cluster import Cluster
from pipeplan.errors import InfeasibleError, InputError, TimeLimitError
from pipeplan.ilp import coarse, search
from pipeplan.ilp.again import search as again
from pipeplan.ilp.again.merge import recomputes
from pipeplan.ilp.again.solved import Solved
from pipeplan.ilp.bounds import feasibility
from pipeplan.ilp.facts.costs import Costs
from pipeplan.ilp.resume import check, warm
from pipeplan.ilp.state.incumbent import Incumbent
from pipeplan.plan import Plan
from pipeplan.planner.assemble import assemble, cross_check
from pipeplan.planner.config import Config, limits
from pipeplan.planner.pins import resolve

Progress = Callable[[float, Fraction | None, Fraction, float | None, str], None]
"""(elapsed s, best period per micro-batch in ns or None, bound in ns, gap or None, phase)."""

TIME_OVER: Final = 0.95
"""Share of the limit from which on the limit ended the search: its last part stops early."""


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
        TimeLimitError: if neither a plan nor a proof was found.
        InputError: if the configuration or the sizes are out of range, or the plan to resume from
            answers another question.
        InvalidPlanError: if the plan to resume from breaks a rule.
        InternalError: if our own voices disagree about a plan.
    """
    config = config or Config()
    if config.offload == "auto" and cluster.host is None:
        raise InputError(
            "config.offload: got auto for a cluster without a host, need one to offload to: its"
            " bandwidth and memory (--host-bandwidth, --host-memory, or host in the cluster file)."
        )
    pins = resolve(config.pins, chain, cluster)
    costs = Costs(chain, cluster, config.semantics, config.memory_model, pins=pins)
    feasibility.check_sums(costs)
    state = Incumbent(costs, limits(config, costs.gpus), progress)
    for start in config.starts:
        verifier.check(start)
        check(state, start, again=config.recompute == "auto")
        if not recomputes(start):
            warm(state, start)
    solved = _search(state, config)
    if solved.state.best is None:
        raise _failure(state, config)
    plan = assemble(solved, config)
    cross_check(plan, solved)
    solved.state.enter("done")
    return plan


def _search(state: Incumbent, config: Config) -> Solved:
    """What the method says.

    Raises:
        InputError: if the method's solver is missing, the paper's ILP cannot say the problem, or
            groups are asked for where only layers are searched.
    """
    if config.method == "paper-ilp":
        _literal(state)
        return Solved(state)
    groups = _groups(state.costs, config)
    if groups is not None:
        _tell_no_groups(state, config)
    if config.recompute == "auto":
        return again.run(state, config.starts)
    if config.offload == "auto":
        return again.keeping(state)
    if groups is None:
        search.run(state)
        search.prove_contiguous(state)
    else:
        coarse.run(state, groups)
    return Solved(state)


def _groups(costs: Costs, config: Config) -> int | None:
    """How many groups of layers to search on; None for the layers themselves."""
    if config.coarsen == "auto":
        return coarse.automatic(costs)
    if config.coarsen == "off" or config.coarsen >= costs.layers:
        return None
    if not costs.exact:
        raise InputError(
            f"config.coarsen: got {config.coarsen} with config.memory_model paper, need off: its"
            " working bytes do not add up over merged layers. Plan without config.coarsen."
        )
    return config.coarsen


def _tell_no_groups(state: Incumbent, config: Config) -> None:
    """With recomputation or offloading the layers themselves are searched, never in silence."""
    asked = [name for name in ("recompute", "offload") if getattr(config, name) == "auto"]
    if not asked:
        return
    if config.coarsen != "auto":
        choices = " and ".join(f"config.{name} auto" for name in asked)
        raise InputError(
            f"config.coarsen: got {config.coarsen} with {choices}, need auto or off: groups of"
            " layers are not searched with it. Plan without config.coarsen, or without"
            f" {choices}."
        )
    state.notes.append(
        f"searched layer by layer although the chain is long: {' and '.join(asked)} auto knows no"
        " groups (--coarsen)"
    )


def _literal(state: Incumbent) -> None:
    if find_spec("ortools") is None:
        raise InputError(
            "method paper-ilp: got no ortools, need it: pip install 'pipeplan[plan]',"
            " or use --method contiguous."
        )
    from pipeplan.ilp.paper import literal  # only here: contiguous plans need no solver

    literal.search(state)


def _failure(state: Incumbent, config: Config) -> Exception:
    """The proof that no plan exists, or what the search did instead of finding one."""
    costs = state.costs
    if state.infeasible is not None:
        return InfeasibleError(state.infeasible)
    limit, used = state.options.time_limit_s, state.elapsed
    over = used > TIME_OVER * limit
    if over:
        what = f"no plan within {limit:g} s, and none is ruled out."
    else:
        what = (
            f"no plan found, and none is ruled out: the search ended by itself after {used:.1f} s"
            f" of {limit:g} s."
        )
    ways = feasibility.would_help(costs, again=config.recompute == "auto", time=over)
    notes = "".join(f" ({note}.)" for note in state.notes)
    return TimeLimitError(
        f"planner: chain {costs.chain.name!r} on {costs.gpus} GPUs: {what} {ways}{notes}"
    )
