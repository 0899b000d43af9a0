"""Lowering: order of actions, early receives, buffers, and programs that cannot end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from pipeplan.cluster import uniform
from pipeplan.errors import DeadlockError, InputError, InvalidPlanError
from pipeplan.lowering import buffer_slots, check_deadlock, lower, wait_cycle
from pipeplan.plan import Op, Plan
from pipeplan.program import ActionKind, Program
from tests import handmade
from tests.offloading import offloaded
from tests.samples import two_stages

PAIR = [{"output_bytes": 8}, {"output_bytes": 8}]
TWO = [(0, 0, 0), (1, 1, 1)]


def ranks(plan: Plan) -> list[str]:
    """The action lists of a lowered plan as text."""
    return [" ".join(map(str, rank)) for rank in lower(plan).ranks]


class TestOrder:
    """(O1) to (O5)."""

    def test_two_stages(self) -> None:
        """The sample, worked out by hand: ends and receives first, then sends, updates, starts.

        GPU 0: 0B ends at 16 = 0, so OPT and then F; at 2 the receive, posted for the transfer at
        10 = 2, precedes the send at 2, whose bytes leave at 4.
        """
        assert ranks(two_stages()) == [
            "0OPT0+2 0F0+0 0RECV_B0+1 0SEND_F0+0 0FREE_F0+0 0B0+1",
            "1RECV_F0+0 1SEND_B0+1 1OPT0+1 1FREE_B0+1 1F0+0 1B0+0",
        ]

    def test_flush_has_no_updates_in_the_period(self) -> None:
        """Under flush the pattern holds no OPT: updates follow the drain."""
        assert "OPT" not in str(lower(two_stages(semantics="flush")))

    def test_what_falls_into_a_compute_happens_at_its_start(self) -> None:
        """(O1)-(O3): sent at 5 inside 0B (4..6): issued at 4; GPU 1 computes 3..5: posted at 3."""
        of = handmade.chain([(2, 2), (2, 2)], PAIR)
        times = {"0F0": 0, "0SEND_F0": 5, "1F0": 7, "1B0": 11, "1SEND_B0": 14, "0B0": 20}
        plan = handmade.plan(of, TWO, 8, times, cluster=uniform(2, 1000, latency_ns=1))
        # 0B at 20 = 4 and 1B at 11 = 3; FREE_F at 6, as 0B ends; SEND_B at 14 = 6, its RECV too.
        assert ranks(plan) == [
            "0F0+0 0SEND_F0+0 0B0+2 0FREE_F0+0 0RECV_B0+1 0OPT0+2",
            "1RECV_F0+0 1B0+1 1OPT0+1 1SEND_B0+1 1FREE_B0+1 1F0+0",
        ]

    def test_a_receive_may_belong_to_an_earlier_period(self) -> None:
        """A receive held by a compute that wraps around the period is posted a period before."""
        of = handmade.chain([(1, 1), (6, 1)], PAIR)
        times = {"0F0": 0, "0SEND_F0": 1, "1F0": 6, "1B0": 12, "1SEND_B0": 13, "0B0": 13}
        plan = handmade.plan(of, TWO, 10, times)
        # 1F occupies 6..12 = 6..10 and 0..2, so the transfer at 1 is posted at 6 of period -1.
        assert "1RECV_F0-1 1F0+0" in ranks(plan)[1]

    def test_neighbours_on_one_gpu_exchange_no_messages(self) -> None:
        """Between stages of one GPU there is nothing to send, receive or free."""
        of = handmade.chain([(2, 2), (2, 2)], PAIR)
        text = str(lower(handmade.packed(of, [(0, 0, 0), (1, 1, 0)], 8, semantics="flush")))
        assert text.splitlines()[1] == "0,1: 0F0+0 1F0+0 1B0+0 0B0+0"

    def test_a_transfer_of_no_length_is_freed_after_its_send(self) -> None:
        """Class 2 of (O5): compute, SEND, FREE of one instant in chain order."""
        of = handmade.chain([(0, 2), (2, 2)], PAIR)
        times = {"0F0": 0, "0SEND_F0": 0, "1F0": 0, "1B0": 2, "1SEND_B0": 4, "0B0": 4}
        plan = handmade.plan(of, TWO, 8, times, semantics="flush")
        assert ranks(plan)[0].startswith("0F0+0 0SEND_F0+0 0FREE_F0+0")

    def test_gpus_without_stages_do_nothing(self) -> None:
        """A GPU that the plan does not use has an empty list and hosts nothing."""
        of = handmade.chain([(2, 2)])
        pattern = lower(handmade.packed(of, [(0, 0, 1)], 4))
        assert pattern.ranks[0] == ()
        assert pattern.hosted == ((), (0,))

    def test_k_copies(self) -> None:
        """Every action is there once per copy."""
        of = handmade.chain([(1, 1), (1, 1)], PAIR)
        times = {"0F0": 0, "0F1": 1, "1F0": 2, "1F1": 4, "1B0": 3, "1B1": 5, "0B0": 4, "0B1": 6}
        sends = {"0SEND_F0": 1, "0SEND_F1": 2, "1SEND_B0": 4, "1SEND_B1": 6}
        pattern = lower(handmade.plan(of, TWO, 8, times | sends, k=2))
        for rank in pattern.ranks:
            assert len(rank) == len(set(rank)) == 12
            assert {action.copy for action in rank} == {0, 1}

    @pytest.mark.parametrize(
        ("change", "text"),
        [
            (lambda ops: ops[1:], "op 0F0: got no, need one"),
            (lambda ops: (*ops, ops[0]), "op 0F0: got it twice"),
            (lambda ops: ops[:1], "need one"),
        ],
    )
    def test_plans_with_missing_or_double_ops(
        self, change: Callable[[tuple[Op, ...]], tuple[Op, ...]], text: str
    ) -> None:
        """A plan without sound ops is refused, with the op's name."""
        plan = two_stages()
        with pytest.raises(InvalidPlanError, match=text):
            lower(plan.model_copy(update={"ops": change(plan.ops)}))


class TestBuffers:
    """`buffer_slots`."""

    def test_one_slot_is_enough_for_quick_messages(self) -> None:
        """In the sample every message is gone before the next comes."""
        assert set(buffer_slots(lower(two_stages())).values()) == {1}

    def test_messages_that_wait_need_more(self) -> None:
        """1F two periods after its message: posted at 2, taken at 18 = 2 after the new post."""
        of = handmade.chain([(2, 2), (2, 2)], PAIR)
        times = {"0F0": 0, "0SEND_F0": 2, "1F0": 18, "1B0": 20, "1SEND_B0": 22, "0B0": 22}
        slots = buffer_slots(lower(handmade.plan(of, TWO, 8, times)))
        assert slots[ActionKind.RECV_F, 1] == 3
        assert slots[ActionKind.SEND_F, 0] == 1


KEEPS = [{"output_bytes": 8, "saved_bytes": 3}] * 2
HOST_TIMES = {"0OFFLOAD0": 5, "0PREFETCH0": 16}


def offloading(times: dict[str, int] = HOST_TIMES) -> Plan:
    """T = 8; GPU 0: 0F 0..2, 0B 20..22 = 4..6; stage 0 sends 3 bytes to the host in 3 ns."""
    of = handmade.chain([(2, 2), (2, 2)], KEEPS)
    computes = {"0F0": 0, "1F0": 2, "1B0": 4, "0B0": 20}
    return offloaded(handmade.plan(of, TWO, 8, computes), {0: ((0, 0),)}, {0: 3}, times)


class TestOffloading:
    """(H2) and (H5)."""

    def test_the_order(self) -> None:
        """OFFLOAD at 5 inside 0B (4..6): issued at 4, given back at 8; PREFETCH at 16 = 0.

        At 0 the FREE is class 0, the PREFETCH class 1, 0F class 4.
        """
        assert ranks(offloading())[0] == (
            "0FREE_O0+1 0PREFETCH0+2 0F0+0 0SEND_F0+0 0FREE_F0+0"
            " 0OFFLOAD0+0 0B0+2 0RECV_B0+0 0OPT0+2"
        )

    def test_a_prefetch_inside_a_compute_is_posted_at_its_start(self) -> None:
        """PREFETCH at 17 inside 0F (16..18): posted at 16, before it."""
        order = ranks(offloading(HOST_TIMES | {"0PREFETCH0": 17}))[0]
        assert order.startswith("0FREE_O0+1 0PREFETCH0+2 0F0+0")

    def test_all_that_happens_at_one_instant(self) -> None:
        """At 2: both F of no length, then the OFFLOAD (class 2, last position), then 1F (class 4).

        PREFETCH at 15 = 5 inside 1F1 (4..6) is posted at 4; OFFLOAD ends at 5, after 1F1 began.
        """
        of = handmade.chain([(0, 1), (2, 1)], KEEPS)
        times = {"0F0": 2, "0F1": 2, "1F0": 2, "1F1": 4, "1B0": 6, "1B1": 7, "0B0": 18, "0B1": 19}
        plan = handmade.plan(of, [(0, 0, 0), (1, 1, 0)], 10, times, k=2)
        runs, host = {0: ((0, 0),)}, {"0OFFLOAD1": 2, "0PREFETCH1": 15}
        order = ranks(offloaded(plan, runs, {0: 3}, host))[0]
        assert order.startswith(
            "0OPT1+2 0F0+0 0F1+0 0OFFLOAD1+0 1F0+0 0PREFETCH1+1 1F1+0 0FREE_O1+0"
        )

    def test_no_circle_and_no_peer(self) -> None:
        """The lowered pattern ends even where sends block; message buffers stay as they are."""
        plan = offloading()
        check_deadlock(lower(plan))
        without = plan.model_copy(
            update={
                "ops": tuple(op for op in plan.ops if not op.kind.is_host),
                "stages": tuple(s.model_copy(update={"remat": None}) for s in plan.stages),
            }
        )
        assert buffer_slots(lower(plan)) == buffer_slots(lower(without))

    @pytest.mark.parametrize(
        ("times", "text"),
        [
            ({"0OFFLOAD0": 5}, "op 0PREFETCH0: got no, need one"),
            ({"0PREFETCH0": 16}, "op 0OFFLOAD0: got no, need one"),
            ({}, "op 0OFFLOAD0: got no, need one"),
            (HOST_TIMES | {"1OFFLOAD0": 5}, "op 1OFFLOAD0: got one, need none"),
        ],
    )
    def test_both_ops_or_neither(self, times: dict[str, int], text: str) -> None:
        """(H2): a copy with one of the two, a stage with none, a stage that offloads nothing."""
        of = handmade.chain([(2, 2), (2, 2)], KEEPS)
        plan = handmade.plan(of, TWO, 8, {"0F0": 0, "1F0": 2, "1B0": 4, "0B0": 20})
        with pytest.raises(InvalidPlanError, match=text):
            lower(offloaded(plan, {0: ((0, 0),)}, {0: 3, 1: 3}, times))

    def test_an_op_twice(self) -> None:
        """An OFFLOAD given twice is named."""
        plan = offloading()
        with pytest.raises(InvalidPlanError, match="op 0OFFLOAD0: got it twice"):
            lower(plan.model_copy(update={"ops": (*plan.ops, plan.ops[-2])}))

    def test_some_copies_only(self) -> None:
        """Copies without the two ops are fine beside one that has them."""
        of = handmade.chain([(1, 1), (1, 1)], KEEPS)
        times = {"0F0": 0, "0F1": 1, "1F0": 2, "1F1": 4, "1B0": 3, "1B1": 5, "0B0": 14, "0B1": 15}
        plan = handmade.plan(of, TWO, 8, times, k=2)
        host = {"0OFFLOAD1": 2, "0PREFETCH1": 10}
        text = str(lower(offloaded(plan, {0: ((0, 0),)}, {0: 3}, host)))
        assert text.count("OFFLOAD1") == text.count("FREE_O1") == text.count("PREFETCH1") == 1
        assert "OFFLOAD0" not in text


GOOD = """\
0F0 0SEND_F0 0FREE_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0OPT
1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1OPT
"""
CROSSING = """\
0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1
"""


class TestDeadlock:
    """`wait_cycle` and `check_deadlock` on hand-written programs."""

    def test_a_program_that_ends(self) -> None:
        """Receives that are posted before their sends block nothing, if sends do not block."""
        assert wait_cycle(Program.parse(GOOD), blocking=False) is None

    def test_crossing_sends_block_each_other(self) -> None:
        """Two ranks that each send first: the circle names both, in the order of the waits."""
        cycle = wait_cycle(Program.parse(CROSSING))
        assert cycle is not None
        assert sorted(cycle) == [
            "rank 0: 0RECV_B0 comes after 0SEND_F1",
            "rank 0: 0SEND_F1 waits for rank 1: 1RECV_F1",
            "rank 1: 1RECV_F1 comes after 1SEND_B0",
            "rank 1: 1SEND_B0 waits for rank 0: 0RECV_B0",
        ]
        following = dict.fromkeys(cycle)
        for line in following:  # each line ends where the next begins
            target = line.rsplit(" ", 1)[1]
            after = cycle[(cycle.index(line) + 1) % len(cycle)]
            assert after.split()[2] == target

    def test_crossing_sends_pass_if_they_do_not_block(self) -> None:
        """The same program ends with buffered sends."""
        assert wait_cycle(Program.parse(CROSSING), blocking=False) is None

    def test_early_receives_cure_it(self) -> None:
        """With its receive before the send, the program ends even with blocking sends."""
        cured = CROSSING.replace("0SEND_F1 0RECV_B0", "0RECV_B0 0SEND_F1")
        assert wait_cycle(Program.parse(cured)) is None

    def test_the_error_prints_the_circle(self) -> None:
        """The message holds every line, says when it happens, and ends with a next step."""
        with pytest.raises(DeadlockError, match="0SEND_F1 waits for rank 1: 1RECV_F1") as caught:
            check_deadlock(Program.parse(CROSSING))
        assert len(caught.value.cycle) == 4
        assert caught.value.exit_code == 4
        assert "block" in str(caught.value)
        assert "post the receive earlier" in str(caught.value)

    def test_waiting_for_oneself(self) -> None:
        """A consumer before its producer on one rank is a circle of its own."""
        cycle = wait_cycle(Program.parse("0B0 0F0"), blocking=False)
        assert cycle is not None
        assert set(cycle) == {"rank 0: 0F0 comes after 0B0", "rank 0: 0B0 waits for rank 0: 0F0"}

    def test_a_free_waits_for_the_transfer(self) -> None:
        """FREE before the peer can post its receive never ends, sends blocking or not."""
        text = "0F0 0SEND_F0 0FREE_F0 0F1 0SEND_F1\n1RECV_F1 1F1 1RECV_F0 1F0\n"
        assert wait_cycle(Program.parse(text.replace("0FREE_F0 ", "")), blocking=False) is None
        cycle = wait_cycle(Program.parse(text), blocking=False)
        assert cycle is not None
        assert any("0FREE_F0" in line for line in cycle)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("0F0 0SEND_F0\n1F0\n", "0SEND_F0 needs 1RECV_F0, which no rank has"),
            ("0F0\n1RECV_F0 1F0\n", "1RECV_F0 needs 0SEND_F0, which no rank has"),
            ("0F0\n1F0\n", "1F0 needs 1RECV_F0, which no rank has"),
            ("0F0 0SEND_F0\n1RECV_F0\n", "1RECV_F0 needs 1F0, which no rank has"),
            ("0SEND_F0\n1RECV_F0 1F0\n", "0SEND_F0 needs 0F0, which no rank has"),
            ("0F0 0FREE_F0\n1B0\n", "0FREE_F0 needs 0SEND_F0, which no rank has"),
            ("0F0 0B0 0F0\n", "rank 0: got 0F0 twice"),
            ("0F0 0SEND_F0 0SEND_F0\n1RECV_F0 1F0\n", "got 0SEND_F0 twice"),
            ("0F0\n0B0\n", "rank 1: got 0B0, need it on rank 0"),
            ("0F0 0SEND_F0 1RECV_F0 1F0\n", "need no message between stages 0 and 1"),
            ("0B0\n", "0B0 needs 0F0, which no rank has"),
            ("0F1 0SEND_F1\n1RECV_F0 1F0\n", "needs"),
            ("1F0\n0F1\n", "1F0 needs 0F0, which no rank has"),
        ],
    )
    def test_incomplete_programs(self, text: str, message: str) -> None:
        """Messages without an end, doubles and strays are refused with rank and action."""
        with pytest.raises(InputError, match=message):
            check_deadlock(Program.parse(text))

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("0OFFLOAD0 0FREE_O0\n", "0OFFLOAD0 needs 0F0, which no rank has"),
            ("0F0 0FREE_O0\n", "0FREE_O0 needs 0OFFLOAD0, which no rank has"),
            ("0F0 0PREFETCH0 0B0\n", "0PREFETCH0 needs 0OFFLOAD0, which no rank has"),
            ("0F0 0OFFLOAD0 0FREE_O0 0B0\n", "0B0 needs 0PREFETCH0, which no rank has"),
            ("0F0 0OFFLOAD0 0PREFETCH0\n", "0PREFETCH0 needs 0B0, which no rank has"),
        ],
    )
    def test_incomplete_offloading(self, text: str, message: str) -> None:
        """What is taken to the host exists, and comes back for its backward."""
        with pytest.raises(InputError, match=message):
            check_deadlock(Program.parse(text))

    @pytest.mark.parametrize(
        ("text", "wait"),
        [
            ("0OFFLOAD0 0FREE_O0 0F0 0PREFETCH0 0B0", "0FREE_O0 waits for rank 0: 0F0"),
            ("0OFFLOAD0 0PREFETCH0 0F0 0FREE_O0 0B0", "0PREFETCH0 waits for rank 0: 0F0"),
            ("0F0 0FREE_O0 0OFFLOAD0 0PREFETCH0 0B0", "0FREE_O0 waits for rank 0: 0OFFLOAD0"),
            ("0F0 0PREFETCH0 0OFFLOAD0 0FREE_O0 0B0", "0PREFETCH0 waits for rank 0: 0OFFLOAD0"),
            ("0F0 0OFFLOAD0 0FREE_O0 0B0 0PREFETCH0", "0B0 waits for rank 0: 0PREFETCH0"),
        ],
    )
    def test_offloading_in_a_wrong_order(self, text: str, wait: str) -> None:
        """Each action behind what it waits for, on its own rank; blocking sends or not.

        An input may begin to leave with the forward that comes next.
        """
        cycle = wait_cycle(Program.parse(text), blocking=False)
        assert cycle is not None
        assert f"rank 0: {wait}" in cycle
        for right in ("0F0 0OFFLOAD0 0FREE_O0", "0OFFLOAD0 0F0 0FREE_O0"):
            assert wait_cycle(Program.parse(f"{right} 0PREFETCH0 0B0")) is None

    def test_a_pattern_is_unrolled(self) -> None:
        """With all receives at the end of the period it deadlocks; as lowered it does not."""
        pattern = lower(handmade.base())
        check_deadlock(pattern)
        late = [
            (
                *(action for action in rank if not action.kind.startswith("RECV")),
                *(action for action in rank if action.kind.startswith("RECV")),
            )
            for rank in pattern.ranks
        ]
        with pytest.raises(DeadlockError):
            check_deadlock(replace(pattern, ranks=tuple(late)))

    def test_windows_without_end(self) -> None:
        """A backward a million periods after its forward is refused, not unrolled."""
        times = {"0F0": 0, "1F0": 2, "1B0": 4, "0B0": 8 * 10**6 + 6}
        of = handmade.chain([(2, 2), (2, 2)])
        pattern = lower(handmade.plan(of, [(0, 0, 0), (1, 1, 0)], 8, times))
        with pytest.raises(InputError, match="Plan for fewer micro-batches in flight"):
            check_deadlock(pattern)

    def test_forward_only_programs_are_programs(self) -> None:
        """Evaluation has no backwards: only what is there is judged."""
        assert wait_cycle(Program.parse("0F0 0SEND_F0\n1RECV_F0 1F0\n")) is None
