"""What recomputation is worth, in rows: none of it, all of it, and decided after the cuts.

The plan that decides both at once is our own row. Full recomputation has stages of equal times and
computes each again as a whole; two-phase takes the best cuts where memory is no limit and then the
options of these stages that give the shortest period.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from pipeplan.baselines.splits import keeps_ties, time_balanced, to_stages
from pipeplan.chain import Chain
from pipeplan.cluster import Cluster
from pipeplan.compare.rows import Absent, Row, row_of
from pipeplan.errors import InfeasibleError, InputError
from pipeplan.ilp import Problem
from pipeplan.jobs import whole_only
from pipeplan.plan import Plan
from pipeplan.planner import Config
from pipeplan.planner.config import problem
from pipeplan.planner.solve import judged

NONE = "pipeplan, no recomputation"
AWAY = "joint + offload"
FULL = "full recomputation"
TWO_PHASE = "cuts, then recomputation"
FITS_NOT = "does not fit at any period"

Found = Row | Absent


def others(chain: Chain, cluster: Cluster, config: Config) -> tuple[Found, Found]:
    """Full recomputation and two-phase, as 1F1B."""
    return _row(FULL, full, chain, cluster, config), _row(
        TWO_PHASE, two_phase, chain, cluster, config
    )


def full(chain: Chain, cluster: Cluster, config: Config) -> Plan | None:
    """Stages of equal times, each computed again as a whole; None if that does not fit.

    Raises:
        InputError: if the chain has too few layers, or a cut would part tied ones.
    """
    stages = to_stages(time_balanced(chain, [gpu.speed for gpu in cluster.gpus]))
    if chain.tied != "synchronize" and not keeps_ties(chain, stages):
        raise InputError(f"{FULL}: stages of equal times part tied layers")
    return _planned(
        replace(problem(chain, cluster, config), method="full-recompute", stages=stages), config
    )


def two_phase(chain: Chain, cluster: Cluster, config: Config) -> Plan | None:
    """The best cuts without a limit, then what is computed again; None if that does not fit."""
    return _planned(replace(problem(chain, cluster, config), method="two-phase"), config)


def _planned(asked: Problem, config: Config) -> Plan | None:
    """The solver's answer as a plan that every voice accepts; None if there is none."""
    try:
        return judged(asked, config, whole_only)
    except InfeasibleError:
        return None


def _row(
    name: str,
    make: Callable[[Chain, Cluster, Config], Plan | None],
    chain: Chain,
    cluster: Cluster,
    config: Config,
) -> Found:
    try:
        plan = make(chain, cluster, config)
    except InputError as error:
        return Absent(name, str(error))
    if plan is None:
        return Absent(name, FITS_NOT)
    return row_of(name, plan, f"{len(plan.stages)} stages, k = {plan.k}")
