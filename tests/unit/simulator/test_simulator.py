"""The replay: clocks, ledger, what it measures, and what it refuses."""

from __future__ import annotations

from fractions import Fraction

import pytest

from pipeplan.cluster import uniform
from pipeplan.errors import InputError, InvalidPlanError
from pipeplan.lowering import lower
from pipeplan.plan import OpKind
from pipeplan.simulator import OpTimes, Simulation, check, disagreements, simulate
from pipeplan.testing.plans import random_plan
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

    def test_ops_take_what_is_said(self) -> None:
        """F 5 in place of 2 and the optimizer 2 in place of 7: 2 * (5 + 3) + 2 per step."""
        of = handmade.chain([(2, 3)], [{"output_bytes": 1, "optimizer_ns": 7}])
        plan = handmade.packed(of, [(0, 0, 0)], 5, microbatches=2)
        pattern = lower(plan)
        times: OpTimes = {(OpKind.F, 0): 5, ("OPT", 0): 2}
        said = simulate(plan, pattern, clock="eager", updates=True, op_times=times)
        assert said.step_ns == 18
        with pytest.raises(InputError, match="times of ops on the plan clock, need the eager"):
            simulate(plan, pattern, op_times=times)

    @pytest.mark.parametrize("seed", range(30))
    def test_ops_that_last_longer_are_those_of_a_slower_cluster(self, seed: int) -> None:
        """With 7 ns more for every op a plan is replayed as with so much overhead per action."""
        plan = random_plan(seed)
        pattern, more = lower(plan), 7
        times = {(op.kind, op.stage): op.duration_ns + more for op in plan.ops}
        computes = {op: ns for op, ns in times.items() if op[0].is_compute}
        overhead = plan.cluster.action_overhead_ns + more
        ops = tuple(
            op.model_copy(
                update={"duration_ns": computes.get((op.kind, op.stage), op.duration_ns)}
            )
            for op in plan.ops
        )
        cluster = plan.cluster.model_copy(update={"action_overhead_ns": overhead})
        slower = plan.model_copy(update={"cluster": cluster, "ops": ops})
        count = 12 * plan.k
        said = simulate(plan, pattern, microbatches=count, clock="eager", op_times=computes)
        other = simulate(slower, pattern, microbatches=count, clock="eager")
        assert list(said.spans()) == list(other.spans())

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

    @pytest.mark.parametrize("waiting", [0, 4])
    def test_a_flush_updates_late_gradients_after_the_drain_too(self, waiting: int) -> None:
        """(M7) is about 2bw: under flush every update needs its workspace behind the drain."""
        sizes = {"gradient_bytes": 4, "waiting_gradient_bytes": waiting}
        of = handmade.chain([(2, 3)], [sizes | {"optimizer_workspace_bytes": 9}])
        plan = handmade.packed(of, [(0, 0, 0)], 5, semantics="flush")
        assert check(plan, lower(plan)).memory[0].working_bytes == 9

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
