"""Offloading in plans, (H1) to (H7): tables worked out by hand, and what breaks which rule."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pipeplan.cluster import uniform
from pipeplan.plan import LayerRanges, Plan, Remat
from pipeplan.verifier import Rule, audit, verify
from tests import handmade
from tests import handmade_offload as made


def terms(plan: Plan) -> tuple[int, int, int]:
    """(saved, working, host) of GPU 0; the plan must be valid and count nothing else."""
    assert verify(plan) == ()
    row = plan.memory[0]
    assert row.peak_bytes == row.states_bytes + row.saved_bytes + row.working_bytes
    return row.saved_bytes, row.working_bytes, row.host_bytes


def lines(plan: Plan) -> list[str]:
    """The violations as text."""
    return [str(violation) for violation in verify(plan)]


def rules(plan: Plan) -> set[Rule]:
    """The broken rules."""
    return {violation.rule for violation in verify(plan)}


class TestBytes:
    """(H6) and (H7); A = 28, pF = A + 3, pB = A + 10, o = 13 where nothing else is said."""

    def test_an_input_leaves_with_its_forward(self) -> None:
        """Three in flight; A = 12, F and B work with 1, PREFETCH at 25 comes back at 5 of T = 10.

        Copied while F runs (2..4), the input has left when F ends at 5: F has 12 + 2 + 2 + 1, B at
        7 has 2 + 2 + 12 + 1. Copied from 5 on, it is there until 7: 12 + 2 + 12 at 5. The host has
        three from the issue (at 1: a rank acts before its F, or at 5) until B starts at 7.
        """
        assert terms(made.whole_input()) == (16, 1, 30)
        assert terms(made.whole_input(at=1)) == (16, 1, 30)
        assert terms(made.whole_input(at=5)) == (26, 0, 30)

    def test_the_table_of_one_stage(self) -> None:
        """Three in flight, of ages x, x + 10, x + 20 at point x of T = 10 (B ends at 29).

        Age x keeps 28 until its OFFLOAD ends at 7, then 15; age x + 10 keeps 15; age x + 20 has
        its bytes back at 20, where 0F (20..23) starts, as PREFETCH at 22 lies inside that.
        0: 28 + 15 + 28 = 71, F works with 3: 74; 6: B works with 10: 81, the peak; from 7 on
        15 + 15 + 28 + 10. Without offloading 6 has 3 * 28 + 10 = 94.
        Host: from 3 to 26: at 3 three, 39; at 6 the oldest leaves.
        """
        assert terms(made.one_stage()) == (71, 10, 39)

    def test_bytes_leave_at_the_end_of_offload(self) -> None:
        """At 13 bytes per ns they are gone at 4: 0 has 71 + 3, B at 6 has 15 + 15 + 28 + 10."""
        assert terms(made.one_stage(bandwidth=13)) == (71, 3, 39)

    def test_the_host_holds_from_the_issue_on(self) -> None:
        """OFFLOAD at 7, inside B (6..9), is issued at 6, before that B starts: three at once.

        At 9, the end of that B, two. Both are over after 10, so 0 has 3 * 28, F 3: 87; B at 6 has
        28 + 15 + 28 + 10.
        """
        plan = made.one_stage()
        assert terms(handmade.filled(handmade.moved(plan, "0OFFLOAD0", 7))) == (84, 3, 39)
        assert terms(handmade.filled(handmade.moved(plan, "0OFFLOAD0", 9))) == (84, 3, 26)

    def test_bytes_are_back_when_the_rank_can_last_ask_for_them(self) -> None:
        """PREFETCH at 19 comes back at 19: behind B (16..19), which then needs 13 less.

        At 18 it is posted at 16, before that B: B has 28 + 28 + 28 + 10 as if nothing had left.
        """
        plan = made.one_stage()
        assert terms(handmade.filled(handmade.moved(plan, "0PREFETCH0", 19))) == (71, 10, 39)
        assert terms(handmade.filled(handmade.moved(plan, "0PREFETCH0", 18))) == (84, 10, 39)

    def test_one_copy_of_two(self) -> None:
        """T = 20: copy 1 (F 10..13, B 36..39) keeps its 28 throughout.

        0: copy 0 of ages 0 and 20 (back at 20) and copy 1 of age 10: 28 * 3, F works with 3: 87.
        6: copy 0 of age 6, gone at 4, 15, of age 26, 28, copy 1 of age 16, 28: 71 + 10 = 81.
        Host: copy 0 from 3 to 26, so two at 3.
        """
        assert terms(made.two_copies([0])) == (84, 3, 26)

    def test_both_copies(self) -> None:
        """0: as above but copy 1 of age 10 is away: 28 + 28 + 15, F 3: 74; 6: 15 + 28 + 15 + 10.

        Host: copy 1 from 13 to 36 as well, so one more at 3.
        """
        assert terms(made.two_copies([0, 1])) == (71, 3, 39)

    def test_beside_a_recomputed_run(self) -> None:
        """Layer 0 again, 1..2 away: o = 3 + 4 + K_1 6 = 13 of A = x_0 10 + 7 + 8 + 6 + 1 = 32.

        The run of layer 0: fw = 10+1+2+8 - 10 - 8 = 3, bw = max(18, 8 + 21, 22) - 18 = 11.
        pF = max(10+3+8, 8+10+3+2+6, 6+18+7+3+1) = 35; pB = max(10+11+8, 28+15, 32+9) = 42.
        0: ages 0, 10, 20 (back): 32 + 19 + 32 = 83, F 3: 86, the peak; B at 6 (age 26..30) has
        19 + 19 + 32 + 10 = 80. Host from 3 to 26: three.
        """
        assert terms(made.recomputing_too()) == (83, 3, 39)

    def test_a_stage_behind_another_on_its_gpu(self) -> None:
        """With u = 5: si' = 7 - 5 = 2, A(1) = 2 + 9 + 4 = 15, o = 13; A(0) = 2 + 5 = 7.

        T = 8: stage 0 has two in flight (0..15), stage 1 two (1..14), away from 4 to 11 = 3.
        3: 1F's end, then age 11 comes back: 14 + 15 + 15 = 44, the peak, before age 3's OFFLOAD is
        issued. 1 to 3: 14 + 15 + 2, F 1; 4: 14 + 2 + 15, B 5: 36. Host: from 3 to 12: two at 3.
        """
        assert terms(made.neighbours()) == (44, 0, 26)

    def test_a_saved_input_leaves_too(self) -> None:
        """Stage 1, alone with what it keeps of its input: A = 7 + 9 + 4 = o = 20; A(0) = 2.

        Stage 0 has two in flight (0..16). At 4 the 20 of age 4 are gone and those of age 12 back:
        24. At 5 1B works with 7 + 9 + 4 + 1 + 4 - 20 = 5: the peak. If the input stayed, the other
        micro-batch had 7 more then. Host: from 3 to 13: two at 3.
        """
        plan = handmade.filled(made.entering())
        assert terms(plan) == (24, 5, 40)
        runs = relaid(plan, 1, offload=((1, 2),))
        assert audit(runs).memory[0].peak_bytes == 24 + 5 + 7

    def test_what_the_stage_before_keeps_leaves_too(self) -> None:
        """As `test_a_saved_input_leaves_too`: that boundary is one storage, whoever keeps it.

        A(0) = 2 + 7 and A(1) = 9 + 4, of which o = 20 are away: -7 stand for the 7 of stage 0.
        """
        assert terms(handmade.filled(made.entering(saved_before=7))) == (24, 5, 40)

    def test_a_saved_input_may_leave_alone(self) -> None:
        """7 bytes, one ns: the rest, 13 of each micro-batch, stays."""
        plan = relaid(made.entering(), 1, offload_input=True)
        assert terms(handmade.filled(plan)) == (4 + 13 + 20, 5, 14)

    def test_issuing_an_offload_is_an_event(self) -> None:
        """At 0 GPU 0 only issues its OFFLOAD, and shows what it carried over the border.

        Stage 0 keeps 2 + 5 of two micro-batches (4..20, T = 8), 2 of them away from 9 to 17 = 1:
        5 + 7, and 3 of 0F's output from 6 until the SEND 7..9 is over: 15. 0F reaches 5 + 7 + 3
        at 4 too, but that is later in the period than 0.
        """
        layers = (
            {"output_bytes": 8, "saved_output_bytes": 5, "saved_bytes": 2}
            | {"output_gradient_bytes": 0},
            {"output_bytes": 1, "saved_input_bytes": 7, "saved_bytes": 3},
        )
        of = handmade.chain([(2, 2), (3, 3)], layers)
        times = {"0F0": 4, "0SEND_F0": 7, "1F0": 9, "1B0": 12, "1SEND_B0": 15, "0B0": 18}
        stages = [(0, 0, 0), (1, 1, 1)]
        plain = handmade.plan(of, stages, 8, times, cluster=uniform(2, 1000, latency_ns=2))
        sent = {"0OFFLOAD0": 8, "0PREFETCH0": 17}
        plan = made.offloading(made.with_host(plain, 2), 0, ((0, 0),), sent, 1)
        assert verify(plan) == ()
        row = plan.memory[0]
        assert (row.saved_bytes, row.working_bytes, row.message_bytes) == (12, 0, 3)
        assert row.peak_bytes == 15

    def test_a_stage_that_offloads_nothing_has_no_host_bytes(self) -> None:
        """`host_bytes` is 0, and not in the file, where nothing is away."""
        plan = handmade.base()
        assert [row.host_bytes for row in plan.memory] == [0, 0]
        assert "host_bytes" not in plan.to_json()
        assert '"host_bytes": 39' in made.one_stage().to_json()


def relaid(plan: Plan, stage: int, *, offload_input: bool = False, **runs: LayerRanges) -> Plan:
    """`plan` whose stage has these runs of recompute and offload, and whether its input leaves."""
    stages = list(plan.stages)
    stages[stage] = stages[stage].model_copy(
        update={"remat": Remat(offload_input=offload_input, **runs)}
    )
    return handmade.with_(plan, stages=tuple(stages))


def moved(plan: Plan, **times: int) -> Plan:
    """`plan` with ops at other times, by label with an x before it; table and step told anew."""
    for label, time in times.items():
        plan = handmade.moved(plan, label[1:], time)
    return handmade.filled(plan)


class TestOrder:
    """(H3), (H4), (R1) and (R5) of these ops."""

    @pytest.mark.parametrize(
        ("times", "words"),
        [
            ({"x0OFFLOAD0": 3}, ()),
            ({"x0OFFLOAD0": 2}, ("0F0 -> 0OFFLOAD0 at 2 ns", "starts at 2 ns, need 3 ns")),
            ({"x0PREFETCH0": 22}, ()),
            ({"x0PREFETCH0": 23}, ("0PREFETCH0 -> 0B0", "starts at 26 ns, need 27 ns")),
            ({"x0OFFLOAD0": 9, "x0PREFETCH0": 13}, ()),
            (
                {"x0OFFLOAD0": 8, "x0PREFETCH0": 12},
                ("at 0 ns of the period (shift 1)", "10 ns (its rank is busy from then to 12 ns)"),
            ),
            ({"x0OFFLOAD0": 6, "x0PREFETCH0": 12}, ()),  # posted at 10, when OFFLOAD ends
            ({"x0OFFLOAD0": 9, "x0PREFETCH0": 12}, ("need 13 ns, when 0OFFLOAD0 ends",)),
        ],
    )
    def test_precedence(self, times: dict[str, int], words: tuple[str, ...]) -> None:
        """Behind F, wholly before PREFETCH can be posted (F 10..13), back before B at 26."""
        found = lines(moved(made.one_stage(), **times))
        assert len(found) == (1 if words else 0), found
        assert all(word in found[0] for word in words)
        assert not words or found[0].startswith("precedence, ")

    @pytest.mark.parametrize(
        ("saved", "at", "words"),
        [
            (10, 1, ()),
            (10, 0, ("0F0 -> 0OFFLOAD0 at 0 ns", "need 1 ns, when 0F0 starts")),
            (9, 2, ("0F0 -> 0OFFLOAD0 at 2 ns", "need 5 ns, when 0F0 ends")),
            (9, 5, ()),
        ],
    )
    def test_only_a_whole_input_leaves_with_its_forward(
        self, saved: int, at: int, words: tuple[str, ...]
    ) -> None:
        """Of one that is saved in part, F decides which part; none leaves before F reads it."""
        found = lines(made.whole_input(saved, at))
        assert len(found) == (1 if words else 0), found
        assert all(word in found[0] for word in words)
        assert not words or found[0].startswith("precedence, ")

    @pytest.mark.parametrize(
        ("duplex", "prefetch", "kept"),
        [("full", 11, True), ("half", 11, False), ("half", 10, True)],
    )
    def test_one_way_for_both_directions(self, duplex: str, prefetch: int, kept: bool) -> None:
        """OFFLOAD 3..4 and PREFETCH 11..12 = 3..4 meet under half duplex only; 10..11 does not."""
        plan = made.neighbours("half" if duplex == "half" else "full", prefetch)
        assert rules(plan) == (set() if kept else {Rule.LINK})
        assert kept or "link, way GPU 0 - host at 3 ns" in lines(plan)[0]

    def test_stages_of_a_gpu_share_its_way(self) -> None:
        """Stage 0 offloads its 2 bytes in 1 ns as well: from 1 to 3 and 4 on, not at 3 or 2.5."""
        base = handmade.with_(made.neighbours())
        for start, kept in ((1, True), (2, True), (3, False), (4, True)):
            plan = made.offloading(base, 0, ((0, 0),), {"0OFFLOAD0": start, "0PREFETCH0": 13}, 1)
            assert rules(plan) == (set() if kept else {Rule.LINK}), start
            assert kept or "link, way GPU 0 -> host at 3 ns" in lines(plan)[0]
        plan = made.offloading(base, 0, ((0, 0),), {"0OFFLOAD0": 1, "0PREFETCH0": 11}, 1)
        assert "link, way GPU 0 <- host at 3 ns" in lines(plan)[0]

    def test_ways_of_two_gpus_are_apart(self) -> None:
        """Both GPUs may send at one time: 1OFFLOAD at 4, 0OFFLOAD at 4."""
        assert rules(moved(made.two_gpus(), x0OFFLOAD0=4)) == set()

    def test_an_op_longer_than_the_period(self) -> None:
        """13 bytes at 1 per ns take 13 ns: the way carries no such op every 10 ns."""
        plan = made.one_stage(bandwidth=1)
        assert rules(plan) == {Rule.LINK, Rule.FIFO, Rule.PRECEDENCE}

    def test_fifo_among_the_copies_that_have_them(self) -> None:
        """Copy 0 alone follows itself a period later; of two, copy 1 comes second."""
        assert rules(moved(made.two_copies([0]), x0OFFLOAD0=13)) == set()
        both = made.two_copies([0, 1])
        assert rules(moved(both, x0OFFLOAD0=12)) == set()
        assert rules(moved(both, x0OFFLOAD0=14)) == {Rule.FIFO}
        late = moved(both, x0OFFLOAD1=24, x0PREFETCH1=33)
        (line,) = lines(late)
        assert line.startswith("fifo, 0OFFLOAD1 -> 0OFFLOAD0 of the next period at 3 ns")
        assert "starts at 23 ns, need 25 ns" in line

    def test_starts_lie_in_the_period(self) -> None:
        """(R1) holds for these ops too."""
        plan = handmade.changed(made.one_stage(), "0PREFETCH0", start_ns=12, shift=1)
        assert "shifts, op 0PREFETCH0 (ops[3]): got start 12 ns" in lines(plan)[0]


def limited(plan: Plan, gpu: int, memory_bytes: int) -> Plan:
    """`plan` with another memory size of one GPU, told in its row too."""
    gpus, rows = list(plan.cluster.gpus), list(plan.memory)
    gpus[gpu] = gpus[gpu].model_copy(update={"memory_bytes": memory_bytes})
    rows[gpu] = rows[gpu].model_copy(update={"budget_bytes": memory_bytes})
    cluster = plan.cluster.model_copy(update={"gpus": tuple(gpus)})
    return handmade.with_(plan, cluster=cluster, memory=tuple(rows))


def hosted_by(plan: Plan, memory_bytes: int) -> Plan:
    """`plan` beside a host of this size."""
    assert plan.cluster.host is not None
    host = plan.cluster.host.model_copy(update={"memory_bytes": memory_bytes})
    return handmade.with_(plan, cluster=plan.cluster.model_copy(update={"host": host}))


class TestTable:
    """Rules `memory`, `budget` and `host`."""

    @pytest.mark.parametrize("field", ["saved_bytes", "host_bytes", "peak_bytes"])
    def test_each_number_is_compared(self, field: str) -> None:
        """One byte off is named with both numbers."""
        plan = made.one_stage()
        was = getattr(plan.memory[0], field)
        row = plan.memory[0].model_copy(update={field: was - 1})
        found = lines(handmade.with_(plan, memory=(row,)))
        assert f"memory, GPU 0, {field}: got {was - 1}, need {was}" in found

    @pytest.mark.parametrize(
        "make", [made.one_stage, made.recomputing_too, made.neighbours, made.two_gpus]
    )
    def test_the_exact_budget_and_one_byte_less(self, make: Callable[[], Plan]) -> None:
        """A limit equal to the peak is kept, one byte less is not."""
        plan = make()
        peak = plan.memory[0].peak_bytes
        assert verify(limited(plan, 0, peak)) == ()
        (line,) = lines(limited(plan, 0, peak - 1))
        assert line.startswith(f"budget, GPU 0: got peak {peak} bytes, need at most {peak - 1}")

    def test_the_host_holds_all_gpus(self) -> None:
        """GPU 0 from 2 to 18 = 2, where the new one is issued before the old one's B starts: 33;
        GPU 1 from 4 to 12 = 4, as well: 20. 53 bytes of host memory are enough, 52 are not.
        """
        plan = made.two_gpus()
        assert [row.host_bytes for row in plan.memory] == [33, 20]
        assert verify(plan) == ()
        (line,) = lines(hosted_by(plan, 52))
        assert line == ("host, host: got 53 bytes, need at most 52: 1 over (GPU 0 33, GPU 1 20)")

    def test_no_bytes_are_judged_without_order(self) -> None:
        """Where OFFLOAD starts before F ends, neither the table nor the host is judged."""
        plan = hosted_by(handmade.moved(made.one_stage(), "0OFFLOAD0", 2), 0)
        assert rules(plan) == {Rule.PRECEDENCE}

    def test_audit_fills_the_table(self) -> None:
        """What the planner is told are the rows that `verify` wants."""
        for plan in (made.one_stage(), made.two_copies([1]), made.two_gpus()):
            assert audit(plan).memory == plan.memory
