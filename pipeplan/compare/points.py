"""The comparison: every (GPUs, memory) with our plan and everyone else's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from pipeplan.baselines.timed import Setting
from pipeplan.chain import Chain
from pipeplan.cluster import Cluster
from pipeplan.compare.field import Field, Tell
from pipeplan.compare.rows import Absent, Row, check, row_of
from pipeplan.errors import InfeasibleError, InputError, TimeLimitError
from pipeplan.plan import Solver
from pipeplan.planner import Config, solve

OURS = "pipeplan"
CONTIGUOUS = "pipeplan, contiguous"
_FOR_LESS = "found for less memory"


@dataclass(frozen=True, slots=True)
class Request:
    """What is compared.

    Attributes:
        chain: what is trained.
        clusters: the points; those with the same number of GPUs may differ in memory only.
        config: of the planner, for every point; the contiguous plan has a quarter of its time.
        search_s: for PipeDream's exhaustive search, per number of GPUs.
    """

    chain: Chain
    clusters: tuple[Cluster, ...]
    config: Config
    search_s: float = 120.0


@dataclass(frozen=True, slots=True)
class Point:
    """One cluster and all rows on it."""

    cluster: Cluster
    bound_ns: Fraction | None
    """Proven for every plan, per micro-batch."""
    rows: tuple[Row | Absent, ...]

    def row(self, name: str) -> Row | None:
        """The row called `name`, if there is one."""
        found = (row for row in self.rows if isinstance(row, Row) and row.name == name)
        return next(found, None)

    @property
    def lost(self) -> Row | None:
        """The fastest row of our semantics that fits and beats our plan; None if none does."""
        ours = self.row(OURS)
        rivals = [
            row
            for row in self.rows
            if isinstance(row, Row) and row.fits and row.name not in (OURS, CONTIGUOUS)
        ]
        if ours is not None:
            rivals = [
                row
                for row in rivals
                if row.semantics == ours.semantics and row.period_ns < ours.period_ns
            ]
        return min(rivals, key=lambda row: row.period_ns, default=None)


@dataclass(frozen=True, slots=True)
class Cloud:
    """All points of the exhaustive search for one number of GPUs: (bytes, ns per micro-batch)."""

    gpus: int
    points: tuple[tuple[int, float], ...]
    left_out: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """Everything that was compared."""

    chain: Chain
    microbatches: int
    """Per update, for throughputs and steps with a flush; of the largest number of GPUs."""
    points: tuple[Point, ...]
    clouds: tuple[Cloud, ...]


def compare(request: Request, tell: Tell = lambda share, what: None) -> Comparison:
    """Plans and executes everything, point by point.

    Args:
        request: what is compared.
        tell: hears about progress.

    Raises:
        InputError: if clusters of the same size differ in more than memory.
        InternalError: if a voice refuses a plan.
    """
    groups = _groups(request.clusters)
    points: list[Point] = []
    clouds: list[Cloud] = []
    for index, group in enumerate(groups):

        def inner(
            share: float, what: str, index: int = index, gpus: int = len(group[0].gpus)
        ) -> None:
            tell((index + share) / len(groups), f"{gpus} GPUs: {what}")

        field, found = _compare_group(request, group, inner)
        points += found
        clouds.append(
            Cloud(
                len(group[0].gpus),
                tuple((point.peak, float(point.period_ns)) for point in field.cloud.points),
                field.left_out,
            )
        )
    tell(1.0, "done")
    most = max(len(cluster.gpus) for cluster in request.clusters)
    return Comparison(
        request.chain, microbatches(request.config, most), tuple(points), tuple(clouds)
    )


def microbatches(config: Config, gpus: int) -> int:
    """Per update: as asked for, else four per GPU and at least 8."""
    return config.microbatches or max(8, 4 * gpus)


def _groups(clusters: Sequence[Cluster]) -> list[list[Cluster]]:
    """Clusters by number of GPUs, least memory first."""
    groups: dict[int, list[Cluster]] = {}
    for cluster in clusters:
        group = groups.setdefault(len(cluster.gpus), [cluster])
        if _bare(cluster) != _bare(group[0]):
            raise InputError(
                f"compare: got two clusters of {len(cluster.gpus)} GPUs that differ in more than"
                " memory, need equal ones"
            )
        if cluster not in group:
            group.append(cluster)
    return [sorted(group, key=_least_memory) for group in groups.values()]


def _bare(cluster: Cluster) -> Cluster:
    gpus = tuple(gpu.model_copy(update={"memory_bytes": 0}) for gpu in cluster.gpus)
    return cluster.model_copy(update={"gpus": gpus})


def _least_memory(cluster: Cluster) -> int:
    return min(gpu.memory_bytes for gpu in cluster.gpus)


def _compare_group(
    request: Request, group: list[Cluster], tell: Tell
) -> tuple[Field, list[Point]]:
    """Half of the progress is the baselines, half our plans."""
    count = microbatches(request.config, len(group[0].gpus))
    setting = Setting(request.chain, group[-1], request.config.memory_model, count)
    field = Field(setting, count)
    field.prepare(request.search_s, lambda share, what: tell(share / 2, what))
    points: list[Point] = []
    checked: set[tuple[str, str, Fraction]] = set()
    for index, cluster in enumerate(group):
        tell(0.5 + index / len(group) / 2, f"planning for memory {index + 1} of {len(group)}")
        bound, ours = _ours(request, cluster)
        if points:
            ours = [carried(mine, points[-1].row(mine.name), cluster) for mine in ours]
        rows = (*ours, *field.rows(cluster))
        for row in rows:
            # Memory changes the budget alone, so one check of a schedule holds for all.
            key = (row.name, row.detail, row.period_ns) if isinstance(row, Row) else None
            if isinstance(row, Row) and key not in checked:
                check(row)
                checked.add((row.name, row.detail, row.period_ns))
        points.append(Point(cluster, bound, rows))
    return field, points


def carried(mine: Row | Absent, less: Row | None, cluster: Cluster) -> Row | Absent:
    """Our row, or the one found for less memory if that is faster: it fits here too.

    What is proven is taken from the plan made for this cluster: less memory proves nothing here.
    """
    if less is None or (isinstance(mine, Row) and mine.period_ns <= less.period_ns):
        return mine
    row = less.on(cluster)
    assert row.plan is not None
    solver = mine.plan.solver if isinstance(mine, Row) and mine.plan is not None else Solver()
    value = getattr(solver.bounds, solver.gap_bound)
    period = row.plan.period_per_microbatch
    gap = None if value is None else float(period / Fraction(*value) - 1)
    notes = (*solver.notes, _FOR_LESS)
    found = solver.model_copy(
        update={"gap": gap, "status": "optimal" if gap == 0 else "feasible", "notes": notes}
    )
    detail = f"{row.detail.removesuffix(f', {_FOR_LESS}')}, {_FOR_LESS}"
    return replace(row, detail=detail, plan=row.plan.model_copy(update={"solver": found}))


def _ours(request: Request, cluster: Cluster) -> tuple[Fraction | None, list[Row | Absent]]:
    """Our plan and our contiguous one, and the bound for every plan."""
    rows: list[Row | Absent] = []
    bound = None
    # Most of what a contiguous plan can be is found at once.
    quarter = request.config.time_limit_s / 4
    contiguous = replace(request.config, method="contiguous", time_limit_s=quarter)
    for name, config in ((OURS, request.config), (CONTIGUOUS, contiguous)):
        try:
            plan = solve(request.chain, cluster, config)
        except (InfeasibleError, TimeLimitError) as error:
            rows.append(Absent(name, str(error)))
            continue
        if name == OURS and plan.solver.bounds.any is not None:
            bound = Fraction(*plan.solver.bounds.any)
        rows.append(row_of(name, plan, f"{len(plan.stages)} stages, k = {plan.k}"))
    return bound, rows
