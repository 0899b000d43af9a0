"""From stages and start times to a plan that can be judged.

Durations and places of the ops are the simulator's, bytes the verifier's; a baseline only says
what runs when.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from pipeplan import __version__, verifier
from pipeplan.chain import Chain
from pipeplan.cluster import Cluster
from pipeplan.plan import MemoryModel, Op, OpKind, Plan, Semantics, Solver, Stage
from pipeplan.simulator.tape import Ops, number


@dataclass(frozen=True)
class Setting:
    """What all baselines of a comparison share.

    microbatches: per optimizer step; 2bw plans raise it to what two weight versions need (R6).
    most_microbatches: what they may raise it to, of a comparison in which all train so many; a
        plan that needs more is still judged. None: any number.
    """

    chain: Chain
    cluster: Cluster
    memory_model: MemoryModel = "exact"
    microbatches: int = 8
    most_microbatches: int | None = None

    @cached_property
    def digest(self) -> str:
        """Of the chain; computed once."""
        return self.chain.digest()

    def on(self, cluster: Cluster) -> Setting:
        """The same on another cluster."""
        return replace(self, cluster=cluster)

    @property
    def gpus(self) -> int:
        """How many GPUs there are."""
        return len(self.cluster.gpus)

    def outline(self, stages: tuple[Stage, ...], semantics: Semantics, method: str) -> Plan:
        """A plan of these stages without any op yet."""
        return Plan(
            chain=self.chain,
            chain_digest=self.digest,
            task_digest=self.chain.task_digest,
            cluster=self.cluster,
            semantics=semantics,
            microbatches=self.microbatches,
            memory_model=self.memory_model,
            period_ns=1,
            step_ns=0,
            stages=stages,
            ops=(),
            memory=(),
            solver=Solver(version=__version__, method=method),
        )


Times = Mapping[int, Sequence[int]]
"""By op number: when the micro-batches 0..k-1 of a period start, in ns."""


def timed(outline: Plan, ops: Ops, times: Times, k: int, period: int) -> Plan:
    """`outline` with ops at `times`, repeated every `period` ns, and the bytes that follow.

    Args:
        outline: stages on GPUs, see `Setting.outline`.
        ops: its ops.
        times: absolute start times of k consecutive micro-batches.
        k: micro-batches per period.
        period: of k micro-batches, in ns.

    Returns:
        A plan that keeps every rule of docs/reference/model.md but perhaps `budget`, provided that
        `times` keep (R2)-(R5).
    """
    origin = min(min(starts) for starts in times.values()) // period
    plan = outline.model_copy(
        update={
            "k": k,
            "period_ns": period,
            "ops": tuple(
                _op(ops, op, copy, times[op][copy], period, origin)
                for copy in range(k)
                for op in times
            ),
        }
    )
    audit = verifier.audit(plan)
    if plan.microbatches < audit.least_microbatches:
        plan = plan.model_copy(update={"microbatches": audit.least_microbatches})
        audit = verifier.audit(plan)
    return plan.model_copy(update={"memory": audit.memory, "step_ns": audit.step_ns})


def _op(ops: Ops, op: int, copy: int, time: int, period: int, origin: int) -> Op:
    place = ops.place[op]
    return Op(
        kind=ops.kind(op),
        stage=ops.stage(op),
        copy_=copy,
        gpu=None if isinstance(place, tuple) else place,
        link=place if isinstance(place, tuple) else None,
        start_ns=time % period,
        duration_ns=ops.duration[op],
        shift=time // period - origin,
    )


def in_order(ops: Ops) -> list[int]:
    """Numbers of the ops of a micro-batch, in chain order."""
    order = [number(OpKind.F, 0)]
    while (after := ops.after[order[-1]]) >= 0:
        order.append(after)
    return order


def resource(outline: Plan, ops: Ops, op: int) -> tuple[int, ...]:
    """What `op` excludes others on: (gpu,) or the link's pair."""
    place = ops.place[op]
    return outline.cluster.links.resource(*place) if isinstance(place, tuple) else (place,)


def busiest(outline: Plan, ops: Ops) -> int:
    """Ns that the busiest GPU or link works for one micro-batch: no period is shorter."""
    total: dict[tuple[int, ...], int] = defaultdict(int)
    for op in in_order(ops):
        total[resource(outline, ops, op)] += ops.duration[op]
    return max(total.values())
