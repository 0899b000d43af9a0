"""The replay: clocks, ledger, what it measures, and what it refuses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Literal

import pytest

from pipeplan.cluster import uniform
from pipeplan.errors import DeadlockError, InputError, InvalidPlanError
from pipeplan.lowering import lower
from pipeplan.plan import OpKind, Plan
from pipeplan.program import Pattern, PeriodicAction, Program
from pipeplan.simulator import Clock, Simulation, check, disagreements, replay, simulate
from tests import handmade
from tests.samples import two_stages

PAIR = [{"output_bytes": 8}, {"output_bytes": 8}]
TWO = [(0, 0, 0), (1, 1, 1)]


def spans(simulation: Simulation, microbatch: int) -> dict[str, tuple[int, int]]:
    """Start and end of every op of one micro-batch, by stage and kind."""
    return {
        f"{span.stage}{span.kind}": (span.start_ns, span.end_ns)
        for span in simulation.spans()
        if span.microbatch == microbatch
    }


def reordered(pattern: Pattern, rank: int, order: Sequence[str]) -> Pattern:
    """The pattern with other actions on one rank."""
    ranks = list(pattern.ranks)
    ranks[rank] = tuple(map(PeriodicAction.parse, order))
    return replace(pattern, ranks=tuple(ranks))


class TestPlanClock:
    """Everything happens when the plan says, or is refused."""

    def test_times_are_the_plans(self) -> None:
        """Micro-batch m happens m periods after micro-batch 0, whose times the plan lists."""
        simulation = simulate(handmade.base(), lower(handmade.base()))
        first = {
            "0F": (0, 10),
            "0SEND_F": (10, 15),
            "1F": (15, 35),
            "1SEND_F": (35, 41),
            "2F": (41, 51),
            "2B": (70, 80),
            "2SEND_B": (80, 86),
            "1B": (95, 115),
            "1SEND_B": (115, 120),
            "0B": (140, 150),
        }
        assert spans(simulation, 0) == first
        assert spans(simulation, 3) == {op: (a + 180, b + 180) for op, (a, b) in first.items()}

    def test_measures(self) -> None:
        """Period 60 with 40 ns of work per GPU; 2bw step of 4: 240; counts by hand."""
        simulation = simulate(handmade.base(), lower(handmade.base()))
        assert simulation.period_ns == 60
        assert simulation.step_ns == 240
        assert simulation.bubble == pytest.approx((1 / 3, 1 / 3))
        assert simulation.in_flight == (3, 2, 1)
        assert simulation.makespan_ns == (simulation.microbatches - 1) * 60 + 150
        assert simulation.left_bytes == (0, 0)

    def test_bytes_by_hand(self) -> None:
        """GPU 1 at the start of 1F (15): two micro-batches keep 9 each; F needs 3 + 9 + 4 = 16.

        The gradient of 4 bytes comes at 80 = 20, inside 1F, so its receive is posted at 15. States
        are two versions of 200 and a gradient of 200.
        """
        row = simulate(handmade.base(), lower(handmade.base())).memory[1]
        assert (row.states_bytes, row.saved_bytes, row.working_bytes) == (600, 18, 16 - 9)
        assert (row.direct_bytes, row.message_bytes, row.peak_bytes) == (0, 4, 629)

    def test_peaks_say_where(self) -> None:
        """The first event of the steady period that reaches the peak, by action."""
        peak = simulate(handmade.base(), lower(handmade.base())).peaks[1]
        assert peak.event.startswith("1F")
        assert peak.time_ns % 60 == 15

    def test_the_claims_are_checked(self) -> None:
        """`check` returns the replay of a plan whose numbers are right."""
        assert check(handmade.base(), lower(handmade.base())).clock == "plan"

    @pytest.mark.parametrize(
        ("change", "what"),
        [
            ({"step_ns": 239}, "step, plan: got 239, the replay has 240"),
            ({"memory": handmade.base().memory[:1]}, "memory, plan"),
        ],
    )
    def test_wrong_claims_are_refused(self, change: dict[str, object], what: str) -> None:
        """A step or a table that the replay does not confirm is named with both numbers."""
        plan = handmade.base().model_copy(update=change)
        with pytest.raises(InvalidPlanError, match=what):
            check(plan, lower(plan))

    def test_every_byte_of_the_table_is_compared(self) -> None:
        """One byte more in any column of any row is found."""
        plan = handmade.base()
        simulation = simulate(plan, lower(plan))
        for gpu, row in enumerate(plan.memory):
            for name in type(row).model_fields:
                rows = list(plan.memory)
                rows[gpu] = row.model_copy(update={name: getattr(row, name) + 1})
                wrong = plan.model_copy(update={"memory": tuple(rows)})
                found = list(disagreements(wrong, simulation))
                assert [each.where for each in found] == [f"GPU {gpu}, {name}"]

    def test_one_byte_over_the_budget(self) -> None:
        """A GPU with one byte less than the peak is refused, with both numbers."""
        plan = handmade.base(cluster=uniform(2, 628, bandwidth_bytes_per_s=10**9, latency_ns=2))
        with pytest.raises(InvalidPlanError, match="got 629 bytes at once, need at most 628"):
            check(plan, lower(plan))

    @pytest.mark.parametrize(
        ("op", "time", "what"),
        [
            ("1F0", 14, "1F0: is due at 14 ns, can start at 15 ns, when its input arrives"),
            ("0B0", 128, "0B0: is due at 128 ns, can start at 130 ns, when the GPU is busy"),
        ],
    )
    def test_what_is_not_ready_is_refused(self, op: str, time: int, what: str) -> None:
        """An op without its input or on a busy GPU is named with both times."""
        plan = handmade.moved(handmade.base(), op, time)
        with pytest.raises(InvalidPlanError, match=what):
            simulate(plan, lower(plan))

    def test_half_duplex_links_are_shared(self) -> None:
        """Transfers of both directions at one time pass a full link and not a half one."""
        times = {"0F0": 0, "0SEND_F0": 2, "1F0": 4, "1B0": 6, "1SEND_B0": 10, "0B0": 20}
        of = handmade.chain([(2, 4), (2, 4)], PAIR)
        full = uniform(2, 1000, bandwidth_bytes_per_s=4 * 10**9)
        plan = handmade.plan(of, TWO, 8, times, cluster=full)
        check(plan, lower(plan))
        shared = handmade.with_duplex(plan, "half")
        with pytest.raises(InvalidPlanError, match=r"link, transfer .* when the link is free"):
            simulate(shared, lower(shared))

    def test_micro_batches_out_of_order_are_refused(self) -> None:
        """(R5): copy 1 before copy 0 is a fifo discrepancy."""
        of = handmade.chain([(1, 1)])
        times = {"0F0": 2, "0F1": 1, "0B0": 4, "0B1": 5}
        plan = handmade.plan(of, [(0, 0, 0)], 6, times, k=2)
        with pytest.raises(InvalidPlanError, match="fifo, op 0F1"):
            simulate(plan, lower(plan))

    def test_two_weight_versions_are_not_enough(self) -> None:
        """(R6): with three in flight and steps of one, 0F2 lacks its weights; steps of two do."""
        plan = handmade.base(microbatches=2)
        check(plan, lower(plan))
        plan = handmade.base(microbatches=1)
        with pytest.raises(InvalidPlanError, match="versions, op 0F2: starts before the update"):
            simulate(plan, lower(plan))

    def test_a_forward_of_no_length_precedes_the_update_of_its_instant(self) -> None:
        """(R6), (O5): 0F of length 0 starts as 0B ends; its step of one is too short by one."""
        of = handmade.chain([(0, 2)])
        times = {"0F0": 0, "0B0": 2}
        plan = handmade.plan(of, [(0, 0, 0)], 4, times, microbatches=1)
        check(plan, lower(plan))
        tight = handmade.plan(of, [(0, 0, 0)], 2, {"0F0": 0, "0B0": 2}, microbatches=1)
        with pytest.raises(InvalidPlanError, match="versions"):
            simulate(tight, lower(tight))

    def test_short_runs_measure_nothing_steady(self) -> None:
        """One micro-batch has no period; its times and bytes are still reported."""
        simulation = simulate(handmade.base(), lower(handmade.base()), microbatches=1)
        assert simulation.period_ns is None
        assert simulation.step_ns is None
        assert simulation.makespan_ns == 150
        assert simulation.in_flight == (1, 1, 1)
        assert simulation.steady_peak_bytes == (450, 600)


class TestPrograms:
    """What is wrong with the actions shows even where the plan is right."""

    def test_a_late_receive_is_refused(self) -> None:
        """Posted a compute too late: the receive and with it the transfer miss their times."""
        plan = handmade.base()
        pattern = lower(plan)
        order = [str(action) for action in pattern.ranks[0]]
        order.remove("0RECV_B0+1")
        order.insert(order.index("0F0+0") + 1, "0RECV_B0+2")
        with pytest.raises(InvalidPlanError, match="0RECV_B0: is due at 115 ns, can start at 130"):
            simulate(plan, reordered(pattern, 0, order))

    def test_an_early_receive_costs_bytes(self) -> None:
        """Posted a period early, one more message is alive: the table is no longer true."""
        plan = handmade.base()
        pattern = lower(plan)
        order = [str(action).replace("2RECV_F0+0", "2RECV_F0-1") for action in pattern.ranks[0]]
        simulation = simulate(plan, reordered(pattern, 0, order))
        assert {each.what for each in disagreements(plan, simulation)} == {"memory"}

    def test_an_early_free_delays_the_next_compute(self) -> None:
        """A FREE right after its send blocks the rank until the transfer ends."""
        plan = handmade.base()
        pattern = lower(plan)
        order = [str(action) for action in pattern.ranks[0]]
        order.remove("2FREE_B0+1")
        order.insert(order.index("2SEND_B0+1") + 1, "2FREE_B0+1")
        with pytest.raises(InvalidPlanError, match="0B0: is due at 140 ns"):
            simulate(plan, reordered(pattern, 0, order))

    def test_a_missing_free_leaves_bytes(self) -> None:
        """What nothing frees is left at the end: 3 bytes per micro-batch."""
        plan = handmade.base()
        pattern = lower(plan)
        order = [str(action) for action in pattern.ranks[0] if str(action) != "0FREE_F0+0"]
        simulation = simulate(plan, reordered(pattern, 0, order), microbatches=10)
        assert simulation.left_bytes == (30, 0)

    def test_computes_in_another_order_are_refused(self) -> None:
        """Two computes exchanged in the list cannot both be in time."""
        plan = handmade.base()
        pattern = lower(plan)
        order = [str(action) for action in pattern.ranks[1]]
        i, j = order.index("1F0+0"), order.index("1B0+1")
        order[i], order[j] = order[j], order[i]
        with pytest.raises((InvalidPlanError, DeadlockError)):
            simulate(plan, reordered(pattern, 1, order))

    @pytest.mark.parametrize("clock", ["plan", "eager"])
    def test_circles_are_told(self, clock: Clock) -> None:
        """Ranks that wait for each other stop the run with a line per wait."""
        plan = handmade.base()
        pattern = lower(plan)
        order = [str(action) for action in pattern.ranks[1]]
        order.remove("1SEND_F0+0")
        order.insert(order.index("1B0+1") + 1, "1SEND_F0+2")
        with pytest.raises(DeadlockError, match="ranks wait for ever") as caught:
            simulate(plan, reordered(pattern, 1, order), clock=clock)
        assert all(" waits for " in line for line in caught.value.cycle)


class TestEagerClock:
    """Everything happens as soon as it can."""

    def test_slack_is_not_waited_for(self) -> None:
        """Micro-batch 0: 2B follows 2F and 0F of micro-batch 1 (51..61), all else its input."""
        simulation = simulate(handmade.base(), lower(handmade.base()), clock="eager")
        first = spans(simulation, 0)
        assert first["2F"] == (41, 51)
        assert first["2B"] == (61, 71)
        assert first["2SEND_B"] == (71, 77)
        assert simulation.period_ns is not None
        assert simulation.period_ns < 60

    def test_peaks_and_counts_stay(self) -> None:
        """(O7): the order of the list fixes the bytes."""
        plan = handmade.base()
        eager = simulate(plan, lower(plan), clock="eager")
        assert [row.peak_bytes for row in eager.memory] == [r.peak_bytes for r in plan.memory]
        assert eager.in_flight == (3, 2, 1)

    def test_updates_take_their_time(self) -> None:
        """One GPU, F 2, B 3, optimizer 7, steps of 2: 5 per micro-batch and 7 per step."""
        of = handmade.chain([(2, 3)], [{"output_bytes": 1, "optimizer_ns": 7}])
        plan = handmade.packed(of, [(0, 0, 0)], 5, microbatches=2)
        with_updates = simulate(plan, lower(plan), clock="eager", updates=True)
        assert with_updates.period_ns == Fraction(2 * 5 + 7, 2)
        assert with_updates.step_ns == 17
        assert simulate(plan, lower(plan), clock="eager").period_ns == 5

    def test_flush_drains_then_updates(self) -> None:
        """Step of 8: 7 periods of 8, 16 for the last, the slowest update of 5; as (T5) says."""
        plan = two_stages(semantics="flush")
        layers = tuple(
            layer.model_copy(update={"optimizer_ns": ns})
            for layer, ns in zip(plan.chain.layers, (5, 3), strict=True)
        )
        plan = plan.model_copy(update={"chain": plan.chain.model_copy(update={"layers": layers})})
        pattern = lower(plan)
        assert simulate(plan, pattern).step_ns == 7 * 8 + 16 + 5
        eager = simulate(plan, pattern, clock="eager", updates=True)
        assert eager.microbatches == 8
        assert eager.step_ns == eager.makespan_ns == 7 * 8 + 16 + 5
        two = simulate(plan, pattern, clock="eager", updates=True, microbatches=16)
        assert two.makespan_ns == 2 * (7 * 8 + 16 + 5)

    @pytest.mark.parametrize(("microbatches", "step"), [(1, 16), (3, 32), (500, 499 * 8 + 16)])
    def test_steps_of_any_length(self, microbatches: int, step: int) -> None:
        """(T5) for steps shorter and longer than the run: m - 1 periods and 16 for the last."""
        plan = two_stages(semantics="flush").model_copy(update={"microbatches": microbatches})
        assert simulate(plan, lower(plan)).step_ns == step

    def test_the_update_after_a_flush_can_be_the_peak(self) -> None:
        """An optimizer workspace above all else shows in the table, at the update."""
        layers = [{"output_bytes": 1, "optimizer_workspace_bytes": 50, "weight_bytes": 3}]
        of = handmade.chain([(2, 3)], layers)
        plan = handmade.packed(of, [(0, 0, 0)], 5, semantics="flush")
        simulation = check(plan, lower(plan))
        assert simulation.memory[0].working_bytes == 50
        assert simulation.memory[0].peak_bytes == 53
        assert simulation.peaks[0].event == "0OPT"
        assert max(simulation.drain_peak_bytes) < 50


class TestPaperModel:
    """(P1) to (P5)."""

    def test_slots_for_messages_that_wait(self) -> None:
        """Taken 16 after it came, T = 8: two slots of 8 at the receiver, one at the sender."""
        of = handmade.chain([(2, 2), (2, 2)], PAIR)
        times = {"0F0": 0, "0SEND_F0": 2, "1F0": 18, "1B0": 20, "1SEND_B0": 22, "0B0": 22}
        plan = handmade.plan(of, TWO, 8, times, memory_model="paper")
        rows = check(plan, lower(plan)).memory
        assert rows[1].message_bytes == 2 * 8 + 8
        assert rows[0].message_bytes == 8 + 8

    def test_three_copies_of_the_weights(self) -> None:
        """(P1): states are 3 W, whatever gradients and optimizer take."""
        plan = handmade.base(memory_model="paper")
        assert [row.states_bytes for row in check(plan, lower(plan)).memory] == [450, 600]


class TestReplay:
    """Hand-written programs."""

    def plan(self) -> Plan:
        """Two stages; F lasts 2, B 4, a transfer 2."""
        return two_stages()

    def test_times_of_a_hand_written_program(self) -> None:
        """One micro-batch there and back: 2 + 2 + 2 + 4 + 2 + 4."""
        text = "0F0 0RECV_B0 0SEND_F0 0FREE_F0 0B0\n1RECV_F0 1F0 1B0 1SEND_B0 1FREE_B0\n"
        simulation = replay(self.plan(), Program.parse(text))
        assert simulation.makespan_ns == 16
        assert spans(simulation, 0)["0B"] == (12, 16)
        assert simulation.left_bytes == (0, 0)

    @pytest.mark.parametrize(("duplex", "gradient"), [("half", (12, 14)), ("full", (10, 12))])
    def test_a_link_takes_what_is_ready_first(
        self, duplex: Literal["full", "half"], gradient: tuple[int, int]
    ) -> None:
        """Outputs 1 and 2 are ready at 8, the gradient at 10: on a shared link it comes last."""
        text = (
            "0F0 0RECV_B0 0SEND_F0 0F1 0F2 0F3 0SEND_F1 0SEND_F2 0B0\n"
            "1RECV_F0 1RECV_F1 1RECV_F2 1F0 1B0 1SEND_B0\n"
        )
        simulation = replay(two_stages(duplex=duplex), Program.parse(text))
        assert spans(simulation, 1)["0SEND_F"] == (8, 10)
        assert spans(simulation, 2)["0SEND_F"] == (10, 12)
        assert spans(simulation, 0)["1SEND_B"] == gradient

    def test_updates(self) -> None:
        """OPT is free of charge unless updates are on."""
        layers = tuple(
            layer.model_copy(update={"optimizer_ns": 5}) for layer in self.plan().chain.layers
        )
        chain = self.plan().chain.model_copy(update={"layers": layers})
        plan = self.plan().model_copy(update={"chain": chain})
        program = Program.parse("0F0 0OPT 0F1\n\n")
        assert replay(plan, program).makespan_ns == 4
        assert replay(plan, program, updates=True).makespan_ns == 9

    def test_deadlock(self) -> None:
        """Each rank waits for the other's later send: both waits are told."""
        text = "0RECV_B0 0F0 0B0 0SEND_F0\n1RECV_F0 1F0 1B0 1SEND_B0\n"
        with pytest.raises(DeadlockError) as caught:
            replay(self.plan(), Program.parse(text))
        assert caught.value.cycle == (
            "rank 0: 0B0 waits for 1SEND_B0, which rank 1 has later",
            "rank 1: 1F0 waits for 0SEND_F0, which rank 0 has later",
        )

    def test_a_wait_for_nothing(self) -> None:
        """An action that no rank has is named as such."""
        with pytest.raises(DeadlockError, match="1F0 waits for 0SEND_F0, which no rank has"):
            replay(self.plan(), Program.parse("0F0\n1RECV_F0 1F0\n"))

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("7F0\n", "rank 0: got 7F0, which the plan has on no rank"),
            ("1F0\n", "rank 0: got 1F0, which the plan has on rank 1"),
            ("0RECV_F0\n", "got 0RECV_F0, which the plan has on no rank"),
            ("0F0 0F0\n", "got 0F0 twice"),
            ("0F999999\n", "need micro-batches counted from 0"),
        ],
    )
    def test_programs_of_another_plan(self, text: str, message: str) -> None:
        """What the plan does not have is refused with rank and action."""
        with pytest.raises(InputError, match=message):
            replay(self.plan(), Program.parse(text))

    def test_the_empty_program(self) -> None:
        """Nothing to do takes no time and no bytes."""
        simulation = replay(self.plan(), Program.parse("\n\n"))
        assert simulation.makespan_ns == 0
        assert simulation.in_flight == (0, 0)


class TestInput:
    """Wrong calls and plans that cannot be replayed."""

    def test_patterns_of_another_plan(self) -> None:
        """Pattern and plan must agree on k, semantics, steps and stages."""
        with pytest.raises(InputError, match="pattern of another plan"):
            simulate(two_stages(), lower(handmade.base()))
        with pytest.raises(InputError, match="pattern of another plan"):
            simulate(two_stages(), lower(two_stages(semantics="flush")))

    def test_updates_need_the_eager_clock(self) -> None:
        """The plan clock has no time for updates."""
        with pytest.raises(InputError, match="need the eager clock"):
            simulate(two_stages(), lower(two_stages()), updates=True)

    def test_no_micro_batches(self) -> None:
        """At least one micro-batch."""
        with pytest.raises(InputError, match="got 0 micro-batches, need at least 1"):
            simulate(two_stages(), lower(two_stages()), microbatches=0)

    @pytest.mark.parametrize(
        ("change", "what"),
        [
            ({"duration_ns": 3}, "durations, op 0F0: got 3 ns, need 2 ns"),
            ({"gpu": 1}, "ops, op 0F0: got place 1, need 0"),
            ({"start_ns": 8}, "shifts, op 0F0: got start 8 ns, need less than 8 ns"),
            ({"stage": 1}, "ops, op 0F0: got it 0 times, need 1"),
        ],
    )
    def test_ops_that_cannot_be(self, change: dict[str, object], what: str) -> None:
        """Wrong length, place, start, or stage of an op."""
        plan = two_stages()
        pattern = lower(plan)
        wrong = handmade.changed(plan, "0F0", **change)
        with pytest.raises(InvalidPlanError, match=what):
            simulate(wrong, pattern)

    @pytest.mark.parametrize(
        ("stage", "what"),
        [
            ({"layers": (0, 1)}, "layers left out, repeated or out of order"),
            ({"id": 5}, "got id 5, need 0"),
            ({"remat": {"a": 1}}, "got remat, need null"),
        ],
    )
    def test_stages_that_cannot_be(self, stage: dict[str, object], what: str) -> None:
        """Layers twice, wrong ids, and decisions that the replay does not know."""
        plan = two_stages()
        stages = (plan.stages[0].model_copy(update=stage), plan.stages[1])
        with pytest.raises(InvalidPlanError, match=what):
            simulate(plan.model_copy(update={"stages": stages}), lower(plan))

    def test_tied_parameters_on_two_gpus(self) -> None:
        """No action exchanges the gradient of a parameter that two GPUs hold."""
        plan = two_stages()
        layers = tuple(
            layer.model_copy(update={"parameters": ("w",)}) for layer in plan.chain.layers
        )
        chain = plan.chain.model_copy(update={"layers": layers})
        with pytest.raises(InvalidPlanError, match="tied, parameter 'w': got it on GPUs 0 and 1"):
            simulate(plan.model_copy(update={"chain": chain}), lower(plan))

    def test_spans_name_places(self) -> None:
        """Computes are on GPUs, transfers on directed links."""
        places = {
            (span.stage, span.kind): span.place
            for span in simulate(two_stages(), lower(two_stages())).spans()
        }
        assert places[0, OpKind.F] == 0
        assert places[0, OpKind.SEND_F] == (0, 1)
        assert places[1, OpKind.SEND_B] == (1, 0)
