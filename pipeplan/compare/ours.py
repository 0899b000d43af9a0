"""Our own rows: every plan that the planner found competes wherever it fits.

Plans are searched per memory, but what was found for one memory may fit another one, and a
contiguous plan is a plan. Plans of others are never looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from pipeplan.chain import Chain
from pipeplan.cluster import Cluster
from pipeplan.compare import again
from pipeplan.compare.rows import Absent, Row, row_of
from pipeplan.errors import InfeasibleError, TimeLimitError
from pipeplan.jobs import whole_only
from pipeplan.plan import Plan, Solver
from pipeplan.planner import Config, solve
from pipeplan.report.tables import plan_bound

OURS = "pipeplan"
CONTIGUOUS = "pipeplan, contiguous"
ELSEWHERE = "found for other memory"


@dataclass(frozen=True, slots=True)
class Found:
    """What the planner found for one cluster."""

    cluster: Cluster
    free: Row | Absent
    contiguous: Row | Absent
    keeping: Row | Absent | None = None
    """With recomputation: the plan that computes nothing again."""
    less: tuple[Row | Absent, ...] = ()
    """With recomputation: what others do about it."""
    away: Row | Absent | None = None
    """With offloading: the plan that may send to the host what it keeps; all others do not."""

    @property
    def plans(self) -> list[Row]:
        """The rows that have a plan."""
        mine = (self.free, self.contiguous, self.keeping)
        return [row for row in mine if isinstance(row, Row)]

    @property
    def bound_ns(self) -> Fraction | None:
        """Proven for every plan on this cluster, per micro-batch."""
        mine = (self.free, self.contiguous) if self.away is None else (self.away,)
        proven = [_solver(row).bounds.any for row in mine if isinstance(row, Row)]
        return max((Fraction(*bound) for bound in proven if bound is not None), default=None)


def find_ours(chain: Chain, cluster: Cluster, config: Config) -> Found:
    """Our best plan, and our best contiguous one, which is found in a quarter of the time.

    With recomputation also what it is worth: plans that do none, all, or decide after the cuts;
    with offloading one more plan that may use it. A search that may do more starts from the plan
    of the one that may do less, so that it is never longer.
    """
    if config.offload == "auto":
        found = find_ours(chain, cluster, replace(config, offload="off"))
        away = _row(again.AWAY, chain, cluster, _from(found.free, config))
        return replace(found, away=away)
    quarter = replace(config, method="contiguous", time_limit_s=config.time_limit_s / 4)
    if config.recompute == "off":
        free = _row(OURS, chain, cluster, config)
        return Found(cluster, free, _row(CONTIGUOUS, chain, cluster, quarter))
    keeping = _row(again.NONE, chain, cluster, replace(config, recompute="off"))
    return Found(
        cluster,
        _row(OURS, chain, cluster, _from(keeping, config)),
        _row(CONTIGUOUS, chain, cluster, quarter),
        keeping=keeping,
        less=again.others(chain, cluster, config),
    )


def _from(row: Row | Absent, config: Config) -> Config:
    """A search that starts from the plan of a row, if it has one."""
    return replace(config, resume=row.plan) if isinstance(row, Row) else config


def _row(name: str, chain: Chain, cluster: Cluster, config: Config) -> Row | Absent:
    try:
        plan = solve(chain, cluster, config, whole_only)
    except (InfeasibleError, TimeLimitError) as error:
        return Absent(name, str(error))
    return row_of(name, plan, f"{len(plan.stages)} stages, k = {plan.k}")


def our_rows(here: Found, everywhere: Sequence[Found]) -> tuple[Row | Absent, ...]:
    """Our rows on the cluster of `here`, the first two best of what was found on `everywhere`.

    Those that say what recomputation is worth follow as they were found; one with offloading,
    which need not use it, is the last.

    Args:
        here: what was found for this cluster.
        everywhere: what was found for clusters that differ from it in memory only.
    """
    moved = [row.on(here.cluster) for found in everywhere for row in found.plans]
    fitting = [row for row in moved if row.fits]
    contiguous = [row for row in fitting if _is_contiguous(row.plan)]
    keeping = () if here.keeping is None else (here.keeping,)
    free = _fastest(here.free, fitting, OURS)
    away = [] if here.away is None else [_with_host(here.away, here, everywhere, fitting)]
    return free, _fastest(here.contiguous, contiguous, CONTIGUOUS), *keeping, *here.less, *away


def _with_host(
    mine: Row | Absent, here: Found, everywhere: Sequence[Found], fitting: Sequence[Row]
) -> Row | Absent:
    """The fastest of all plans that fit, with or without offloading."""
    known = [found.away.on(here.cluster) for found in everywhere if isinstance(found.away, Row)]
    return _fastest(mine, [*fitting, *(row for row in known if row.fits)], again.AWAY)


def largest_bound(here: Found, everywhere: Sequence[Found]) -> Fraction | None:
    """The largest bound that holds on the cluster of `here`: more memory allows more plans."""
    proven = [found.bound_ns for found in everywhere if _has_no_less(found.cluster, here.cluster)]
    return max((value for value in proven if value is not None), default=None)


def _has_no_less(one: Cluster, other: Cluster) -> bool:
    pairs = zip(one.gpus, other.gpus, strict=True)
    return all(more.budget_bytes >= less.budget_bytes for more, less in pairs)


def _is_contiguous(plan: Plan) -> bool:
    used = [stage.gpu for stage in plan.stages]
    return len(used) == len(set(used))


def _fastest(mine: Row | Absent, fitting: Sequence[Row], name: str) -> Row | Absent:
    """The row found here unless another one is faster."""
    fastest = min(fitting, key=lambda row: row.period_ns, default=None)
    if fastest is None or (isinstance(mine, Row) and mine.period_ns <= fastest.period_ns):
        return mine
    return _adopted(fastest, mine, name)


def _adopted(row: Row, mine: Row | Absent, name: str) -> Row:
    """`row` with what is proven on this cluster, of which the search elsewhere knows nothing."""
    solver = _solver(mine) if isinstance(mine, Row) else Solver()
    bound = plan_bound(mine.plan) if isinstance(mine, Row) else None
    gap = float(row.plan.period_per_microbatch / bound - 1) if bound else None
    found = solver.model_copy(
        update={
            "gap": gap,
            "status": "optimal" if gap == 0 else "feasible",
            "notes": (*solver.notes, ELSEWHERE),
        }
    )
    plan = row.plan.model_copy(update={"solver": found})
    return replace(row, name=name, detail=f"{row.detail}, {ELSEWHERE}", plan=plan)


def _solver(row: Row) -> Solver:
    return row.plan.solver
