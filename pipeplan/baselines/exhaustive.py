"""The fair PipeDream baseline: many memory targets and many NOAM, judged by exact bytes.

PipeDream's own answer for a memory limit is rarely feasible, and rarely its best: its memory rule
is too simple. So all its answers are collected: for every number of stages, with communication in
the objective or not, for every memory target, each executed eagerly with every NOAM. What each
needs and how fast it runs is then a point (bytes, period); the best point that fits is the
baseline.

Source: Beaumont, Eyraud-Dubois, Shilova (2020), section 7. Ours: targets are not sampled, each
next one is where PipeDream's answer changes, in steps of 4 % at least.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, inf

from pipeplan.baselines.eager import Policy, cycle_of, eager_plan
from pipeplan.baselines.pipedream import PartitionTables, problem
from pipeplan.baselines.splits import keeps_ties, to_stages
from pipeplan.baselines.timed import Setting, busiest, in_order, timed
from pipeplan.plan import OpKind, Plan
from pipeplan.self_timed import MICROBATCHES, Order, staircase
from pipeplan.simulator import costs
from pipeplan.simulator.tape import Ops, number

STEP = 0.96
"""The next memory target: below the last answer's own count by this factor at least."""
GLANCE = 100
"""Micro-batches after which what shows no cycle is put off; see `PartitionCloud.finish`."""

_ORDERS: tuple[Order, ...] = ("alternate", "backward")


@dataclass(frozen=True, slots=True)
class PartitionPoint:
    """One eager execution of one partition, by what it takes; `plan` makes it a plan again."""

    peak_bytes: tuple[int, ...]
    """Per GPU."""
    period_ns: Fraction
    """Per micro-batch."""
    k: int
    ends: tuple[int, ...]
    policy: Policy

    @property
    def peak(self) -> int:
        """The largest peak of a GPU."""
        return max(self.peak_bytes)

    def fits(self, budgets: tuple[int, ...]) -> bool:
        """Whether every GPU has the bytes it needs."""
        return all(peak <= budget for peak, budget in zip(self.peak_bytes, budgets, strict=True))

    def plan(self, setting: Setting, method: str) -> Plan:
        """The point as a plan for the cluster of `setting`."""
        outline = setting.outline(to_stages(self.ends), "2bw", method)
        plan = eager_plan(outline, self.policy)
        assert plan is not None, "a point comes from a cycle"
        return plan


def partitions(setting: Setting) -> list[tuple[int, ...]]:
    """Every different answer of PipeDream's partitioner that can be trained, as ends of stages.

    Answers to large targets come first, then those to smaller and smaller ones.
    """
    found: dict[tuple[int, ...], tuple[int, int]] = {}
    most = min(setting.gpus, len(setting.chain.layers))
    for stages in range(most, 0, -1):
        for communication in (True, False):
            asked = problem(setting.chain, setting.cluster, stages, communication=communication)
            for depth in sorted({max(2, stages // 2), stages, 2 * stages}):
                for least_traffic in (False, True):
                    for turn, ends in enumerate(_answers(asked, depth, least_traffic)):
                        found[ends] = min((turn, -stages), found.get(ends, (turn, -stages)))
    trainable = (ends for ends in found if keeps_ties(setting.chain, to_stages(ends)))
    return sorted(trainable, key=lambda ends: (found[ends], ends))


def _answers(asked: PartitionTables, depth: int, least_traffic: bool) -> Iterator[tuple[int, ...]]:
    """From no memory limit down to where no partition is left."""
    target: int | None = None
    while True:
        answer = asked.solve(target, in_flight=depth, least_traffic=least_traffic)
        if answer is None:
            return
        yield answer.ends
        if not answer.memory_bytes:
            return
        target = min(answer.memory_bytes - 1, int(answer.memory_bytes * STEP))


@dataclass(frozen=True, slots=True)
class _Pipeline:
    """One partition as stages on GPUs, with what a micro-batch costs each at least."""

    ends: tuple[int, ...]
    outline: Plan
    ops: Ops
    shortest: int
    """Ns per micro-batch of the busiest GPU or link."""
    states: tuple[int, ...]
    kept: tuple[int, ...]
    """Bytes per micro-batch in flight."""
    passage: tuple[int, ...]
    """Ns from the start of F to the end of B where nothing waits."""

    @classmethod
    def of(cls, setting: Setting, ends: tuple[int, ...]) -> _Pipeline:
        outline = setting.outline(to_stages(ends), "2bw", "")
        ops, stages = Ops.of(outline), range(len(ends))
        count = costs.paper_bytes if setting.memory_model == "paper" else costs.live_stage_bytes
        return cls(
            ends,
            outline,
            ops,
            busiest(outline, ops),
            tuple(costs.states_bytes(outline, stage) for stage in stages),
            tuple(count(outline, stage).kept for stage in stages),
            tuple(_passage(ops, stage) for stage in stages),
        )

    def at_least(self, counts: Sequence[int]) -> list[int]:
        """Bytes per GPU of `counts` micro-batches in flight, without looking at when."""
        # The paper does not count the micro-batch whose forward runs.
        uncounted = self.outline.memory_model == "paper"
        return [
            states + (count - uncounted) * kept
            for states, count, kept in zip(self.states, counts, self.kept, strict=True)
        ]

    def frontier(self, shortest: Fraction) -> Iterator[tuple[Fraction, list[int]]]:
        """(period from `shortest` on, bytes per GPU): nothing is below or left of these points.

        A micro-batch is in stage s for at least its passage, so that on average
        passage / period of them are; at some instant that many, rounded up.
        """
        turns = {Fraction(span, n) for span in self.passage for n in range(1, 3 * len(self.ends))}
        for period in sorted({shortest, *(turn for turn in turns if turn > shortest)}):
            # Where nothing takes time, the period is zero, and so is every passage.
            yield period, self.at_least([span and ceil(span / period) for span in self.passage])


class PartitionCloud:
    """The points of all partitions on one cluster.

    What needs more than the cluster has, or is surely no better in bytes and time than a point
    found before, is not judged and gives no point.
    """

    def __init__(self, setting: Setting, than: Fraction | None = None) -> None:
        """`than`, ns per micro-batch: only faster points count, so that far fewer are judged."""
        self.points: list[PartitionPoint] = []
        self._put_off: list[tuple[_Pipeline, Policy]] = []
        self._front: list[tuple[Fraction, float]] = []
        """(period, bytes over) of the points that no other one beats."""
        if than is not None:
            self._front.append((than, -inf))
        self._setting = setting
        self._budgets = tuple(gpu.budget_bytes for gpu in setting.cluster.gpus)

    def best(self, budgets: tuple[int, ...]) -> PartitionPoint | None:
        """The fastest point that fits; among equally fast ones the one of the smallest peak."""
        fitting = [point for point in self.points if point.fits(budgets)]
        return min(fitting, key=lambda point: (point.period_ns, point.peak), default=None)

    def explore(self, ends: tuple[int, ...]) -> None:
        """Adds the points of one partition: NOAM from one up to where more changes nothing."""
        pipeline = _Pipeline.of(self._setting, ends)
        stages = len(ends)
        seen: set[tuple[int, ...]] = set()
        for noam in range(1, 3 * stages + 1):
            if self._is_hopeless(pipeline, noam):
                continue
            both = [caps for caps in ((noam,) * stages, staircase(stages, noam))]
            new = [caps for caps in dict.fromkeys(both) if caps not in seen]
            seen.update(new)
            policies = [Policy(caps, order) for caps in new for order in _ORDERS]
            if new and not any([self._execute(pipeline, each, GLANCE) for each in policies]):
                return

    def finish(self) -> None:
        """Executes to the end what showed no cycle at a glance, for the partitions that matter."""
        matter = {point.ends for point in self.points if self._is_best(point)}
        put_off, self._put_off = self._put_off, []
        for pipeline, policy in put_off:
            if pipeline.ends in matter:
                self._execute(pipeline, policy, MICROBATCHES)

    def _execute(self, pipeline: _Pipeline, policy: Policy, microbatches: int) -> bool:
        """Adds the point of one execution; whether it fits and more micro-batches may help it."""
        cycle = cycle_of(pipeline.outline, pipeline.ops, policy, microbatches)
        if cycle is None:
            self._put_off.append((pipeline, policy))
            return False
        period = Fraction(cycle.period, cycle.k)
        needed = pipeline.at_least(cycle.in_flight(pipeline.ops))
        if _over(needed, self._budgets) > 0:
            return False
        if not self._is_beaten(period, _over(needed, self._budgets)):
            plan = timed(pipeline.outline, pipeline.ops, cycle.times, cycle.k, cycle.period)
            peaks = tuple(row.peak_bytes for row in plan.memory)
            if _over(peaks, self._budgets) > 0:
                return False
            self._add(PartitionPoint(peaks, period, cycle.k, pipeline.ends, policy))
        return period > pipeline.shortest

    def _is_best(self, point: PartitionPoint) -> bool:
        return (point.period_ns, _over(point.peak_bytes, self._budgets)) in self._front

    def _is_hopeless(self, pipeline: _Pipeline, noam: int) -> bool:
        """Whether points found before beat every execution with `noam` micro-batches."""
        shortest = max(Fraction(pipeline.shortest), Fraction(pipeline.passage[0], noam))
        return all(
            (over := _over(needed, self._budgets)) > 0 or self._is_beaten(period, over)
            for period, needed in pipeline.frontier(shortest)
        )

    def _is_beaten(self, period: Fraction, over: int) -> bool:
        return any(faster <= period and smaller <= over for faster, smaller in self._front)

    def _add(self, point: PartitionPoint) -> None:
        new = point.period_ns, _over(point.peak_bytes, self._budgets)
        self.points.append(point)
        self._front = [old for old in self._front if old[0] < new[0] or old[1] < new[1]] + [new]


def _over(needed: Sequence[int], budgets: Sequence[int]) -> int:
    """Bytes that the GPU nearest to its budget needs beyond it; GPUs without stages count not."""
    return max(need - budget for need, budget in zip(needed, budgets, strict=False))


def _passage(ops: Ops, stage: int) -> int:
    order = in_order(ops)
    first, last = order.index(number(OpKind.F, stage)), order.index(number(OpKind.B, stage))
    return sum(ops.duration[op] for op in order[first : last + 1])
