"""The comparison: every (GPUs, memory) with our plan and everyone else's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial

from pipeplan.baselines.timed import Setting
from pipeplan.chain import Chain
from pipeplan.cluster import Cluster, differ_in_memory_alone
from pipeplan.compare import ours
from pipeplan.compare.again import AWAY, NONE
from pipeplan.compare.field import Field, More, prepared
from pipeplan.compare.ours import CONTIGUOUS, OURS, Found
from pipeplan.compare.rows import Absent, Row, check
from pipeplan.errors import InputError
from pipeplan.jobs import Job, Tell, run_jobs
from pipeplan.planner import Config, default_microbatches
from pipeplan.units import format_bytes


@dataclass(frozen=True, slots=True)
class Request:
    """What is compared.

    Attributes:
        chain: what is trained.
        clusters: the points; those with the same number of GPUs may differ in memory only.
        config: of the planner, for every point; the contiguous plan has a quarter of its time.
        search_s: for PipeDream's exhaustive search, per number of GPUs.
        jobs: how many searches run at once, each in a process of its own; with more than one,
            a script that calls `compare` needs `if __name__ == "__main__"`.
        more: further schedules by the name of their row, such as
            `pipeplan.torch_schedules.TORCH_SCHEDULES`; with several jobs they are pickled.
    """

    chain: Chain
    clusters: tuple[Cluster, ...]
    config: Config
    search_s: float = 120.0
    jobs: int = 1
    more: More = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ComparisonPoint:
    """One cluster and all rows on it."""

    cluster: Cluster
    bound_ns: Fraction | None
    """Proven for every plan, per micro-batch."""
    rows: tuple[Row | Absent, ...]

    @property
    def memory_bytes(self) -> int:
        """Of the GPU that has least, its reserve included."""
        return min(gpu.memory_bytes for gpu in self.cluster.gpus)

    @property
    def budget_bytes(self) -> int:
        """What plans may use of the GPU that leaves them least."""
        return min(gpu.budget_bytes for gpu in self.cluster.gpus)

    def row(self, name: str) -> Row | None:
        """The row called `name`, if there is one."""
        found = (row for row in self.rows if isinstance(row, Row) and row.name == name)
        return next(found, None)

    @property
    def lost(self) -> Row | None:
        """The fastest row of our semantics that fits and beats our plan; None if none does."""
        if all(row.name != OURS for row in self.rows):
            return None  # what was not searched lost nothing
        ours = self.row(OURS)
        rivals = [
            row
            for row in self.rows
            if isinstance(row, Row) and row.fits and row.name not in (OURS, CONTIGUOUS, NONE, AWAY)
        ]
        if ours is not None:
            rivals = [
                row
                for row in rivals
                if row.semantics == ours.semantics and row.period_ns < ours.period_ns
            ]
        return min(rivals, key=lambda row: row.period_ns, default=None)


@dataclass(frozen=True, slots=True)
class PointCloud:
    """All points of the exhaustive search for one number of GPUs: (bytes, ns per micro-batch)."""

    gpus: int
    points: tuple[tuple[int, float], ...]
    left_out: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """Everything that was compared."""

    chain: Chain
    microbatches: int
    """Per update, for throughputs and steps with a flush: at every point those of the largest
    number of GPUs, as one training has them."""
    points: tuple[ComparisonPoint, ...]
    clouds: tuple[PointCloud, ...]
    left_out: tuple[str, ...] = ()
    """What Ctrl-C left undone: rows and points that would be there."""


def compare(request: Request, tell: Tell = lambda share, what: None) -> Comparison:
    """Plans and executes everything, then puts it side by side; Ctrl-C keeps what is done.

    Args:
        request: what is compared.
        tell: hears about progress.

    Raises:
        InputError: if clusters of the same size differ in more than memory.
        InternalError: if a voice refuses a plan.
        PipeplanError: if a process was killed.
        KeyboardInterrupt: if Ctrl-C came before anything was done.
    """
    groups = _groups(request.clusters)
    count = microbatches(request.config, max(len(cluster.gpus) for cluster in request.clusters))
    if request.config.semantics == "flush":
        request = replace(request, config=replace(request.config, microbatches=count))
    jobs = [_others(request, group, count) for group in groups]
    jobs += [_ours(request, cluster) for group in groups for cluster in group]
    results = run_jobs(jobs, request.jobs, lambda share, what: tell(0.95 * share, what))
    left_out = [job.what for job, result in zip(jobs, results, strict=True) if result is None]
    fields = {each.gpus: each for each in results if isinstance(each, Field)}
    points: list[ComparisonPoint] = []
    try:
        for group in groups:
            gpus = len(group[0].gpus)
            tell(0.95, f"{gpus} GPUs: every voice on every plan")
            found = [each for each in results if isinstance(each, Found) and each.cluster in group]
            for point in _points(group, fields.get(gpus), found):
                points.append(point)
    except KeyboardInterrupt:
        if not points:
            raise
        left_out.append("points behind the last one shown")
    tell(1.0, "done")
    return Comparison(
        request.chain,
        count,
        tuple(points),
        tuple(_cloud(field) for field in fields.values()),
        tuple(left_out),
    )


def microbatches(config: Config, gpus: int) -> int:
    """Per update: as asked for, else those of a step with a flush, which most rows have."""
    return config.microbatches or default_microbatches("flush", gpus)


def _groups(clusters: Sequence[Cluster]) -> list[list[Cluster]]:
    """Clusters by number of GPUs, least memory first."""
    groups: dict[int, list[Cluster]] = {}
    for cluster in clusters:
        group = groups.setdefault(len(cluster.gpus), [cluster])
        if not differ_in_memory_alone(cluster, group[0]):
            raise InputError(
                f"compare: got two clusters of {len(cluster.gpus)} GPUs that differ in more than"
                " memory, need equal ones"
            )
        if cluster not in group:
            group.append(cluster)
    return [sorted(group, key=_least_memory) for group in groups.values()]


def _roomiest(group: Sequence[Cluster]) -> Cluster:
    """Each GPU with the most memory that it has in one of the clusters."""
    alike = zip(*(cluster.gpus for cluster in group), strict=True)
    gpus = tuple(max(same, key=lambda gpu: gpu.budget_bytes) for same in alike)
    return group[0].model_copy(update={"gpus": gpus})


def _least_memory(cluster: Cluster) -> int:
    return min(gpu.budget_bytes for gpu in cluster.gpus)


def _others(request: Request, group: list[Cluster], count: int) -> Job[Field | Found]:
    """Everyone else, with the most memory that any cluster of the group has."""
    gpus = len(group[0].gpus)
    config = request.config
    most = config.microbatches if config.semantics == "2bw" else None
    setting = Setting(request.chain, _roomiest(group), config.memory_model, count, most)
    return Job(
        f"{gpus} GPUs: everyone else",
        partial(prepared, setting, count, request.more, request.search_s),
    )


def _ours(request: Request, cluster: Cluster) -> Job[Field | Found]:
    what = f"{len(cluster.gpus)} GPUs of {format_bytes(_least_memory(cluster))}: pipeplan"
    return Job(what, partial(ours.find_ours, request.chain, cluster, request.config))


def _points(
    group: Sequence[Cluster], field: Field | None, found: Sequence[Found]
) -> Iterator[ComparisonPoint]:
    """The rows that are there of each cluster that has any, checked."""
    checked: set[tuple[str, str, Fraction]] = set()
    for cluster in group:
        here = next((each for each in found if each.cluster == cluster), None)
        own = () if here is None else ours.our_rows(here, found)
        others = () if field is None else tuple(field.rows(cluster))
        for row in (*own, *others):
            # Memory changes the budget alone, so one check of a schedule holds for all.
            key = (row.name, row.detail, row.period_ns) if isinstance(row, Row) else None
            if isinstance(row, Row) and key not in checked:
                check(row)
                checked.add((row.name, row.detail, row.period_ns))
        if own or others:
            bound = None if here is None else ours.largest_bound(here, found)
            yield ComparisonPoint(cluster, bound, (*own, *others))


def _cloud(field: Field) -> PointCloud:
    points = tuple((point.peak, float(point.period_ns)) for point in field.cloud.points)
    return PointCloud(field.gpus, points, field.left_out)
