"""Durations, resources, order and the step, at the borders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import pytest

from pipeplan.chain import Chain
from pipeplan.cluster import Cluster, Gpu, Links, Pair, uniform
from pipeplan.plan import Plan
from pipeplan.verifier import Rule, audit, verify
from tests import handmade

TWO = [(0, 0, 0), (1, 1, 1)]


def lines(plan: Plan) -> list[str]:
    """The violations as text."""
    return [str(violation) for violation in verify(plan)]


def rules(plan: Plan) -> set[str]:
    """The names of the broken rules."""
    return {violation.rule.value for violation in verify(plan)}


class TestDurations:
    """(T2) and (T3): every number below is worked out by hand."""

    def one(self, times: list[tuple[int, int]], speed: float, overhead: int = 0) -> Plan:
        """All layers in one stage on a GPU of this speed; F and B claim to last 10 and 20."""
        cluster = Cluster(
            gpus=(Gpu(name="g", memory_bytes=9, speed=speed),), action_overhead_ns=overhead
        )
        lasts = {"0F": 10, "0B": 20}
        starts = {"0F0": 0, "0B0": 10}
        stages = [(0, len(times) - 1, 0)]
        of = handmade.chain(times)
        return handmade.plan(of, stages, 30, starts, cluster=cluster, durations=lasts)

    @pytest.mark.parametrize(
        ("times", "speed", "overhead"),
        [
            ([(10, 20)], 1.0, 0),
            ([(3, 6)], 0.3, 0),  # as a binary fraction 0.3 is less: 3 / it > 10
            ([(1, 2)], 0.1, 0),
            ([(7, 14)], 0.7, 0),
            ([(9, 19)], 1.0, 1),  # the overhead counts once per action, not per layer
            ([(4, 9), (5, 10)], 1.0, 1),
            ([(9, 19), (11, 21)], 2.0, 0),  # ceil(4.5) + ceil(5.5) = 5 + 6: not 10
            ([(9, 20), (9, 20)], 2.0, 0),  # 5 + 5, 10 + 10
        ],
    )
    def test_compute(self, times: list[tuple[int, int]], speed: float, overhead: int) -> None:
        """Each layer is rounded up by itself, the speed read as a decimal."""
        found = lines(self.one(times, speed, overhead))
        if times == [(9, 19), (11, 21)]:
            assert found == [
                "durations, op 0F0: got 10 ns, need 11 ns",
                "durations, op 0B0: got 20 ns, need 21 ns",
            ]
        else:
            assert found == []

    @pytest.mark.parametrize(
        ("links", "need"),
        [
            ({"latency_ns": 7}, (7, 7)),  # infinite bandwidth
            ({"latency_ns": 7, "bandwidth_bytes_per_s": 10**9}, (17, 11)),
            ({"bandwidth_bytes_per_s": 3 * 10**9}, (4, 2)),  # ceil(10 / 3), ceil(4 / 3)
            ({"bandwidth_bytes_per_s": 1}, (10**10, 4 * 10**9)),
            ({"latency_ns": 1, "pairs": (Pair(source=0, target=1, latency_ns=5),)}, (5, 1)),
            (
                {"duplex": "half", "pairs": (Pair(source=1, target=0, latency_ns=5),)},
                (5, 5),
            ),
        ],
    )
    def test_transfer(self, links: dict[str, Any], need: tuple[int, int]) -> None:
        """Latency plus bytes by bandwidth; outputs of 10 bytes, gradients of 4; pairs override."""
        of = handmade.chain(
            [(1, 1), (1, 1)], [{"output_bytes": 10, "output_gradient_bytes": 4}, {}]
        )
        cluster = Cluster(gpus=uniform(2, 99).gpus, links=Links(**links))
        out, back = need
        times = {"0F0": 0, "0SEND_F0": 1, "1F0": 1 + out, "1B0": 2 + out, "1SEND_B0": 3 + out}
        times["0B0"] = 3 + out + back
        lasts = {"0SEND_F": out, "1SEND_B": back}
        period = 4 + out + back
        plan = handmade.plan(of, TWO, period, times, cluster=cluster, durations=lasts)
        assert lines(plan) == []
        for label, length in (("0SEND_F0", out), ("1SEND_B0", back)):
            short = handmade.changed(plan, label, duration_ns=length - 1)
            assert f"durations, op {label}: got {length - 1} ns, need {length} ns" in lines(short)


def alone(period: int, times: Mapping[str, int], forward: int, backward: int) -> Plan:
    """One layer on one GPU."""
    return handmade.plan(handmade.chain([(forward, backward)]), [(0, 0, 0)], period, times)


class TestGpu:
    """(R3): disjoint modulo T."""

    def test_an_op_may_wrap_around(self) -> None:
        """B from 4 to 6 of T = 5 uses 4 and 0; F fits from 1 to 4, and not from 0 to 3."""
        assert lines(alone(5, {"0F0": 1, "0B0": 4}, 3, 2)) == []
        assert lines(alone(5, {"0F0": 0, "0B0": 4}, 3, 2)) == [
            "gpu, GPU 0 at 0 ns of the period: 0F0 starts 1 ns before 0B0 ends (0 ns, need 1 ns)"
        ]

    def test_an_op_longer_than_the_period_overlaps_itself(self) -> None:
        """F of 7 in T = 5 is two too long, for the GPU and for the order of micro-batches."""
        assert lines(alone(5, {"0F0": 0, "0B0": 7}, 7, 0)) == [
            "gpu, GPU 0 at 0 ns of the period: 0F0 starts 2 ns before 0F0 ends (0 ns, need 2 ns)",
            "gpu, GPU 0 at 2 ns of the period: 0B0 starts 5 ns before 0F0 ends (2 ns, need 7 ns)",
            "fifo, 0F0 -> 0F0 of the next period at 0 ns of the period (shift 1): 0F0 of the next"
            " period starts at 5 ns, need 7 ns, when 0F0 ends",
        ]

    def test_an_op_as_long_as_the_period_does_not(self) -> None:
        """F of 5 in T = 5 leaves room for a B without length, at its border only."""
        assert lines(alone(5, {"0F0": 0, "0B0": 5}, 5, 0)) == []
        assert rules(alone(5, {"0F0": 0, "0B0": 6}, 5, 0)) == {"gpu"}

    def test_zero_length_at_one_time(self) -> None:
        """Ops without length never overlap each other."""
        of = handmade.chain([(0, 0), (0, 0), (0, 0)])
        stages = [(0, 0, 0), (1, 1, 0), (2, 2, 0)]
        times = {f"{s}{kind}0": 4 for s in range(3) for kind in "FB"}
        plan = handmade.plan(of, stages, 5, times)
        assert lines(plan) == []
        assert audit(plan).in_flight == (1, 1, 1)


class TestLinks:
    """(R4): what shares a link."""

    def plan(self, duplex: Literal["full", "half"], start: int) -> Plan:
        """Two GPUs, transfers of 2 ns: SEND_F at 1, SEND_B at `start`; T = 8."""
        cluster = uniform(2, 99, latency_ns=2, duplex=duplex)
        times = {"0F0": 0, "0SEND_F0": 1, "1F0": 3, "1B0": 4, "1SEND_B0": start, "0B0": start + 3}
        return handmade.plan(handmade.chain([(1, 1), (1, 1)]), TWO, 8, times, cluster=cluster)

    @pytest.mark.parametrize(("start", "kept"), [(7, True), (8, False), (10, False), (11, True)])
    def test_directions(self, start: int, kept: bool) -> None:
        """Opposite transfers exclude each other under half duplex only (1..3 modulo 8)."""
        assert rules(self.plan("full", start)) == set()
        assert rules(self.plan("half", start)) == (set() if kept else {"link"})

    def test_two_cuts_share_the_link_between_their_gpus(self) -> None:
        """Stages on GPUs 0, 1, 0, 1: forward of cuts 0|1, 2|3 and backward of 1|2 use 0->1."""
        of = handmade.chain([(1, 1)] * 4)
        stages = [(0, 0, 0), (1, 1, 1), (2, 2, 0), (3, 3, 1)]
        cluster = uniform(2, 99, latency_ns=3)
        times = {"0F0": 0, "0SEND_F0": 1, "1F0": 4, "1SEND_F0": 5, "2F0": 8, "2SEND_F0": 9}
        times |= {"3F0": 12, "3B0": 13, "3SEND_B0": 14, "2B0": 17, "2SEND_B0": 18, "1B0": 21}
        times |= {"1SEND_B0": 22, "0B0": 25}
        assert rules(handmade.plan(of, stages, 26, times, cluster=cluster)) == set()
        found = lines(handmade.plan(of, stages, 6, times, cluster=cluster))
        assert [line for line in found if line.startswith("link, link 0->1")] == [
            "link, link 0->1 at 1 ns of the period: 0SEND_F0 starts 2 ns before 2SEND_B0 ends"
            " (1 ns, need 3 ns)",
            "link, link 0->1 at 3 ns of the period: 2SEND_F0 starts 1 ns before 0SEND_F0 ends"
            " (3 ns, need 4 ns)",
        ]

    def test_a_transfer_longer_than_the_period(self) -> None:
        """A link cannot carry what takes longer than T, however often it waits."""
        cluster = uniform(2, 99, latency_ns=9)
        times = {"0F0": 0, "0SEND_F0": 1, "1F0": 10, "1B0": 11, "1SEND_B0": 12, "0B0": 21}
        plan = handmade.plan(handmade.chain([(1, 1), (1, 1)]), TWO, 8, times, cluster=cluster)
        assert rules(plan) == {"link", "fifo"}
        assert "0SEND_F0 starts 1 ns before 0SEND_F0 ends (1 ns, need 2 ns)" in lines(plan)[0]


class TestFifo:
    """(R5): index order."""

    def pair(self, second: int) -> Plan:
        """Two copies on one GPU, F and B of 1 ns, period 8; the second copy's F at `second`."""
        return self.build({"0F0": 0, "0B0": 6, "0F1": second, "0B1": 7})

    def build(self, times: dict[str, int]) -> Plan:
        """Two copies on one GPU, F and B of 1 ns, period 8."""
        return handmade.plan(handmade.chain([(1, 1)]), [(0, 0, 0)], 8, times, k=2)

    def test_between_periods(self) -> None:
        """Copy 1's F at 1 is in order; at 12 it comes after copy 0 of the next period, at 8."""
        assert verify(self.pair(1)) == ()
        (found,) = verify(self.build({"0F0": 0, "0B0": 6, "0F1": 12, "0B1": 13}))
        assert found.rule is Rule.FIFO
        assert found.where == "0F1 -> 0F0 of the next period at 0 ns of the period (shift 1)"
        assert "starts at 8 ns, need 13 ns" in found.message

    def test_within_a_period(self) -> None:
        """Copy 1 before copy 0 is refused, with both times."""
        (line,) = lines(self.build({"0F0": 2, "0B0": 6, "0F1": 1, "0B1": 7}))
        assert line.startswith("fifo, 0F0 -> 0F1 at 1 ns of the period:")
        assert "starts at 1 ns, need 3 ns" in line

    def test_back_to_back(self) -> None:
        """Copies may touch: one ends as the next starts."""
        assert verify(self.build({"0F0": 0, "0F1": 1, "0B0": 2, "0B1": 3})) == ()


class TestStep:
    """(T5) and (R6)."""

    OF: Chain = handmade.chain([(1, 1)], [{"optimizer_ns": 5}])

    def plan(self, **fields: Any) -> Plan:
        """Two copies in a period of 10."""
        times = {"0F0": 0, "0B0": 4, "0F1": 1, "0B1": 9}
        return handmade.plan(self.OF, [(0, 0, 0)], 10, times, k=2, **fields)

    @pytest.mark.parametrize(
        ("microbatches", "flush", "steady"),
        [
            (1, 5, 5),  # only copy 0 runs: 0..5; 10 / 2
            (2, 10, 10),  # copy 1's B ends at 10
            (3, 15, 15),  # copy 0 again: B ends at 15
            (4, 20, 20),
            (7, 35, 35),
        ],
    )
    def test_step(self, microbatches: int, flush: int, steady: int) -> None:
        """Fill to drain in flush, the steady rate in 2bw; the optimizer's 5 in both."""
        told = audit(self.plan(microbatches=microbatches, semantics="flush"))
        assert told.step_ns == flush + 5
        assert audit(self.plan(microbatches=microbatches)).step_ns == steady + 5

    def test_steady_rate_rounds_up(self) -> None:
        """Three micro-batches at 9 / 2 ns each: 13.5, so 14; the optimizer 5 more."""
        times = {"0F0": 0, "0F1": 1, "0B0": 2, "0B1": 3}
        plan = handmade.plan(self.OF, [(0, 0, 0)], 9, times, k=2, microbatches=3)
        assert audit(plan).step_ns == 19

    def test_the_slowest_gpus_optimizer(self) -> None:
        """GPU 0, speed 2, hosts layers 0 and 2: ceil(5 / 2) + ceil(3 / 2) = 5; GPU 1 has 4."""
        layers = [{"optimizer_ns": 5}, {"optimizer_ns": 4}, {"optimizer_ns": 3}]
        of = handmade.chain([(2, 2), (1, 1), (2, 2)], layers)
        gpus = (Gpu(name="a", memory_bytes=9, speed=2.0), Gpu(name="b", memory_bytes=9))
        stages = [(0, 0, 0), (1, 1, 1), (2, 2, 0)]
        plan = handmade.packed(of, stages, 6, cluster=Cluster(gpus=gpus), microbatches=8)
        assert verify(plan) == ()
        assert plan.step_ns == 8 * 6 + 5

    def test_versions_hold_for_2bw_only(self) -> None:
        """Three in flight need two micro-batches per step under 2bw, any number under flush."""
        times = {"0F0": 0, "0B0": 5}
        for microbatches, semantics, broken in (
            (2, "2bw", set()),
            (1, "2bw", {"versions"}),
            (1, "flush", set()),
        ):
            options = {"microbatches": microbatches, "semantics": semantics}
            of = handmade.chain([(1, 1)])
            plan = handmade.plan(of, [(0, 0, 0)], 2, times, **options)
            assert audit(plan).in_flight == (3,)
            assert rules(plan) == broken
