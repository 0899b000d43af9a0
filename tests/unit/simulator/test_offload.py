"""The replay of plans that offload: copies beside computes, ways, bytes."""

from __future__ import annotations

from fractions import Fraction
from typing import Literal

import pytest

from pipeplan.errors import DeadlockError, InvalidPlanError
from pipeplan.lowering import lower
from pipeplan.plan import Remat
from pipeplan.program import Program
from pipeplan.simulator import check, replay, simulate
from tests import handmade
from tests.handmade_offload import whole_input
from tests.offloading import SHARED, TABLE, TIMES, offloaded, one_stage, row, spans, two_stages


class TestPlanClock:
    """Copies happen when the plan says, or are refused."""

    def test_times_and_bytes_by_hand(self) -> None:
        """Three in flight. At 36 0B0 starts: 10 of 0 (back since 28), 2 of 1, 10 of 2: 22 and 10.

        On the host from issue to the start of B, 4..36: 18..36 too of 1, 32..36 of 2: 3 times 8.
        """
        plan = one_stage(memory=TABLE)
        simulation = check(plan, lower(plan))
        assert spans(simulation, 1) == {
            "0F": (14, 18),
            "0OFFLOAD": (18, 26),
            "0PREFETCH": (42, 50),
            "0B": (50, 56),
        }
        assert simulation.in_flight == (3,)
        assert simulation.left_bytes == (0,)
        assert simulation.makespan_ns == (simulation.microbatches - 1) * 14 + 42

    def test_without_it_more_is_kept(self) -> None:
        """The same times with all on the GPU: three times 10."""
        plan = one_stage()
        stages = (plan.stages[0].model_copy(update={"remat": None}),)
        ops = tuple(op for op in plan.ops if not op.kind.is_host)
        plan = plan.model_copy(update={"stages": stages, "ops": ops})
        rows = simulate(plan, lower(plan)).memory
        assert rows == (row(0, saved=30, working=10),)

    def test_a_saved_input_leaves(self) -> None:
        """Stage 1 keeps 2 of its input and 4: 6 leave, or 2; 3 + 6 are here at 1B, with 2 + 2."""
        layers = [
            {"output_bytes": 2, "saved_bytes": 3},
            {"output_bytes": 2, "saved_bytes": 4, "saved_input_bytes": 2},
        ]
        of = handmade.chain([(2, 3), (2, 3)], layers)
        computes = {"0F0": 0, "1F0": 2, "1B0": 16, "0B0": 19}
        plan = handmade.plan(of, [(0, 0, 0), (1, 1, 0)], 24, computes)
        times = {"1OFFLOAD0": 4, "1PREFETCH0": 10}
        both = offloaded(plan, {1: ((1, 1),)}, {1: 6}, times, inputs={1})
        alone = offloaded(plan, {}, {1: 2}, times, inputs={1})
        for each, away in ((both, 6), (alone, 2)):
            assert simulate(each, lower(each)).memory == (row(0, saved=9, working=4, host=away),)

    def test_an_input_leaves_with_its_forward(self) -> None:
        """OFFLOAD is listed before F, its FREE behind: from 5 on nobody uses what was copied."""
        plan = whole_input()
        pattern = lower(plan)
        found = check(plan, pattern)
        assert found.memory == plan.memory
        listed = " ".join(map(str, pattern.ranks[0]))
        assert listed == "0OFFLOAD0+0 0OPT0+3 0F0+0 0FREE_O0+0 0PREFETCH0+2 0B0+2"
        early = whole_input(at=0)
        with pytest.raises(InvalidPlanError, match="0OFFLOAD0: is due at 0 ns, can start at 1 ns"):
            check(early, lower(early))

    @pytest.mark.parametrize("waits", ["0FREE_O0 0F0 0PREFETCH0", "0PREFETCH0 0F0 0FREE_O0"])
    def test_what_waits_for_an_input_to_leave_waits_for_its_forward(self, waits: str) -> None:
        """OFFLOAD begins with F, so a program that has something between them never ends."""
        with pytest.raises(DeadlockError, match=f"0: {waits.split()[0]} waits for 0F0"):
            replay(whole_input(), Program.parse(f"0OFFLOAD0 {waits} 0B0"))

    def test_what_is_saved_of_an_input_leaves_behind_its_forward(self) -> None:
        """Only F says which part that is."""
        plan = whole_input(saved=9)
        with pytest.raises(DeadlockError, match="0OFFLOAD0 waits for 0F0, which rank 0 has later"):
            check(plan, lower(plan))
        later = whole_input(saved=9, at=5)
        assert check(later, lower(later)).memory == later.memory

    @pytest.mark.parametrize("term", ["saved_bytes", "host_bytes"])
    def test_the_claims_are_checked(self, term: str) -> None:
        """One byte more or less than the replay has is named."""
        wrong = TABLE[0].model_copy(update={term: getattr(TABLE[0], term) - 1})
        plan = one_stage(memory=(wrong,))
        with pytest.raises(InvalidPlanError, match=f"memory, GPU 0, {term}: got"):
            check(plan, lower(plan))

    def test_the_hosts_memory(self) -> None:
        """24 bytes at once fit into 24, not into 23."""
        plan = one_stage(memory=TABLE, host_bytes=24)
        check(plan, lower(plan))
        plan = one_stage(memory=TABLE, host_bytes=23)
        with pytest.raises(InvalidPlanError, match="host, plan: got 24 bytes of all GPUs"):
            check(plan, lower(plan))

    @pytest.mark.parametrize(
        ("times", "what"),
        [
            ({"0PREFETCH0": 29}, "0B0: is due at 36 ns, can start at 37 ns"),
            (
                {"0OFFLOAD0": 15, "0PREFETCH0": 27},
                "0PREFETCH1: happens at 36 ns, before its OFFLOAD ends at 37 ns",
            ),
        ],
    )
    def test_what_is_not_ready_is_refused(self, times: dict[str, int], what: str) -> None:
        """(H3): back after B starts; posted (27 is inside 0B, 22..28) before it has left.

        Micro-batch 0 finds no backward before its own, so it is 1 whose PREFETCH is held.
        """
        plan = one_stage(TIMES | times)
        with pytest.raises(InvalidPlanError, match=what):
            simulate(plan, lower(plan))

    @pytest.mark.parametrize("times", [{"0OFFLOAD0": 3}, {"0PREFETCH0": 43}])
    def test_what_can_never_be_is_refused(self, times: dict[str, int]) -> None:
        """Issued before F, posted after B: the rank waits for itself."""
        plan = one_stage(TIMES | times)
        with pytest.raises(DeadlockError):
            simulate(plan, lower(plan))

    @pytest.mark.parametrize(
        ("duplex", "back", "good"), [("half", 20, True), ("half", 21, False), ("full", 21, True)]
    )
    def test_half_duplex(self, duplex: Literal["full", "half"], back: int, good: bool) -> None:
        """T = 16, OFFLOAD 4..12: PREFETCH 12..20 ends as the next one begins, 13..21 overlaps."""
        times = {"0OFFLOAD0": 4, "0PREFETCH0": back - 8}
        plan = one_stage(times, back=back, period=16, duplex=duplex)
        if good:
            simulate(plan, lower(plan))
            return
        with pytest.raises(InvalidPlanError, match=r"link, transfer 0.* when the link is free"):
            simulate(plan, lower(plan))

    def test_stages_of_a_gpu_share_its_way(self) -> None:
        """OFFLOADs 2..5 and 5..9, PREFETCHes 10..14 and 14..17; a ns earlier they overlap.

        At 14 the OFFLOAD of micro-batch 1 (class 2) comes before 1B0 (class 4): both 4 bytes are
        on the host, and twice 3 of stage 0 (2..17 and 12..27).
        """
        plan = two_stages(SHARED)
        assert simulate(plan, lower(plan)).memory[0].host_bytes == 2 * 4 + 2 * 3
        early = two_stages(SHARED | {"1OFFLOAD0": 4})
        with pytest.raises(
            InvalidPlanError, match="transfer 1OFFLOAD0: is due at 4 ns, can start"
        ):
            simulate(early, lower(early))

    def test_gpus_have_ways_of_their_own(self) -> None:
        """Two stages on two GPUs copy at the same time."""
        layers = [{"output_bytes": 0, "saved_bytes": 4}] * 2
        of = handmade.chain([(2, 2), (2, 2)], layers)
        computes = {"0F0": 0, "1F0": 2, "1B0": 12, "0B0": 14}
        plan = handmade.plan(of, [(0, 0, 0), (1, 1, 1)], 16, computes)
        times = {"0OFFLOAD0": 3, "1OFFLOAD0": 4, "1PREFETCH0": 8, "0PREFETCH0": 9}
        runs = {0: ((0, 0),), 1: ((1, 1),)}
        both = offloaded(plan, runs, {0: 4, 1: 4}, times, duplex="half")
        assert [r.host_bytes for r in simulate(both, lower(both)).memory] == [4, 4]

    def test_order_among_those_that_are_offloaded(self) -> None:
        """(R5): copy 2 follows copy 0, as copy 1 stays; out of order it is told."""
        of = handmade.chain([(1, 1)], [{"output_bytes": 0, "saved_bytes": 2}])
        times = {f"0F{c}": c for c in range(3)} | {f"0B{c}": 13 + c for c in range(3)}
        plan = handmade.plan(of, [(0, 0, 0)], 10, times, k=3)
        host = {"0OFFLOAD0": 2, "0OFFLOAD2": 4, "0PREFETCH0": 6, "0PREFETCH2": 8}
        good = offloaded(plan, {0: ((0, 0),)}, {0: 2}, host)
        simulate(good, lower(good))
        swapped = host | {"0OFFLOAD0": 5, "0OFFLOAD2": 3, "0PREFETCH0": 7, "0PREFETCH2": 9}
        bad = offloaded(plan, {0: ((0, 0),)}, {0: 2}, swapped)
        with pytest.raises(
            InvalidPlanError, match=r"fifo, op 0OFFLOAD2: .* before 0OFFLOAD0 ends"
        ):
            simulate(bad, lower(bad))

    def test_beside_recomputation(self) -> None:
        """Layer 0 is computed again; of layers 1 and 2 leave 3 + 4 bytes and max(1, 2) between."""
        layers = [
            {"output_bytes": 5, "saved_bytes": 9, "saved_output_bytes": 4},
            {"output_bytes": 5, "saved_bytes": 3, "saved_output_bytes": 1},
            {"output_bytes": 5, "saved_bytes": 4, "saved_input_bytes": 2},
        ]
        of = handmade.chain([(1, 1)] * 3, layers)
        times = {"0F0": 0, "0B0": 29}
        plan = handmade.plan(of, [(0, 2, 0)], 12, times, durations={"0B": 4}, memory=())
        again = plan.stages[0].model_copy(update={"remat": Remat(recompute=((0, 0),))})
        plan = plan.model_copy(update={"stages": (again,)})
        host = {"0OFFLOAD0": 3, "0PREFETCH0": 15}
        plan = offloaded(plan, {0: ((1, 2),)}, {0: 9}, host)
        assert simulate(plan, lower(plan)).memory[0].host_bytes == 3 * 9  # 3, 15, 27, until 29


class TestEagerClock:
    """Copies happen as soon as they can."""

    def test_copies_overlap_computes(self) -> None:
        """By hand, list by list: 0F 0..4, FREE at 12; PREFETCH0 at 24 beside 0F2 (24..28)."""
        plan = one_stage(semantics="flush", microbatches=3)
        eager = simulate(plan, lower(plan), clock="eager", microbatches=3)
        assert spans(eager, 0) == {
            "0F": (0, 4),
            "0OFFLOAD": (4, 12),
            "0PREFETCH": (24, 32),
            "0B": (32, 38),
        }
        assert spans(eager, 2)["0OFFLOAD"] == (28, 36)
        assert eager.makespan_ns == 66

    def test_an_input_leaves_as_soon_as_its_forward_starts(self) -> None:
        """Planned at 2, with F at 1: on the eager clock each OFFLOAD starts with its F."""
        plan = whole_input()
        found = simulate(plan, lower(plan), clock="eager")
        for microbatch in range(4):
            times = spans(found, microbatch)
            assert times["0OFFLOAD"][0] == times["0F"][0]

    def test_bytes_are_the_plans(self) -> None:
        """(O7): list order fixes the bytes of GPU and host."""
        plan = one_stage(memory=TABLE)
        assert simulate(plan, lower(plan), clock="eager").memory == TABLE

    def test_drain_and_fill_of_flush_steps(self) -> None:
        """Each step of 3 takes 66 from empty to empty, then its update of 2 + 3."""
        plan = one_stage(semantics="flush", microbatches=3)
        updated = [
            layer.model_copy(update={"optimizer_ns": ns})
            for layer, ns in zip(plan.chain.layers, (2, 3), strict=True)
        ]
        chain = plan.chain.model_copy(update={"layers": tuple(updated)})
        plan = plan.model_copy(update={"chain": chain})
        two = simulate(plan, lower(plan), clock="eager", updates=True, microbatches=6)
        assert two.makespan_ns == 2 * (66 + 5)
        assert spans(two, 3)["0OFFLOAD"] == (71 + 4, 71 + 12)
        assert two.step_ns == 71

    def test_updates_of_two_versions(self) -> None:
        """Steps of 2 in a flow: 14 without an update, 17 with one of 5, which a copy hides partly.

        PREFETCH 0..8, update 0..5, F 5..9, OFFLOAD 9..17, B 9..15, FREE at 17.
        """
        plan = one_stage(microbatches=2)
        layers = (
            plan.chain.layers[0].model_copy(update={"optimizer_ns": 5}),
            plan.chain.layers[1],
        )
        chain = plan.chain.model_copy(update={"layers": layers})
        plan = plan.model_copy(update={"chain": chain})
        assert simulate(plan, lower(plan), clock="eager").period_ns == 14
        flow = simulate(plan, lower(plan), clock="eager", updates=True)
        assert flow.period_ns == Fraction(14 + 17, 2)
        assert flow.step_ns == 31

    def test_a_way_keeps_the_plans_order(self) -> None:
        """Stage 1 goes first in the plan (5..9, then 9..12): so it does, 4..8 and 8..11."""
        plan = two_stages(SHARED | {"0OFFLOAD0": 9})
        first = spans(simulate(plan, lower(plan), clock="eager"), 0)
        assert first["1OFFLOAD"] == (4, 8)
        assert first["0OFFLOAD"] == (8, 11)
