"""How long everything of a plan lasts in a dry run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import ceil

from pipeplan.errors import InternalError
from pipeplan.plan import OpKind, Plan, outermost
from pipeplan.runtime.parameters.host_update import runs_beside


@dataclass(frozen=True, slots=True)
class PlannedTimes:
    """How long everything lasts in a dry run, in ns."""

    ops: Mapping[tuple[OpKind, int], int]
    """By kind and stage, transfers included."""
    updates: tuple[int, ...]
    """By stage, for how long the optimizer's step holds its rank."""
    behind: tuple[int, ...]
    """By stage, for how long it goes on behind that, on the host (U7)."""
    microbatches: int
    """Between two of them."""

    @classmethod
    def of(
        cls, plan: Plan, *, scale: Fraction = Fraction(1), updates: bool = True
    ) -> PlannedTimes:
        """What the plan says, times `scale`; without `updates` an OPT takes no time."""
        lasting = {(op.kind, op.stage): ceil(op.duration_ns * scale) for op in plan.ops}
        steps = [
            _update_ns(plan, index) if updates else (0, 0) for index in range(len(plan.stages))
        ]
        held, behind = (
            tuple(ceil(each * scale) for each in part) for part in zip(*steps, strict=True)
        )
        return cls(lasting, held, behind, plan.microbatches)


def _update_ns(plan: Plan, index: int) -> tuple[int, int]:
    """For how long one stage's update holds its rank, and goes on behind that.

    A run that is computed again is one layer.
    """
    stage = plan.stages[index]
    if stage.states == "host":
        return _host_update_ns(plan, index)
    speed = Fraction(str(plan.cluster.gpus[stage.gpu].speed))
    ends = dict(outermost(stage.remat.recompute)) if stage.remat else {}
    total, first = 0, stage.first
    while first <= stage.last:
        last = ends.get(first, first)
        layers = plan.chain.layers[first : last + 1]
        total += ceil(sum(layer.optimizer_ns for layer in layers) / speed)
        first = last + 1
    return total, 0


def _host_update_ns(plan: Plan, index: int) -> tuple[int, int]:
    """(U5): to the host, there, and back; (U7): the rank may go on behind the first."""
    stage, host = plan.stages[index], plan.cluster.host
    if host is None or host.update_bytes_per_s is None:
        raise InternalError(f"plan: stage {index} has no host to update. Verify the plan first.")
    layers = plan.chain.layers[stage.first : stage.last + 1]
    weights = sum(layer.weight_bytes for layer in layers)
    gradients = sum(layer.gradient_bytes for layer in layers)
    way, speed = host.bandwidth_bytes_per_s, host.update_bytes_per_s
    legs = ((gradients, way), (weights, speed), (weights, way))
    out, there, back = (ceil(Fraction(size * 10**9, rate)) for size, rate in legs)
    return (out, there + back) if runs_beside(plan, stage) else (out + there + back, 0)
