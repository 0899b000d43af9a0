"""What if: one chain planned for several numbers of GPUs and memories, each helping the next.

A plan for fewer GPUs or less memory is a plan for more, so it competes there: more is never
slower. A bound for more holds for less, for the same reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

from pipeplan import verifier
from pipeplan.chain import Chain
from pipeplan.cluster import Cluster, differ_in_memory_alone
from pipeplan.errors import InfeasibleError, InputError, TimeLimitError
from pipeplan.plan import Bounds, Plan, Rational
from pipeplan.planner import Config, Progress, default_microbatches, in_turn, solve
from pipeplan.planner.pins import resolve


@dataclass(frozen=True, slots=True)
class Point:
    """One cluster and its plan, or why there is none, which may be proven or not."""

    cluster: Cluster
    plan: Plan | None
    reason: str = ""
    infeasible: bool = False

    @property
    def gpus(self) -> int:
        """How many there are."""
        return len(self.cluster.gpus)

    @property
    def memory_bytes(self) -> int:
        """Of the smallest GPU."""
        return min(gpu.memory_bytes for gpu in self.cluster.gpus)


def sweep(
    chain: Chain, clusters: Iterable[Cluster], config: Config, progress: Progress | None = None
) -> tuple[Point, ...]:
    """Plan for each cluster, fewest GPUs and least memory first.

    Under flush every point has the same micro-batches per step, so that steps can be compared.

    Args:
        chain: What is trained.
        clusters: They may differ in the number of GPUs and their memory only: the GPUs of a
            smaller one are the first ones of a larger one.
        config: For each point; the time limit is one point's.
        progress: As for `solve`; phases begin with the point.

    Returns:
        A point for each cluster; those without a GPU that a pin names have no plan. Ctrl-C ends
        the sweep with the points that have one.

    Raises:
        InputError: if clusters differ in more, or a pin names what even the largest cluster or
            the chain does not have.
    """
    ordered = sorted(clusters, key=_size)
    _check_alike(ordered)
    for largest in ordered[-1:]:
        resolve(config.pins, chain, largest)
    if config.semantics == "flush" and config.microbatches is None:
        most = max(len(cluster.gpus) for cluster in ordered)
        config = replace(config, microbatches=default_microbatches("flush", most))
    points: list[Point] = []
    named = (
        (f"{number} of {len(ordered)}, {len(cluster.gpus)} GPUs: ", cluster)
        for number, cluster in enumerate(ordered, start=1)
    )

    def planned(cluster: Cluster, heard: Progress) -> Point:
        return _point(chain, cluster, config, points, heard)

    for point in in_turn(named, planned, progress):
        points.append(point)  # where the next one sees it
    return tuple(_with_bounds(point, points, config) for point in points)


def _check_alike(ordered: list[Cluster]) -> None:
    """Refuse clusters of which one's plans and bounds say nothing of another.

    Raises:
        InputError: if there are two.
    """
    for cluster in ordered:
        if not differ_in_memory_alone(cluster, ordered[-1]):
            raise InputError(
                f"sweep: got clusters of {len(cluster.gpus)} and {len(ordered[-1].gpus)} GPUs that"
                " differ in speeds, names, links, overhead or host, need those of the smaller to"
                " be the first of the larger, but for memory. Sweep each kind of machine alone."
            )


def _size(cluster: Cluster) -> tuple[int, list[int]]:
    return len(cluster.gpus), [gpu.budget_bytes for gpu in cluster.gpus]


def _point(
    chain: Chain, cluster: Cluster, config: Config, before: list[Point], listener: Progress
) -> Point:
    """The plan for one cluster, starting from the best of the smaller ones and those given."""
    known = [point.plan for point in before if _within(point.cluster, cluster) and point.plan]
    starts = [
        given
        for given in config.starts
        if max(stage.gpu for stage in given.stages) < len(cluster.gpus)
    ]
    if known:
        starts.append(min(known, key=lambda plan: _cost(plan, config)))
    try:
        resolve(config.pins, chain, cluster)
    except InputError as error:
        # The largest cluster has the GPU.
        return Point(cluster, None, str(error), infeasible=True)
    try:
        return Point(
            cluster, solve(chain, cluster, replace(config, resume=tuple(starts)), listener)
        )
    except (InfeasibleError, TimeLimitError) as error:
        return Point(cluster, None, str(error), isinstance(error, InfeasibleError))


def _within(small: Cluster, large: Cluster) -> bool:
    """Whether every plan for `small` is one for `large`."""
    pairs = zip(small.gpus, large.gpus, strict=False)
    fits = all(one.budget_bytes <= other.budget_bytes for one, other in pairs)
    return len(small.gpus) <= len(large.gpus) and fits


def _cost(plan: Plan, config: Config) -> Fraction:
    """What the solver minimizes: updates count where their states may be on the host."""
    if plan.semantics == "flush" or config.offload == "states":
        return Fraction(plan.step_ns, plan.microbatches)
    return plan.period_per_microbatch


def _with_bounds(point: Point, points: list[Point], config: Config) -> Point:
    """The point with every bound that was proven for it or for a larger cluster."""
    if point.plan is None:
        return point
    bounds = Bounds(**dict(_largest(point, points)))
    valid = ["any"]
    if config.k == 1 or config.method == "paper-ilp":
        valid.append("k1")
    if config.method == "contiguous":
        valid.append("contiguous")
    name = max(valid, key=lambda each: _value(getattr(bounds, each)))
    bound, period = _value(getattr(bounds, name)), point.plan.period_per_microbatch
    solver = point.plan.solver.model_copy(
        update={
            "bounds": bounds,
            "gap_bound": name,
            "gap": float((period - bound) / bound) if bound else None,
            "status": "optimal" if bound == period else "feasible",
        }
    )
    plan = point.plan.model_copy(update={"solver": solver})
    verifier.check(plan)
    return replace(point, plan=plan)


def _largest(point: Point, points: list[Point]) -> Iterator[tuple[str, Rational | None]]:
    plans = [other.plan for other in points if _within(point.cluster, other.cluster)]
    for name in ("any", "k1", "contiguous"):
        values = [getattr(plan.solver.bounds, name) for plan in plans if plan is not None]
        yield name, max(values, key=_value, default=None)


def _value(bound: Rational | None) -> Fraction:
    return Fraction(*bound) if bound else Fraction(0)
