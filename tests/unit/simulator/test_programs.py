"""The replay of programs: wrong orders, hand-written ones, and input that is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import pytest

from pipeplan.errors import DeadlockError, InputError, InvalidPlanError
from pipeplan.lowering import lower
from pipeplan.plan import OpKind, Plan, Remat
from pipeplan.program import Pattern, PeriodicAction, Program
from pipeplan.simulator import Clock, Simulation, disagreements, replay, simulate
from tests import handmade
from tests.samples import two_stages


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

    @pytest.mark.parametrize("text", ["0F0\n", "0F0\n\n\n"])
    def test_each_gpu_has_a_line(self, text: str) -> None:
        """An idle one has an empty line: one that is missing, or left over, is named."""
        with pytest.raises(InputError, match=r"got [13] ranks, need 2, one for each GPU"):
            replay(self.plan(), Program.parse(text))

    @pytest.mark.parametrize("text", ["\n\n", "0OPT\n\n"])
    def test_no_micro_batch_makes_no_step(self, text: str) -> None:
        """Also where updates are replayed."""
        assert replay(self.plan(), Program.parse(text), updates=True).step_ns is None

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

    @pytest.mark.parametrize("count", [0, -1, 10**12])
    def test_numbers_of_micro_batches(self, count: int) -> None:
        """At least one, and no more than a replay can keep."""
        with pytest.raises(InputError, match=f"got {count} micro-batches, need 1 to"):
            simulate(two_stages(), lower(two_stages()), microbatches=count)

    def test_plans_with_too_much_in_flight(self) -> None:
        """A backward a million periods after its forward is refused, not replayed."""
        times = {"0F0": 0, "1F0": 2, "1B0": 4, "0B0": 8 * 10**6 + 6}
        of = handmade.chain([(2, 2), (2, 2)])
        plan = handmade.plan(of, [(0, 0, 0), (1, 1, 0)], 8, times)
        with pytest.raises(InputError, match="plan for fewer in flight"):
            simulate(plan, lower(plan))

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
            ({"remat": Remat(recompute=((0, 1),))}, r"stages\[0\].remat: got runs"),
            ({"remat": Remat(recompute=((0, 0), (0, 0)))}, r"stages\[0\].remat: got runs"),
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
