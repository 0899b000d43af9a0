"""Chain and cluster in, verified plan out.

The solver (`ilp`) claims a schedule, its bytes and bounds; the verifier and the simulator judge
the plan with formulas of their own. A disagreement between the voices is our bug, never a plan.
"""

from __future__ import annotations

from fractions import Fraction

from pipeplan import ilp
from pipeplan.chain import Chain
from pipeplan.cluster import Cluster
from pipeplan.errors import InputError
from pipeplan.ilp import Report as Progress
from pipeplan.plan import Plan
from pipeplan.planner.assemble import assemble, cross_check
from pipeplan.planner.config import Config, limits, problem
from pipeplan.planner.pins import resolve
from pipeplan.planner.resume import check


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
        A plan that keeps every rule of docs/reference/model.md. Ctrl-C during the search returns
        the best so far.

    Raises:
        InfeasibleError: if it is proven that no plan exists.
        TimeLimitError: if neither a plan nor a proof was found.
        InputError: if the configuration or the sizes are out of range, or the plan to resume from
            answers another question.
        InvalidPlanError: if the plan to resume from breaks a rule.
        InternalError: if our own voices disagree about a plan.
    """
    config = config or Config()
    _check(chain, cluster, config)
    asked = problem(chain, cluster, config, resolve(config.pins, chain, cluster))
    for start in config.starts:
        check(start, chain, cluster, config)
    return judged(asked, config, progress)


def judged(problem: ilp.Problem, config: Config, progress: Progress | None = None) -> Plan:
    """The solver's answer to a problem as a plan that every voice accepts.

    Raises:
        InfeasibleError: as `solve`; so are TimeLimitError, InputError and InternalError.
    """
    found = ilp.solve(problem, limits(config), config.starts, progress)
    plan = assemble(problem, found, config)
    cross_check(plan, found)
    if progress:
        bound = found.bounds[found.gap_bound] if found.bounds else Fraction(0)
        progress(found.seconds, found.per_microbatch, bound, found.gap, "done")
    return plan


def _check(chain: Chain, cluster: Cluster, config: Config) -> None:
    """Refuse what no search can honour for this chain on this cluster."""
    if config.offload != "off" and cluster.host is None:
        raise InputError(
            f"config.offload: got {config.offload} for a cluster without a host, need one to"
            " offload to: its bandwidth and memory (--host-bandwidth, --host-memory, or host in"
            " the cluster file)."
        )
    if config.offload == "states" and _update_rate(cluster) is None:
        raise InputError(
            "config.offload: got states for a cluster whose host does not tell how fast it updates"
            " weights, need host.update_bytes_per_s in the cluster file, or --host-update."
        )
    if isinstance(config.coarsen, str) or config.coarsen >= len(chain.layers):
        return
    if config.memory_model != "exact":
        raise InputError(
            f"config.coarsen: got {config.coarsen} with config.memory_model paper, need off: its"
            " working bytes do not add up over merged layers. Plan without config.coarsen."
        )
    asked = {name: getattr(config, name) for name in ("recompute", "offload")}
    if any(value != "off" for value in asked.values()):
        chosen = (f"config.{name} {value}" for name, value in asked.items() if value != "off")
        choices = " and ".join(chosen)
        raise InputError(
            f"config.coarsen: got {config.coarsen} with {choices}, need auto or off: groups of"
            " layers are not searched with it. Plan without config.coarsen, or without"
            f" {choices}."
        )


def _update_rate(cluster: Cluster) -> int | None:
    return None if cluster.host is None else cluster.host.update_bytes_per_s
