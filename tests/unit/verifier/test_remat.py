"""What a stage may keep less of, and which ops that asks for: rules `stages` and `ops`."""

from __future__ import annotations

import pytest

from pipeplan.plan import LayerRanges, Plan, Remat
from pipeplan.verifier import Rule, offloaded, verify
from pipeplan.verifier import remat as remat_rules
from pipeplan.verifier.recompute import without_runs
from tests import handmade
from tests import handmade_offload as made
from tests.unit.verifier.test_offload import lines, relaid, rules


class TestRuns:
    """Rule `stages`."""

    @pytest.mark.parametrize(
        ("sent", "again", "words"),
        [
            (((0, 3),), (), ("stages[0].remat.offload", "got run [0, 3]", "within [0, 2]")),
            (((2, 1),), (), ("got run [2, 1]", "within [0, 2]")),
            (((0, 1), (1, 2)), (), ("got run [1, 2]", "within [2, 2]")),
            (((2, 2), (0, 0)), (), ("got run [0, 0]", "within [3, 2]")),
            (((0, 1),), ((1, 2),), ("got run [0, 1]", "apart from [1, 2]")),
            (((0, 2),), ((1, 1),), ("got run [0, 2]", "apart from [1, 1]")),
            (((1, 1),), ((0, 2),), ("got run [1, 1]", "apart from [0, 2]")),
        ],
    )
    def test_runs_out_of_place(
        self, sent: LayerRanges, again: LayerRanges, words: tuple[str, ...]
    ) -> None:
        """Outside the stage, backwards, overlapping, out of order, in a recomputed run."""
        (line,) = lines(relaid(made.one_stage(), 0, offload=sent, recompute=again))
        assert line.startswith("stages, ")
        assert all(word in line for word in words), line

    def test_runs_may_touch(self) -> None:
        """[0, 0] and [1, 1] send 2 + 3 without K_0 = 8 between them: 2 ns at 4 bytes per ns."""
        plan = relaid(made.one_stage(), 0, offload=((0, 0), (1, 1)))
        assert rules(plan) == {Rule.DURATIONS, Rule.MEMORY}
        for label in ("0OFFLOAD0", "0PREFETCH0"):
            plan = handmade.changed(plan, label, duration_ns=2)
        assert verify(handmade.filled(plan)) == ()

    def test_an_input_of_a_program_stays(self) -> None:
        """What a program keeps is its own."""
        under = made.made_by(Remat(recompute=((0, 0),)))
        layers = list(under.chain.layers)
        layers[1] = layers[1].model_copy(update={"options": layers[0].options})
        chain = under.chain.model_copy(update={"layers": tuple(layers)})
        remat = Remat(programs=((1, 0),), offload_input=True)
        stage = under.stages[1].model_copy(update={"remat": remat})
        plan = under.model_copy(update={"chain": chain, "stages": (under.stages[0], stage)})
        (line, *_) = map(str, remat_rules.runs(plan, stage))
        assert "got true, need no program of layer 1" in line

    @pytest.mark.parametrize("saved_before", [0, 1])
    @pytest.mark.parametrize("run", [(1, 1), (1, 2)])
    def test_a_saved_input_of_a_run(self, run: tuple[int, int], saved_before: int) -> None:
        """A run keeps all 8 bytes of its input, whatever its first layer or stage 0 save."""
        plan = relaid(made.entering(saved_before), 1, recompute=(run,), offload_input=True)
        assert Rule.STAGES not in rules(plan)
        assert offloaded(plan, plan.stages[1]) == 8
        assert offloaded(without_runs(plan), without_runs(plan).stages[1]) == 8

    @pytest.mark.parametrize(
        ("remat", "words"),
        [
            (Remat(programs=((0, 1),)), "need 0 bytes that a program keeps of the output"),
            (Remat(programs=((0, 0),)), "got runs that keep 0 bytes, need more"),
            (Remat(recompute=((0, 0),)), "got runs that keep 0 bytes, need more"),
        ],
    )
    def test_a_saved_input_whose_maker_keeps_no_graph(self, remat: Remat, words: str) -> None:
        """What a program keeps of its output stays; a run keeps nothing of it."""
        plan = made.made_by(remat)
        (line,) = map(str, remat_rules.runs(plan, plan.stages[1]))
        assert words in line

    def test_a_saved_input_whose_maker_runs_again(self) -> None:
        """A run of stage 0 keeps nothing of its output: the next stage alone has it."""
        plan = relaid(made.entering(saved_before=1), 0, recompute=((0, 0),))
        assert Rule.STAGES not in rules(plan)

    def test_not_in_the_papers_model(self) -> None:
        """(P2) counts what each layer saves: there is no place for bytes that leave."""
        found = lines(handmade.with_(made.one_stage(), memory_model="paper"))
        (line,) = (line for line in found if line.startswith("stages, "))
        assert "need the exact one" in line

    def test_runs_must_keep_bytes(self) -> None:
        """A run of one layer that saves nothing has nothing to send; one byte is enough."""
        for size, kept in ((0, False), (1, True)):
            layers = [dict(made.LAYERS[0]) | {"saved_bytes": size}, *made.LAYERS[1:]]
            of = handmade.chain([(1, 1)] * 3, layers, input_bytes=10)
            plan = handmade.with_(made.one_stage(), chain=of, chain_digest=of.digest())
            plan = relaid(plan, 0, offload=((0, 0),))
            assert (Rule.STAGES not in rules(plan)) == kept
            assert kept or "got runs that keep 0 bytes" in lines(plan)[0]


def without(plan: Plan, *labels: str) -> Plan:
    """`plan` without these ops."""
    return handmade.with_(plan, ops=tuple(op for op in plan.ops if op.label not in labels))


def doubled(plan: Plan, label: str) -> Plan:
    """`plan` with the op `label` once more."""
    return handmade.with_(plan, ops=(*plan.ops, *(op for op in plan.ops if op.label == label)))


def hostless(plan: Plan) -> Plan:
    """`plan` on a cluster without a host."""
    return handmade.with_(plan, cluster=plan.cluster.model_copy(update={"host": None}))


def resident(plan: Plan) -> Plan:
    """`plan` whose stages offload nothing, the ops still there."""
    stages = tuple(stage.model_copy(update={"remat": None}) for stage in plan.stages)
    return handmade.with_(plan, stages=stages)


OPS: list[tuple[Plan, tuple[str, ...]]] = [
    (without(made.one_stage(), "0PREFETCH0"), ("op 0PREFETCH0", "got 0", "0OFFLOAD0 is there")),
    (without(made.one_stage(), "0OFFLOAD0"), ("op 0OFFLOAD0", "got 0", "0PREFETCH0 is there")),
    (
        without(made.two_copies([0, 1]), "0PREFETCH1"),
        ("op 0PREFETCH1", "got 0", "0OFFLOAD1 is there"),
    ),
    (
        without(made.one_stage(), "0PREFETCH0", "0OFFLOAD0"),
        ("stage 0", "got no copy with OFFLOAD and PREFETCH", "1 or more"),
    ),
    (resident(made.one_stage()), ("op 0OFFLOAD0", "got 1", "need 0", "offloads nothing")),
    (hostless(made.one_stage()), ("op 0PREFETCH0", "got 1", "need 0", "cluster has no host")),
    (
        doubled(made.one_stage(), "0OFFLOAD0"),
        ("op 0OFFLOAD0", "got 2", "need 1"),
    ),
    (
        handmade.changed(made.two_gpus(), "1PREFETCH0", gpu=0),
        ("op 1PREFETCH0", "got GPU 0", "need 1"),
    ),
]


class TestOps:
    """(H2): rule `ops`."""

    @pytest.mark.parametrize(("plan", "words"), OPS, ids=[" ".join(words) for _, words in OPS])
    def test_wrong_ops(self, plan: Plan, words: tuple[str, ...]) -> None:
        """One missing of both, none at all, not asked for, no host, twice, on another GPU."""
        found = [line for line in lines(plan) if line.startswith("ops, ")]
        assert any(all(word in line for word in words) for line in found), found
        assert Rule.DURATIONS not in rules(plan)

    def test_each_copy_has_both_or_neither(self) -> None:
        """Of two copies either may stay, not both."""
        for copy in (0, 1):
            both = without(made.two_copies([0, 1]), f"0OFFLOAD{copy}", f"0PREFETCH{copy}")
            assert verify(handmade.filled(both)) == ()

    @pytest.mark.parametrize("label", ["0OFFLOAD0", "0PREFETCH0"])
    def test_durations_round_up(self, label: str) -> None:
        """13 bytes at 4 per ns take 4 ns both ways."""
        for lasts in (3, 5):
            found = lines(handmade.changed(made.one_stage(), label, duration_ns=lasts))
            assert f"durations, op {label}: got {lasts} ns, need 4 ns" in found
