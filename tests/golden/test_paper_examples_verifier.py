"""The examples of paper 002 as plans written by hand: the verifier's numbers are the paper's.

Beaumont, Eyraud-Dubois, Shilova, "Pipelined Model Parallelism" (2020). The paper gives one time
per layer for F and B together, or the same for each; here each of F and B lasts that time, so
periods are twice the paper's where it adds them up. Memory counts saved bytes only: boundaries are
empty and `saved_bytes` is the size of the layer's activation. That no better plan exists is the
planner's claim, not tested here.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pipeplan.chain import Chain
from pipeplan.cluster import uniform
from pipeplan.plan import Plan
from pipeplan.verifier import Rule, audit, verify
from tests import handmade

Stages = list[tuple[int, int, int]]


def chain(costs: Sequence[int], **bytes_per_layer: Sequence[int]) -> Chain:
    """A chain with F = B = cost, and one size per layer for each field given."""
    fields = [
        {name: sizes[i] for name, sizes in bytes_per_layer.items()} for i in range(len(costs))
    ]
    return handmade.chain([(cost, cost) for cost in costs], fields)


def names(plan: Plan) -> set[str]:
    """The rules that `plan` breaks."""
    return {violation.rule.value for violation in verify(plan)}


def contiguous(costs: Sequence[int], capacity: int) -> Stages:
    """Next-fit stages of at most `capacity` each (F = B = cost), one GPU after the other."""
    stages: Stages = []
    for layer in range(len(costs)):
        first, _, gpu = stages[-1] if stages else (0, 0, -1)
        if stages and sum(costs[first : layer + 1]) <= capacity:
            stages[-1] = (first, layer, gpu)
        else:
            stages.append((layer, layer, gpu + 1))
    return stages


class TestContiguousAndNot:
    """Section 4.2: what a contiguous allocation costs."""

    def test_chain_121(self) -> None:
        """Section 4.2.1: (1,2,1) on 2 GPUs takes 2, contiguous 3 (here doubled: 4 and 6)."""
        costs = chain([1, 2, 1])
        assert verify(handmade.packed(costs, [(0, 0, 0), (1, 1, 1), (2, 2, 0)], 4)) == ()
        assert verify(handmade.packed(costs, [(0, 0, 0), (1, 2, 1)], 6)) == ()
        assert names(handmade.packed(costs, [(0, 0, 0), (1, 2, 1)], 5)) == {"gpu"}
        assert names(handmade.packed(costs, [(0, 1, 0), (2, 2, 1)], 5)) == {"gpu"}

    @pytest.mark.parametrize("k", [2, 3, 4, 5])
    def test_theorem_1(self, k: int) -> None:
        """Chain C_k on 2k+1 GPUs: period k with no idle time; contiguous 2k-1+e, not 2k-1.

        Times are scaled by 1/e = 2k+1, so a cost of k is k(2k+1) and e is 1.
        """
        scale, gpus = 2 * k + 1, 2 * k + 1
        part = [k * scale, 1, (k - 1) * scale, 1]
        costs = part * k + [k * scale] + [1] * ((k - 2) * scale + 1) + [scale]
        home = allocation_of_theorem_1(costs, k, scale)
        stages = [(i, i, home[i]) for i in range(len(costs))]
        best = handmade.packed(chain(costs), stages, 2 * k * scale, microbatches=1000)
        assert verify(best) == ()
        loads = [sum(2 * costs[s.first] for s in best.hosted(gpu)) for gpu in range(gpus)]
        assert loads == [best.period_ns] * gpus  # no processor has any idle time

        limit = (2 * k - 1) * scale + 1
        assert len(contiguous(costs, limit)) <= gpus
        assert len(contiguous(costs, limit - 1)) > gpus  # next fit uses the fewest GPUs
        apart = contiguous(costs, limit)
        assert verify(handmade.packed(chain(costs), apart, 2 * limit, microbatches=1000)) == ()

    def test_lemma_2(self) -> None:
        """Weights (1,2,1) on 2 GPUs of 2: layers 1 and 3 together fit, contiguous needs 3."""
        of = chain([1, 1, 1], weight_bytes=[1, 2, 1])
        options = {"cluster": uniform(2, 2), "semantics": "flush"}
        apart = handmade.packed(of, [(0, 0, 0), (1, 1, 1), (2, 2, 0)], 4, **options)
        assert verify(apart) == ()
        assert [row.peak_bytes for row in apart.memory] == [2, 2]
        allocations: list[Stages] = [
            [(0, 1, 0), (2, 2, 1)],
            [(0, 0, 0), (1, 2, 1)],
            [(0, 2, 0)],
        ]
        for stages in allocations:
            (found,) = verify(handmade.packed(of, stages, 6, **options))
            assert found.rule is Rule.BUDGET
        assert "got peak 4 bytes, need at most 2" in found.message

    @pytest.mark.parametrize("count", [3, 4])
    @pytest.mark.parametrize("cost", [5, 50])
    def test_lemma_3(self, count: int, cost: int) -> None:
        """Figure 3: period A+1, contiguous P*A, both exactly at the memory limit."""
        P, A, M = count, cost, count + 2
        of = chain([1] * P + [A] * (P + 1), weight_bytes=[M - 1] * P + [M] + [1] * P)
        options = {"cluster": uniform(P + 2, M), "semantics": "flush"}
        home = [*range(P), P, *range(P)]
        good = handmade.packed(of, [(i, i, g) for i, g in enumerate(home)], 2 * (A + 1), **options)
        assert verify(good) == ()
        assert [row.peak_bytes for row in good.memory] == [M] * (P + 1) + [0]

        tail = [*((i, i, i) for i in range(P + 1)), (P + 1, 2 * P, P + 1)]
        bad = handmade.packed(of, tail, 2 * P * A, **options)
        assert verify(bad) == ()
        assert names(handmade.packed(of, tail, 2 * P * A - 1, **options)) == {"gpu"}
        for i in range(P):  # any two of the first P+1 layers on one GPU are too much
            joined = [*((j, j, j) for j in range(i)), (i, i + 1, i)]
            joined += [(j, j, j - 1) for j in range(i + 2, P + 1)] + [(P + 1, 2 * P, P + 1)]
            assert names(handmade.packed(of, joined, 2 * P * A, **options)) == {"budget"}


def allocation_of_theorem_1(costs: Sequence[int], k: int, scale: int) -> list[int]:
    """Each layer's GPU.

    GPUs 0..k have one layer of cost k; GPU k+1 one of k-1 and the last, of 1; the others one of
    k-1 and 2k+1 layers of cost e.
    """
    long, middle, short = iter(range(k + 1)), iter(range(k + 1, 2 * k + 1)), 0
    home = []
    for cost in costs[:-1]:
        if cost == k * scale:
            home.append(next(long))
        elif cost == 1:
            home.append(k + 2 + short // scale)
            short += 1
        else:
            home.append(next(middle))
    return [*home, k + 1]


class TestMoreThanOneMicrobatchPerPeriod:
    """Section 4.3: 1F1B is not always best where memory is scarce."""

    FOUR = ((0, 0, 0), (1, 1, 1), (2, 2, 2), (3, 3, 3))
    THREE = ((0, 0, 0), (1, 1, 1), (2, 2, 0))

    def four(self, period: int, times: dict[str, int], k: int = 1) -> Plan:
        """Figure 4: (3,2,2,2), activations 1,2,2,4, four GPUs of 4."""
        of = chain([3, 2, 2, 2], saved_bytes=[1, 2, 2, 4])
        return handmade.plan(of, self.FOUR, period, times, cluster=uniform(4, 4), k=k)

    def three(self, period: int, times: dict[str, int], k: int = 1, memory: int = 6) -> Plan:
        """Figure 5: (1,2,1), activations 2,3,2, layers 1 and 3 on one of two GPUs of 6."""
        of = chain([1, 2, 1], saved_bytes=[2, 3, 2])
        return handmade.plan(of, self.THREE, period, times, cluster=uniform(2, memory), k=k)

    def test_figure_4_1f1b(self) -> None:
        """1F1B with period 8 keeps 3, 2, 1, 1 copies: it fits."""
        down = {"0F0": 0, "1F0": 3, "2F0": 5, "3F0": 7}
        plan = self.four(8, down | {"3B0": 9, "2B0": 11, "1B0": 13, "0B0": 19})
        assert verify(plan) == ()
        assert audit(plan).in_flight == (3, 2, 1, 1)
        assert [row.peak_bytes for row in plan.memory] == [3, 4, 2, 4]

    def test_figure_4a(self) -> None:
        """1F1B with period 6 keeps 4, 3, 2, 1 copies: three of size 2 exceed the second GPU."""
        down = {"0F0": 0, "1F0": 3, "2F0": 5, "3F0": 7}
        plan = self.four(6, down | {"3B0": 9, "2B0": 13, "1B0": 17, "0B0": 21})
        assert audit(plan).in_flight == (4, 3, 2, 1)
        (found,) = verify(plan)
        assert str(found).startswith("budget, GPU 1: got peak 6 bytes, need at most 4: 2 over")

    def test_figure_4b(self) -> None:
        """2F2B with period 12, so 6 per micro-batch, keeps 4, 2, 2, 1 copies: it fits."""
        first = {"0F0": 0, "1F0": 3, "2F0": 5, "3F0": 7, "3B0": 9, "2B0": 11, "1B0": 13, "0B0": 18}
        second = {"0F1": 3, "1F1": 7, "2F1": 9, "3F1": 11}
        second |= {"3B1": 13, "2B1": 15, "1B1": 17, "0B1": 21}
        plan = self.four(12, first | second, k=2)
        assert verify(plan) == ()
        assert plan.period_per_microbatch == 6
        assert audit(plan).in_flight == (4, 2, 2, 1)
        assert [row.peak_bytes for row in plan.memory] == [4, 4, 4, 4]

    def test_figure_5_1f1b(self) -> None:
        """1F1B with period 5 keeps the peaks at 6 and 6."""
        times = {"0F0": 0, "1F0": 1, "2F0": 3, "2B0": 4, "1B0": 8, "0B0": 11}
        plan = self.three(5, times)
        assert verify(plan) == ()
        assert audit(plan).in_flight == (3, 2, 1)
        assert [row.peak_bytes for row in plan.memory] == [6, 6]

    def test_figure_5a(self) -> None:
        """1F1B with period 4 keeps 3, 2, 1 copies: 8 on the first GPU, which holds 6."""
        plan = self.three(4, {"0F0": 0, "1F0": 1, "2F0": 3, "2B0": 6, "1B0": 7, "0B0": 9})
        assert audit(plan).in_flight == (3, 2, 1)
        assert names(plan) == {"budget"}
        assert [row.peak_bytes for row in plan.memory] == [8, 6]

    def test_figure_5b(self) -> None:
        """2F2B with period 8, so 4 per micro-batch, keeps 2, 2, 1 copies: it fits."""
        first = {"0F0": 0, "1F0": 1, "2F0": 3, "2B0": 4, "1B0": 5, "0B0": 7}
        second = {"0F1": 2, "1F1": 3, "2F1": 5, "2B1": 6, "1B1": 7, "0B1": 9}
        plan = self.three(8, first | second, k=2)
        assert verify(plan) == ()
        assert plan.period_per_microbatch == 4
        assert audit(plan).in_flight == (2, 2, 1)
        assert [row.peak_bytes for row in plan.memory] == [6, 6]


class TestShifts:
    """Figure 10: consecutive ops two micro-batches apart."""

    def figure(self, start: int) -> Plan:
        """T = 10; F of stage 0 wraps around (9..12), F of stage 1 takes place 1 of the period."""
        of = handmade.chain([(3, 7), (4, 6)], [{"output_bytes": 5}, {}])
        times = {"0F0": 9, "1F0": start, "1B0": start + 4, "0B0": start + 11}
        options = {"semantics": "flush", "memory_model": "paper"}
        return handmade.plan(of, [(0, 0, 0), (1, 1, 1)], 10, times, **options)

    def test_figure_10(self) -> None:
        """F of stage 1 at place 1 acts on a micro-batch two older: one shift less breaks order."""
        plan = self.figure(21)
        assert verify(plan) == ()
        shift = {op.label: op.shift for op in plan.ops}
        assert (shift["0F0"], shift["1F0"]) == (0, 2)
        wrong = handmade.changed(plan, "1F0", shift=1)
        (found,) = verify(wrong)
        assert found.rule is Rule.PRECEDENCE
        assert "1F0 starts at 11 ns, need 12 ns" in found.message

    def test_a_wait_of_more_than_a_period_needs_two_slots(self) -> None:
        """The message 0 -> 1 waits 9 ns at shift 2 (one slot of 5) and 19 at shift 3 (two)."""
        assert [row.message_bytes for row in self.figure(21).memory] == [10, 10]
        late = self.figure(31)
        assert verify(late) == ()
        assert [row.message_bytes for row in late.memory] == [10, 15]
