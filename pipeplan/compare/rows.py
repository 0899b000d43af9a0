"""One row of a comparison: what a plan takes, what it idles for, and whether it fits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil

from pipeplan import lowering, simulator, verifier
from pipeplan.cluster import Cluster
from pipeplan.plan import Plan, Semantics


@dataclass(frozen=True, slots=True)
class Bubble:
    """Why GPUs idle, as shares of all GPUs' time; the rest is work.

    With T ns per micro-batch, w the mean work of a GPU, W the largest, R the work of the busiest
    GPU or link, and S what one more micro-batch adds in the middle of a step (T without a flush):
    imbalance W - w, communication R - W, waiting S - R (for room in memory, or for an order that
    was fixed before), fill and drain T - S; each divided by T.
    """

    imbalance: float
    communication: float
    waiting: float
    fill_drain: float

    @property
    def total(self) -> float:
        """The share of time that is no work."""
        return self.imbalance + self.communication + self.waiting + self.fill_drain


@dataclass(frozen=True, slots=True)
class Absent:
    """A baseline that gives nothing here, and why."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Row:
    """One judged schedule on one cluster."""

    name: str
    semantics: Semantics
    period_ns: Fraction
    """Per micro-batch; under flush the step without its update over its micro-batches."""
    bubble: Bubble
    update_ns: int
    """The slowest GPU's update."""
    peak_bytes: tuple[int, ...]
    """Per GPU."""
    budget_bytes: tuple[int, ...]
    plan: Plan
    detail: str = ""
    """What the baseline chose: stages, micro-batches in flight."""
    most_microbatches: int | None = None
    """Per step, where a number is asked for; None: as many as the schedule needs."""

    @property
    def over_bytes(self) -> int:
        """What the GPU nearest to its budget, or farthest over it, needs beyond it."""
        return max(
            peak - budget for peak, budget in zip(self.peak_bytes, self.budget_bytes, strict=True)
        )

    @property
    def fits(self) -> bool:
        """Whether every GPU has the bytes it needs, and a step the micro-batches."""
        return self.over_bytes <= 0 and self.needed_microbatches is None

    @property
    def needed_microbatches(self) -> int | None:
        """By (R6), for two versions of the weights; None if that is no more than there may be."""
        needed, most = self.plan.microbatches, self.most_microbatches
        return needed if most is not None and self.semantics == "2bw" and needed > most else None

    def samples_per_second(self, microbatch_size: int, microbatches: int) -> float:
        """With an update every `microbatches` micro-batches; a step takes a nanosecond or more."""
        step_ns = max(Fraction(1), self.period_ns * microbatches + self.update_ns)
        return float(microbatch_size * microbatches * 10**9 / step_ns)

    def on(self, cluster: Cluster) -> Row:
        """The same schedule on a cluster that differs in memory only."""
        budgets = tuple(gpu.budget_bytes for gpu in cluster.gpus)
        memory = tuple(
            row.model_copy(update={"budget_bytes": budget})
            for row, budget in zip(self.plan.memory, budgets, strict=True)
        )
        plan = self.plan.model_copy(update={"cluster": cluster, "memory": memory})
        return replace(self, budget_bytes=budgets, plan=plan)


def best(rows: Sequence[Row]) -> Row:
    """The fastest row that fits; if none does, the one that is over by least."""
    fitting = [row for row in rows if row.fits]
    if fitting:
        return min(fitting, key=lambda row: (row.period_ns, row.over_bytes))
    return min(rows, key=lambda row: (row.over_bytes, row.period_ns))


def non_dominated(rows: Sequence[Row]) -> list[Row]:
    """The rows that may be `best` on a cluster.

    No other one is as fast with as little memory and as few micro-batches per step.
    """
    kept: list[Row] = []
    for row in sorted(rows, key=lambda row: (row.period_ns, row.over_bytes)):
        if not any(
            each.plan.microbatches <= row.plan.microbatches
            and all(
                one <= other for one, other in zip(each.peak_bytes, row.peak_bytes, strict=True)
            )
            for each in kept
        ):
            kept.append(row)
    return kept


def row_of(name: str, plan: Plan, detail: str = "", added: Fraction | None = None) -> Row:
    """The row of a plan.

    Args:
        name: of the row.
        plan: with its memory table and step.
        detail: what was chosen.
        added: ns that one more micro-batch adds in the middle of a step; None: its period.
    """
    period = plan.period_per_microbatch
    if plan.semantics == "flush":
        update = _update_ns(plan)
        period = Fraction(plan.step_ns - update, plan.microbatches)
    else:
        update = plan.step_ns - ceil(plan.microbatches * period)
    return Row(
        name=name,
        semantics=plan.semantics,
        period_ns=period,
        bubble=_bubble(plan, period, plan.period_per_microbatch if added is None else added),
        update_ns=update,
        peak_bytes=tuple(row.peak_bytes for row in plan.memory),
        budget_bytes=tuple(row.budget_bytes for row in plan.memory),
        plan=plan,
        detail=detail,
    )


def _bubble(plan: Plan, period: Fraction, added: Fraction) -> Bubble:
    """The idle shares, by the durations of the plan's own ops: what is computed again is work."""
    works = [0] * len(plan.cluster.gpus)
    links: dict[tuple[int, int], int] = defaultdict(int)
    for op in plan.ops:
        if op.copy_ == 0 and op.link is not None:
            links[plan.cluster.links.resource(*op.link)] += op.duration_ns
        elif op.copy_ == 0 and op.gpu is not None and op.kind.is_compute:
            works[op.gpu] += op.duration_ns
    mean, largest = Fraction(sum(works), len(works)), max(works)
    busiest = max(*works, *links.values(), 0)
    # A transient in a short step may add less than the busiest needs; it belongs to the drain.
    steady = min(max(added, Fraction(busiest)), period)
    parts = (largest - mean, busiest - largest, steady - busiest, period - steady)
    # Of a step that takes no time all parts are zero.
    return Bubble(*(float(part / (period or 1)) for part in parts))


def _update_ns(plan: Plan) -> int:
    """Of a step under flush, behind its drain."""
    updates = [0] * len(plan.cluster.gpus)
    for stage, lasts in zip(plan.stages, simulator.updates_ns(plan), strict=True):
        updates[stage.gpu] += lasts
    return max(updates)


def check(row: Row) -> None:
    """Every voice must accept the row's plan once its GPUs have the memory that it needs.

    Raises:
        InvalidPlanError: if a rule is broken or the replay differs: a bug of the baseline or ours.
    """
    gpus = zip(row.plan.cluster.gpus, row.peak_bytes, strict=True)
    ample = row.plan.cluster.model_copy(
        update={"gpus": tuple(gpu.with_budget(peak) for gpu, peak in gpus)}
    )
    plan = row.on(ample).plan
    verifier.check(plan)
    simulator.check(plan, lowering.lower(plan))
