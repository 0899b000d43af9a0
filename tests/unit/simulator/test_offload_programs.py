"""The replay of programs that offload, and plans that cannot."""

from __future__ import annotations

from typing import Literal

import pytest

from pipeplan.errors import DeadlockError, InputError, InvalidPlanError
from pipeplan.lowering import lower
from pipeplan.plan import LayerRanges, Remat, Stage
from pipeplan.program import Program
from pipeplan.simulator import replay, simulate
from pipeplan.simulator.planned import inspect_stages
from pipeplan.verifier import audit
from tests import handmade, handmade_offload
from tests.offloading import LAYERS, SHARED, TIMES, offloaded, one_stage, spans, two_stages


class TestPrograms:
    """Hand-written programs."""

    def test_a_late_prefetch_delays_the_backward(self) -> None:
        """OFFLOAD 4..12 beside 0F1 (4..8); PREFETCH 12..20 beside 0F2 (12..16); 0B waits to 20."""
        text = "0F0 0OFFLOAD0 0F1 0FREE_O0 0PREFETCH0 0F2 0B0\n"
        simulation = replay(one_stage(), Program.parse(text))
        assert spans(simulation, 0)["0PREFETCH"] == (12, 20)
        assert spans(simulation, 2)["0F"] == (12, 16)
        assert spans(simulation, 0)["0B"] == (20, 26)
        assert simulation.memory[0].host_bytes == 8

    def test_only_some_are_offloaded(self) -> None:
        """Micro-batch 0 waits for nothing; 1 comes back 16..24 and is the only one away."""
        text = "0F0 0F1 0OFFLOAD1 0B0 0FREE_O1 0PREFETCH1 0B1\n"
        simulation = replay(one_stage(), Program.parse(text))
        assert spans(simulation, 0)["0B"] == (8, 14)
        assert spans(simulation, 1)["0B"] == (24, 30)
        assert simulation.memory[0].host_bytes == 8
        assert simulation.left_bytes == (0,)

    @pytest.mark.parametrize(("duplex", "end"), [("full", 66), ("half", 68)])
    def test_a_half_way_takes_what_is_ready_first(
        self, duplex: Literal["full", "half"], end: int
    ) -> None:
        """PREFETCH0 24..32; OFFLOAD2, ready at 28, then waits to 32 where the way is one."""
        text = (
            "0F0 0OFFLOAD0 0FREE_O0 0F1 0OFFLOAD1 0FREE_O1 0PREFETCH0 0F2 0OFFLOAD2 0B0 0FREE_O2"
            " 0PREFETCH1 0B1 0PREFETCH2 0B2\n"
        )
        simulation = replay(one_stage(duplex=duplex), Program.parse(text))
        assert spans(simulation, 2)["0OFFLOAD"][0] == (28 if duplex == "full" else 32)
        assert simulation.makespan_ns == end

    def test_two_stages_share_a_way(self) -> None:
        """OFFLOADs 2..5 and 5..9; both PREFETCHes are ready at 9: stage 0 goes first, 1B at 16."""
        text = "0F0 0OFFLOAD0 1F0 1OFFLOAD0 0FREE_O0 1FREE_O0 1PREFETCH0 0PREFETCH0 1B0 0B0\n"
        simulation = replay(two_stages(SHARED), Program.parse(text))
        assert spans(simulation, 0)["1OFFLOAD"] == (5, 9)
        assert spans(simulation, 0)["1PREFETCH"] == (12, 16)
        assert simulation.makespan_ns == 22

    def test_nothing_comes_back_before_it_has_left(self) -> None:
        """Without the FREE its bytes are left at the end, and PREFETCH still waits for OFFLOAD."""
        simulation = replay(one_stage(), Program.parse("0F0 0OFFLOAD0 0PREFETCH0 0B0\n"))
        assert spans(simulation, 0)["0PREFETCH"] == (12, 20)
        assert simulation.left_bytes == (8,)

    @pytest.mark.parametrize(
        ("text", "wait"),
        [
            ("0OFFLOAD0 0F0", "0OFFLOAD0 waits for 0F0, which rank 0 has later"),
            ("0F0 0FREE_O0", "0FREE_O0 waits for 0OFFLOAD0, which no rank has"),
            ("0F0 0PREFETCH0 0OFFLOAD0", "0PREFETCH0 waits for 0OFFLOAD0, which rank 0 has later"),
            ("0F0 0OFFLOAD0 0FREE_O0 0B0", "0B0 waits for 0PREFETCH0, which no rank has"),
            (
                "0F0 0OFFLOAD0 0FREE_O0 0B0 0PREFETCH0",
                "0B0 waits for 0PREFETCH0, which rank 0 has later",
            ),
        ],
    )
    def test_circles_are_told(self, text: str, wait: str) -> None:
        """What can never happen stops the run, with the action it waits for."""
        with pytest.raises(DeadlockError, match=wait):
            replay(one_stage(), Program.parse(f"{text}\n"))

    @pytest.mark.parametrize("text", ["0F0 0OFFLOAD0\n", "0FREE_O0\n", "0PREFETCH0\n"])
    def test_stages_that_offload_nothing(self, text: str) -> None:
        """A program with actions that the plan's stage does not have is refused."""
        plan = one_stage()
        plain = plan.model_copy(
            update={"stages": (plan.stages[0].model_copy(update={"remat": None}),)}
        )
        with pytest.raises(InputError, match="which the plan has on no rank"):
            replay(plain, Program.parse(text))

    def test_a_pattern_with_more_than_the_plan_has(self) -> None:
        """An OFFLOAD of a copy that the plan keeps is refused on the plan clock."""
        of = handmade.chain([(1, 1)], [{"output_bytes": 0, "saved_bytes": 2}])
        times = {"0F0": 0, "0F1": 1, "0B0": 12, "0B1": 13}
        plan = handmade.plan(of, [(0, 0, 0)], 10, times, k=2)
        host = {"0OFFLOAD0": 2, "0PREFETCH0": 6}
        both = host | {"0OFFLOAD1": 4, "0PREFETCH1": 8}
        one, two = (offloaded(plan, {0: ((0, 0),)}, {0: 2}, each) for each in (host, both))
        with pytest.raises((InvalidPlanError, DeadlockError), match="0OFFLOAD1"):
            simulate(one, lower(two))


class TestInput:
    """Plans that cannot be replayed."""

    @pytest.mark.parametrize(
        ("label", "change", "what"),
        [
            ("0OFFLOAD0", {"duration_ns": 7}, "durations, op 0OFFLOAD0: got 7 ns, need 8 ns"),
            ("0PREFETCH0", {"duration_ns": 9}, "durations, op 0PREFETCH0: got 9 ns, need 8 ns"),
            ("0PREFETCH0", {"start_ns": 14}, "shifts, op 0PREFETCH0"),
            ("0OFFLOAD0", {"gpu": 1}, "ops, op 0OFFLOAD0: got place 1, need 0"),
        ],
    )
    def test_ops_that_cannot_be(self, label: str, change: dict[str, int], what: str) -> None:
        """Wrong length, start or GPU of a copy."""
        plan = one_stage()
        wrong = handmade.changed(plan, label, **change)
        with pytest.raises(InvalidPlanError, match=what):
            simulate(wrong, lower(plan))

    @pytest.mark.parametrize(
        ("kept", "what"),
        [
            (("0PREFETCH0",), "op 0OFFLOAD0: got it 0 times, need 1"),
            (("0OFFLOAD0",), "op 0PREFETCH0: got it 0 times, need 1"),
            ((), r"stages\[0\]: got no micro-batch that offloads"),
        ],
    )
    def test_both_or_neither(self, kept: tuple[str, ...], what: str) -> None:
        """(H2)."""
        plan = one_stage()
        ops = tuple(op for op in plan.ops if not op.kind.is_host or op.label in kept)
        with pytest.raises(InvalidPlanError, match=what):
            simulate(plan.model_copy(update={"ops": ops}), lower(plan))

    def test_no_host(self) -> None:
        """Without a host nothing can leave."""
        plan = one_stage()
        alone = plan.model_copy(update={"cluster": plan.cluster.model_copy(update={"host": None})})
        with pytest.raises(InvalidPlanError, match="op 0OFFLOAD0: got it 1 times, need 0"):
            simulate(alone, lower(plan))

    @pytest.mark.parametrize(
        ("remat", "what"),
        [
            (Remat(offload=((0, 2),)), "got runs"),
            (Remat(offload=((1, 1), (0, 0))), "got runs"),
            (Remat(offload=((0, 1), (1, 1))), "got runs"),
            (Remat(offload=((0, 2**60),)), "got runs"),
            (Remat(recompute=((1, 1),), offload=((0, 1),)), "got runs"),
        ],
    )
    def test_runs_that_cannot_be(self, remat: Remat, what: str) -> None:
        """Outside the stage, out of order, twice, or computed again as well."""
        plan = one_stage()
        stage: Stage = plan.stages[0].model_copy(update={"remat": remat})
        with pytest.raises(InvalidPlanError, match=rf"stages\[0\].remat: {what}"):
            simulate(plan.model_copy(update={"stages": (stage,)}), lower(plan))

    def test_an_input_of_a_program_cannot_leave(self) -> None:
        """What it keeps is its own."""
        plan, remat = one_stage(), Remat(offload_input=True, programs=((0, 0),))
        stage: Stage = plan.stages[0].model_copy(update={"remat": remat})
        with pytest.raises(InvalidPlanError, match=r"stages\[0\].remat: got"):
            simulate(plan.model_copy(update={"stages": (stage,)}), lower(plan))

    @pytest.mark.parametrize(("again", "size"), [(((0, 0),), 4), (((1, 1),), 1), ((), 1)])
    def test_the_models_input_leaves(self, again: LayerRanges, size: int) -> None:
        """Its 4 bytes with a run that begins there, else the 1 byte that its layer saves."""
        durations = {"0B": 6 + 2 * len(again)}
        of = handmade.chain([(2, 3), (2, 3)], LAYERS, input_bytes=4)
        plan = handmade.plan(
            of, [(0, 1, 0)], 14, {"0F0": 0, "0B0": 34}, durations=durations, memory=()
        )
        stage: Stage = plan.stages[0].model_copy(
            update={"remat": Remat(recompute=again) if again else None}
        )
        plan = plan.model_copy(update={"stages": (stage,)})
        plan = offloaded(plan, {}, {0: size}, TIMES, inputs={0})
        found = simulate(plan, lower(plan)).memory[0]
        assert found.host_bytes == 3 * size
        assert found == audit(plan).memory[0]

    @pytest.mark.parametrize("saved", [0, 1, 2])
    @pytest.mark.parametrize("entering", [0, 2])
    def test_an_input_that_the_stage_before_keeps(self, saved: int, entering: int) -> None:
        """It leaves, if one of them keeps any of it: the more of what they keep."""
        layers = [{"saved_output_bytes": saved}, {"saved_input_bytes": entering}]
        of = handmade.chain([(2, 3), (2, 3)], [{"output_bytes": 2} | each for each in layers])
        plan = handmade.plan(
            of, [(0, 0, 0), (1, 1, 0)], 14, {"0F0": 0, "1F0": 2, "1B0": 8, "0B0": 11}
        )
        size = max(saved, entering)
        plan = offloaded(plan, {}, {1: size}, {"1OFFLOAD0": 4, "1PREFETCH0": 6}, inputs={1})
        if size:
            assert simulate(plan, lower(plan)).memory[0].host_bytes == size
            return
        with pytest.raises(InvalidPlanError, match="which keep nothing to send away"):
            simulate(plan, lower(plan))

    @pytest.mark.parametrize(
        ("remat", "words"),
        [
            (Remat(programs=((0, 1),)), "an input away that others keep"),
            (Remat(programs=((0, 0),)), "which keep nothing"),
            (Remat(recompute=((0, 0),)), "which keep nothing"),
        ],
    )
    def test_an_input_whose_maker_keeps_no_graph(self, remat: Remat, words: str) -> None:
        """What a program keeps of its output stays; a run keeps nothing of it."""
        (said,) = inspect_stages(handmade_offload.made_by(remat))
        assert words in said.message

    def test_runs_that_keep_nothing(self) -> None:
        """(H1): more than 0 bytes must leave."""
        of = handmade.chain([(2, 3), (2, 3)], [{"output_bytes": 5, "saved_output_bytes": 5}] * 2)
        plan = handmade.plan(of, [(0, 1, 0)], 14, {"0F0": 0, "0B0": 36})
        empty = offloaded(plan, {0: ((0, 0), (1, 1))}, {0: 1}, TIMES)
        with pytest.raises(InvalidPlanError, match="which keep nothing to send away"):
            simulate(empty, lower(empty))

    def test_the_paper_has_no_host(self) -> None:
        """Offloading is refused in the paper's memory model."""
        plan = one_stage(memory_model="paper")
        with pytest.raises(InvalidPlanError, match="got it in the paper's model"):
            simulate(plan, lower(plan))
