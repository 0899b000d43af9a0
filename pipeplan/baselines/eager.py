"""Eager 1F1B as a plan: `pipeplan.self_timed` with the durations of the simulator."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from pipeplan.baselines.timed import in_order, resource, timed
from pipeplan.errors import InputError
from pipeplan.plan import OpKind, Plan
from pipeplan.self_timed import MICROBATCHES, Order, Step, eager_cycle
from pipeplan.simulator.tape import Ops, number


@dataclass(frozen=True, slots=True)
class Policy:
    """How stages react: the most micro-batches in flight at each, and what comes first."""

    caps: tuple[int, ...]
    order: Order = "alternate"


@dataclass(frozen=True, slots=True)
class OpCycle:
    """What repeats: k micro-batches every `period` ns, their start times by op number."""

    k: int
    period: int
    times: dict[int, tuple[int, ...]]

    def in_flight(self, ops: Ops) -> list[int]:
        """Per stage, the most micro-batches at once between start of F and end of B."""
        return [
            self._in_flight(ops, number(OpKind.F, stage), number(OpKind.B, stage))
            for stage in range(len(ops.update))
        ]

    def _in_flight(self, ops: Ops, forward: int, backward: int) -> int:
        period = self.period
        starts = self.times[forward]
        ends = [time + ops.duration[backward] for time in self.times[backward]]
        level = sum(e // period - s // period for s, e in zip(starts, ends, strict=True))
        events = [(end % period, -1) for end in ends] + [(start % period, 1) for start in starts]
        changes = (change for _, change in sorted(events))
        return max(accumulate(changes, initial=level))


def cycle_of(
    outline: Plan, ops: Ops, policy: Policy, microbatches: int = MICROBATCHES
) -> OpCycle | None:
    """What eager execution of `outline` settles into; None if it shows no cycle.

    Args:
        outline: stages, one per GPU (`Setting.outline`).
        ops: those of `outline`.
        policy: how stages react.
        microbatches: how many to simulate.

    Raises:
        InputError: if a GPU has two stages.
    """
    used = [stage.gpu for stage in outline.stages]
    if len(used) != len(set(used)):
        raise InputError("eager 1F1B: got two stages on one GPU, need one stage per GPU")
    order = in_order(ops)
    steps = [
        Step(ops.kind(op), ops.stage(op), resource(outline, ops, op), ops.duration[op])
        for op in order
    ]
    found = eager_cycle(steps, policy.caps, policy.order, microbatches)
    if found is None:
        return None
    return OpCycle(found.k, found.period, dict(zip(order, found.times, strict=True)))


def eager_plan(outline: Plan, policy: Policy) -> Plan | None:
    """The cycle of `outline` under `policy` as a plan, if there is one."""
    ops = Ops.of(outline)
    cycle = cycle_of(outline, ops, policy)
    return None if cycle is None else timed(outline, ops, cycle.times, cycle.k, cycle.period)
