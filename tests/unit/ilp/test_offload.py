"""What waits in the host's memory: bytes, what a stage can send, how long it must wait for it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from random import Random

import numpy as np
import pytest

from pipeplan.cluster import Host, uniform
from pipeplan.ilp.bounds.load import load_bound
from pipeplan.ilp.contiguous.dynamic_program import ContiguousDP
from pipeplan.ilp.contiguous.partition_schedule import schedule_partition
from pipeplan.ilp.contiguous.recurrence import extend_one_span
from pipeplan.ilp.contiguous.stage_choice import INFINITE, span_with_offload, transfer_ns
from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.memory import fits, memory_rows
from pipeplan.ilp.memory_events import ExactMemoryEvents
from pipeplan.ilp.offload import byte_options as byte_options_module
from pipeplan.ilp.offload import byte_options_table
from pipeplan.ilp.offload.byte_options import (
    byte_options,
    offloadable_bytes,
    own_input_bytes,
    stage_options,
)
from pipeplan.ilp.offload.byte_options_table import segment_byte_options
from pipeplan.ilp.offload.copy_placement import CopyPlacement
from pipeplan.ilp.offload.repair import repair_by_offloading
from pipeplan.ilp.recompute.bound import recompute_bound
from pipeplan.ilp.recompute.contracted_chain import contract, contracted_plan
from pipeplan.ilp.recompute.dynamic_program import RecomputeDP
from pipeplan.ilp.recompute.options import list_options
from pipeplan.ilp.schedule import Schedule, duration, to_ops, unrolled
from pipeplan.ilp.warm_start import schedule_of
from pipeplan.plan import OpKind
from pipeplan.testing.plans import random_plan
from pipeplan.units import ceil_div
from tests import grids
from tests.unit.ilp.test_recompute import every_choice, some_chain

SLOW = Host(memory_bytes=10**6, bandwidth_bytes_per_s=2 * 10**9)
"""Half a nanosecond for a byte."""
WAY = (1, 2, False, False)
"""The way to it, of stages that stay whole."""


def costs_of(seed: int, layers: int, gpus: int, memory: int, host: Host = SLOW) -> CostModel:
    """Equal GPUs, slow links, no limit but the memory."""
    cluster = uniform(gpus, memory, bandwidth_bytes_per_s=10**9, host=host)
    return CostModel(some_chain(seed, layers), cluster, "2bw", "exact")


@pytest.mark.parametrize("seed", range(40))
def test_bytes_and_ops_are_those_of_valid_plans(seed: int) -> None:
    """The solver's own count of random plans that offload is theirs, and so are its ops."""
    plan = random_plan(seed, memory_model="exact", offload=True)
    known, mine = contracted_plan(plan)
    costs = known.of(CostModel(plan.chain, plan.cluster, plan.semantics, "exact"))
    schedule = schedule_of(mine)
    assert memory_rows(costs, schedule, claims=True) == plan.memory
    assert set(to_ops(costs, schedule)) == set(plan.ops)
    twice = unrolled(schedule, 2 * schedule.k)
    assert [row.peak_bytes for row in memory_rows(costs, twice)] == [
        row.peak_bytes for row in plan.memory
    ]


@pytest.mark.parametrize("seed", range(10))
def test_levels_are_all_that_runs_can_send(seed: int) -> None:
    """Up to 5 layers: exactly the bytes of every set of runs, each with runs that have them."""
    costs = replace(costs_of(seed, 5, 1, 100), recomputed=frozenset({seed % 7}))
    found = byte_options(costs, 0, 4)
    all_ = {
        sum(offloadable_bytes(costs.chain, run.segment) for run in runs)
        for runs in every_choice(0, 4, nested=False)
        if not any(seed % 7 in range(run.first, run.last + 1) for run in runs)
    }
    assert [size for size, _ in found] == sorted(all_ - {0})
    for size, runs in found:
        assert sum(offloadable_bytes(costs.chain, run) for run in runs) == size
        assert all(one[1] < other[0] for one, other in pairwise(runs))
    table = segment_byte_options(costs)[:, 0, 4]
    assert {*table} <= all_
    assert table[0] == 0
    assert table[-1] == max(all_)
    assert len({*table}) == min(len(all_), byte_options_table.MOST)


@dataclass(frozen=True)
class Lone:
    """A stage alone on its GPU, one micro-batch each period: times, V, and bytes."""

    period: int
    forward: int
    backward: int
    span: int
    kept: int
    peak: int

    def needs(self, away: int) -> int | None:
        """Bytes at once if `away` of each micro-batch wait on `SLOW`; None if that cannot be.

        They leave right after the forward and are back for the backward; every instant is seen.
        """
        moving = ceil_div(away, 2)
        gone = self.forward + moving
        back = self.held(self.span - self.backward - moving)
        if away and (gone > back or moving > self.period):
            return None
        begun = range(-self.span - self.period, self.period)
        return max(
            sum(
                self.at(instant - start, away, gone, back)
                for start in begun
                if start % self.period == 0
            )
            for instant in range(self.period)
        )

    def at(self, since: int, away: int, gone: int, back: int) -> int:
        """Bytes of one micro-batch so long after it came."""
        if not 0 <= since < self.span:
            return 0
        if since < self.forward or since >= self.span - self.backward:
            return self.peak
        return self.kept - (away if gone <= since < back else 0)

    def held(self, time: int) -> int:
        """(O1): the start of the compute around `time`, if there is one."""
        for start, length in ((0, self.forward), (self.span - self.backward, self.backward)):
            inside = (time - start) % self.period
            if 0 < inside < length:
                return time - inside
        return time


@pytest.mark.parametrize("seed", range(150))
def test_waiting_is_the_least_that_fits(seed: int) -> None:
    """Of a stage alone: no V, and nothing of what can leave, is better (full duplex)."""
    draw = Random(seed)
    forward, backward = draw.randint(1, 6), draw.randint(1, 8)
    period = forward + backward + draw.randint(0, 12)
    copies = draw.randint(1, 5)
    span = (copies - 1) * period + draw.randint(forward + backward, period)
    kept = draw.randint(1, 24)
    lone = Lone(period, forward, backward, span, kept, kept + draw.randint(0, 6))
    offered = [0, *sorted(draw.sample(range(1, kept + 1), min(kept, 3)))]
    memory = draw.randint(lone.peak, lone.peak + copies * kept)

    def fits_at(at: int) -> bool:
        needs = [replace(lone, span=at).needs(away) for away in offered]
        return any(need is not None and need <= memory for need in needs)

    # More in flight never helps: up to the end of this period.
    good = [at for at in range(span, copies * period + 1) if fits_at(at)]
    found = span_with_offload(
        (period, span, copies, forward, forward + backward),
        (memory, memory - lone.peak, kept, 0, 0),
        np.array(offered),
        WAY,
    )
    assert found == (min(good) if good else INFINITE)


def shortest(costs: CostModel) -> int | None:
    """The period of the best contiguous 1F1B plan, by trying all: partitions, what leaves, waits.

    As without room for messages; periods are bisected, which the test above lets us do.
    """
    low, high = 0, ContiguousDP(costs).serial_ns
    if not possible(costs, high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if possible(costs, middle) else (middle, high)
    return high


def possible(costs: CostModel, period: int) -> bool:
    """Whether some partition has a plan of this period."""
    count = costs.layers
    for stages in range(1, min(costs.gpus, count) + 1):
        for cuts in combinations(range(1, count), stages - 1):
            if flows(costs, [*pairwise([0, *cuts, count])], period):
                return True
    return False


def flows(costs: CostModel, pieces: list[tuple[int, int]], period: int) -> bool:
    """Whether these stages fit, each at the least V from the last one on."""
    behind = 0
    for first, end in reversed(pieces):
        if behind:
            there = costs.send_forward_ns(end - 1, 0, 1), costs.send_backward_ns(end - 1, 1, 0)
            if max(there) > period:
                return False
            behind += sum(there)
        forward, load = costs.forward_ns(first, end - 1, 0), costs.load_ns(first, end - 1, 0)
        if load > period:
            return False
        span = extend_one_span(behind, load, period)
        size = costs.segment(first, end - 1)
        own = max(size.running, size.saved + size.backward, size.optimizer)
        room = costs.budgets[0] - size.states
        found = waiting(
            costs,
            (first, end - 1),
            Lone(period, forward, load - forward, span, size.saved, own),
            room,
        )
        if found is None:
            return False
        behind = found
    return True


def waiting(costs: CostModel, layers: tuple[int, int], lone: Lone, room: int) -> int | None:
    """The least V at which a stage fits, by trying every set of runs and every wait."""
    sizes = {
        sum(offloadable_bytes(costs.chain, run.segment) for run in runs)
        for runs in every_choice(*layers, nested=False)
        if not any(n in costs.recomputed for run in runs for n in range(run.first, run.last + 1))
    }
    copies = ceil_div(lone.span, lone.period)
    for span in range(lone.span, copies * lone.period + 1):
        at = replace(lone, span=span)
        needs = [at.needs(away) for away in sizes]
        if any(need is not None and need <= room for need in needs):
            return span
        if span == lone.span and lone.peak > room:
            return None
    return None


@grids.first(5, seed=range(8))
def test_cuts_and_runs_of_both_kinds_equal_brute_force(seed: int) -> None:
    """Up to 4 layers on 3 GPUs: no partition, set of runs again and of runs away is shorter."""
    for memory in (25, 40):
        costs = costs_of(seed, 2 + seed % 3, 3, memory)
        chain = costs.chain
        found = RecomputeDP(
            costs, options=list_options(chain, offload=True), offload=True
        ).shortest(1)
        every = (contract(chain, runs).of(costs) for runs in every_choice(0, costs.layers - 1))
        periods = [period for period in map(shortest, every) if period is not None]
        assert (None if found is None else found.period) == min(periods, default=None)
        lowest = max(1, int(load_bound(costs)))
        claimed = recompute_bound(costs, lowest, offload=True)
        assert found is None or (claimed is not None and claimed <= found.period)


def test_the_bound_knows_both_what_leaves_and_what_runs_again() -> None:
    """It is at most the one without offloading, often less, and still more than the load."""
    less = more = 0
    for seed in range(14):
        costs = costs_of(seed, 6, 3, 45)
        lowest = max(1, int(load_bound(costs)))
        kept, away = (recompute_bound(costs, lowest, offload=offload) for offload in (False, True))
        if kept is not None:
            assert away is not None
            assert away <= kept
            less += away < kept
        more += away is None or away > lowest
    assert less >= 3
    assert more >= 3


def test_offloading_makes_plans_shorter() -> None:
    """In the chains of these tests it matters: a third of them have shorter periods with it."""
    shorter = known = 0
    for seed in range(20):
        costs = costs_of(seed, 6, 3, 45)
        plain = ContiguousDP(costs).shortest(1)
        away = ContiguousDP(costs, offload=True).shortest(1)
        if plain is not None:
            assert away is not None
            assert away.period <= plain.period
            known += 1
            shorter += away.period < plain.period
    assert shorter * 3 >= known > 5


@pytest.mark.parametrize("duplex", ["full", "half"])
@pytest.mark.parametrize("seed", range(15))
def test_what_is_fitted_fits(seed: int, duplex: str) -> None:
    """A schedule that needs too much is mended by moving bytes alone, and none that can stay."""
    host = SLOW.model_copy(update={"duplex": duplex})
    costs = costs_of(seed, 6, 3, 70, host)
    partition = ContiguousDP(costs, offload=True).shortest(1)
    if partition is None:
        return
    schedule = schedule_partition(costs, partition)
    made = repair_by_offloading(costs, schedule)
    if made is None or not made.offloads:
        return
    assert replace(made, offloads=()) == schedule
    assert not fits(memory_rows(costs, schedule))
    assert fits(memory_rows(costs, made))
    for index, each in enumerate(made.offloads):
        home = schedule.stages[each.stage]
        covered = home.id > 0 and schedule.stages[home.id - 1].gpu == home.gpu
        offered = stage_options(costs, *home.layers, covered=covered)
        assert (each.size, each.runs, each.input) in offered
        without = (*made.offloads[:index], *made.offloads[index + 1 :])
        assert not fits(memory_rows(costs, replace(made, offloads=without)))


FAST = SLOW.model_copy(update={"bandwidth_bytes_per_s": 20 * 10**9})


def ample(seed: int) -> tuple[CostModel, Schedule]:
    """The best contiguous schedule on three GPUs without a limit."""
    costs = costs_of(seed, 6, 3, 10**6, FAST)
    partition = ContiguousDP(costs).shortest(1)
    assert partition is not None
    return costs, schedule_partition(costs, partition)


def test_inputs_leave_where_all_else_is_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several GPUs, and only there; the last one's micro-batch goes back at once."""
    mended = []
    for seed in range(20):
        costs, schedule = ample(seed)
        most = max(row.peak_bytes for row in memory_rows(costs, schedule))
        for memory in range(most // 2, most, 6):
            scarce = costs_of(seed, 6, 3, memory, FAST)
            made = repair_by_offloading(scarce, schedule)
            if made is not None and any(each.input for each in made.offloads):
                mended.append((scarce, schedule, made))
    assert len(mended) > 4
    for costs, _, made in mended:
        assert fits(memory_rows(costs, made))
    places = {made.stages[x.stage].gpu for _, _, made in mended for x in made.offloads if x.input}
    assert places == {0, 1}
    monkeypatch.setattr(byte_options_module, "own_input_bytes", lambda *_, covered: 0)
    for costs, schedule, _ in mended:
        assert repair_by_offloading(costs, schedule) is None


def test_a_whole_input_alone_leaves_with_its_forward() -> None:
    """(H3): a copy of it begins with F where the way is free; that of a run waits for F's end."""
    seen = 0
    for seed in range(10):
        costs, schedule = ample(seed)
        places = CopyPlacement(costs, schedule, ExactMemoryEvents(costs, schedule))
        for stage in schedule.stages:
            size, begin = costs.chain.input_of(stage.first), schedule.times[OpKind.F, stage.id]
            length = duration(costs, schedule.stages, (OpKind.F, stage.id))
            for runs, enters in (((), True), (((stage.first, stage.first),), False)):
                sent = size, runs, enters
                for each in places.placed([(stage.id, sent)], back_first=True):
                    out = {copy: pair[0] for copy, pair in each.times.items()}
                    assert out == {copy: begin[copy] + length * (not enters) for copy in out}
                    seen += 1
    assert seen > 20


def test_the_hosts_memory_is_a_limit() -> None:
    """What would fit on the GPUs does not where the host has no room for it."""
    tight = 0
    for seed in range(40):
        costs = costs_of(seed, 6, 3, 70)
        partition = ContiguousDP(costs, offload=True).shortest(1)
        if partition is None:
            continue
        made = repair_by_offloading(costs, schedule_partition(costs, partition))
        if made is None or not made.offloads:
            continue
        used = sum(row.host_bytes for row in memory_rows(costs, made))
        small = SLOW.model_copy(update={"memory_bytes": used - 1})
        cluster = costs.cluster.model_copy(update={"host": small})
        assert (
            repair_by_offloading(
                replace(costs, cluster=cluster), schedule_partition(costs, partition)
            )
            is None
        )
        tight += 1
    assert tight > 3


def test_ns_of_many_bytes() -> None:
    """Exact while products fit 64 bits, then never too little and at most a few ns more."""
    host = Host(memory_bytes=1, bandwidth_bytes_per_s=12_345_678_901)
    sizes = [0, 1, 10**9, 10**12, 10**15, 2**55]
    exact = [ceil_div(size * 10**9, host.bandwidth_bytes_per_s) for size in sizes]
    way = 10**9, host.bandwidth_bytes_per_s, False, False
    found = [transfer_ns(size, way) for size in sizes]
    assert found[:3] == exact[:3]
    assert found != exact
    assert all(0 <= one - two <= 2 + two // 10**12 for one, two in zip(found, exact, strict=True))


def test_whose_saved_input_may_leave() -> None:
    """All but what a program keeps.

    Where the stage before is on the same GPU, the more of what the two keep of it.
    """
    costs = costs_of(1, 5, 1, 100)
    layers = tuple(
        layer.model_copy(
            update={
                "output_bytes": 4,
                "saved_input_bytes": n or 9,
                "saved_output_bytes": 2 * (n == 1),
            }
        )
        for n, layer in enumerate(costs.chain.layers)
    )
    costs = replace(costs, chain=costs.chain.model_copy(update={"layers": layers}))
    assert [own_input_bytes(costs, n, covered=True) for n in range(1, 5)] == [1, 2, 3, 4]
    assert [own_input_bytes(costs, n, covered=False) for n in range(5)] == [9, 1, 2, 3, 4]
    again = replace(costs, recomputed=frozenset({1, 3}))
    assert [own_input_bytes(again, n, covered=True) for n in range(1, 5)] == [1, 2, 3, 4]
    under = replace(again, programs=frozenset({1}))
    assert [own_input_bytes(under, n, covered=True) for n in range(1, 5)] == [0, 0, 3, 4]
