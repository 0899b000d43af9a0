"""Every rule has a plan that keeps it and mutations that break it; each names rule and numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pipeplan.plan import Bounds, Plan, Remat, Solver
from pipeplan.verifier import Rule, check, verify
from tests import handmade


def stage(plan: Plan, index: int, **fields: Any) -> Plan:
    """`plan` with fields of one stage replaced."""
    stages = list(plan.stages)
    stages[index] = stages[index].model_copy(update=fields)
    return handmade.with_(plan, stages=tuple(stages))


def row(plan: Plan, index: int, **fields: Any) -> Plan:
    """`plan` with fields of one GPU's memory row replaced."""
    rows = list(plan.memory)
    rows[index] = rows[index].model_copy(update=fields)
    return handmade.with_(plan, memory=tuple(rows))


def without(plan: Plan, label: str) -> Plan:
    """`plan` without the op `label`."""
    return handmade.with_(plan, ops=tuple(op for op in plan.ops if op.label != label))


def extra(plan: Plan, label: str, **fields: Any) -> Plan:
    """`plan` with the op `label` once more, fields replaced."""
    op = next(op for op in plan.ops if op.label == label)
    return handmade.with_(plan, ops=(*plan.ops, op.model_copy(update=fields)))


def limit(plan: Plan, gpu: int, memory_bytes: int) -> Plan:
    """`plan` with another memory size of one GPU, told in its row too."""
    gpus = list(plan.cluster.gpus)
    gpus[gpu] = gpus[gpu].model_copy(update={"memory_bytes": memory_bytes})
    cluster = plan.cluster.model_copy(update={"gpus": tuple(gpus)})
    return row(handmade.with_(plan, cluster=cluster), gpu, budget_bytes=memory_bytes)


def solver(**fields: Any) -> Callable[[Plan], Plan]:
    """A mutation that claims this."""
    return lambda plan: handmade.with_(plan, solver=Solver(**fields))


def again(plan: Plan, *runs: tuple[int, int]) -> Plan:
    """`plan` whose stage 1 computes `runs` again."""
    return stage(plan, 1, remat=Remat(recompute=runs))


MUTATIONS: list[tuple[str, Callable[[Plan], Plan], Rule, tuple[str, ...]]] = [
    ("id", lambda p: stage(p, 1, id=2), Rule.STAGES, ("stages[1]", "got id 2", "need 1")),
    ("gap", lambda p: stage(p, 1, layers=(2, 2)), Rule.STAGES, ("got first layer 2", "layer 1")),
    ("twice", lambda p: stage(p, 1, layers=(0, 1)), Rule.STAGES, ("got first layer 0", "layer 1")),
    (
        "end",
        lambda p: handmade.with_(p, stages=p.stages[:2], ops=()),
        Rule.STAGES,
        ("got last layer 1", "2"),
    ),
    ("run of another stage", lambda p: again(p, (0, 1)), Rule.STAGES, ("[0, 1]", "[1, 1]")),
    ("run backwards", lambda p: again(p, (2, 1)), Rule.STAGES, ("[2, 1]", "within [1, 1]")),
    ("run twice", lambda p: again(p, (1, 1), (1, 1)), Rule.STAGES, ("[1, 1]", "behind layer 1")),
    ("run", lambda p: again(p, (1, 1)), Rule.DURATIONS, ("1B0",)),
    (
        "run in the paper's model",
        lambda p: handmade.with_(again(p, (1, 1)), memory_model="paper"),
        Rule.STAGES,
        ("stages[1].remat", "need the exact one"),
    ),
    ("lost", lambda p: without(p, "1F0"), Rule.OPS, ("1F0", "got 0", "need 1")),
    ("lost send", lambda p: without(p, "1SEND_B0"), Rule.OPS, ("1SEND_B0", "got 0", "need 1")),
    ("double", lambda p: extra(p, "1F0"), Rule.OPS, ("1F0", "got 2", "need 1")),
    ("no cut", lambda p: extra(p, "1SEND_F0", stage=2), Rule.OPS, ("2SEND_F0", "need 0")),
    ("other GPU", lambda p: handmade.changed(p, "1F0", gpu=0), Rule.OPS, ("GPU 0", "need 1")),
    (
        "wrong way",
        lambda p: handmade.changed(p, "1SEND_F0", link=(0, 1)),
        Rule.OPS,
        ("1SEND_F0", "got link (0, 1)", "need (1, 0)"),
    ),
    (
        "op time",
        lambda p: handmade.changed(p, "1F0", duration_ns=19),
        Rule.DURATIONS,
        ("1F0", "got 19 ns", "need 20 ns"),
    ),
    (
        "send time",
        lambda p: handmade.changed(p, "1SEND_F0", duration_ns=5),
        Rule.DURATIONS,
        ("1SEND_F0", "got 5 ns", "need 6 ns"),
    ),
    (
        "late start",
        lambda p: handmade.changed(p, "0B0", start_ns=80, shift=1),
        Rule.SHIFTS,
        ("0B0", "got start 80 ns", "60 ns"),
    ),
    (
        "all shifted",
        lambda p: handmade.with_(
            p, ops=tuple(x.model_copy(update={"shift": x.shift + 1}) for x in p.ops)
        ),
        Rule.SHIFTS,
        ("smallest shift 1", "need 0"),
    ),
    (
        "too early",
        lambda p: handmade.moved(p, "1SEND_F0", 34),
        Rule.PRECEDENCE,
        ("1F0 -> 1SEND_F0 at 34 ns of the period", "starts at 34 ns", "need 35 ns"),
    ),
    (
        "shift lost",
        lambda p: handmade.changed(p, "0B0", shift=1),
        Rule.PRECEDENCE,
        ("1SEND_B0 -> 0B0 at 20 ns of the period (shift 1)", "80 ns", "120 ns"),
    ),
    (
        "overlap",
        lambda p: handmade.moved(p, "2B0", 69),
        Rule.GPU,
        ("GPU 0 at 9 ns", "2B0 starts 1 ns before 0F0 ends", "9 ns, need 10 ns"),
    ),
    (
        "overlap around the period",
        lambda p: handmade.moved(p, "0B0", 175),
        Rule.GPU,
        ("GPU 0 at 0 ns", "0F0 starts 5 ns before 0B0 ends", "0 ns, need 5 ns"),
    ),
    (
        "link",  # 1SEND_B0 occupies 55..60 and the wrap 0..0; 2SEND_B0 uses the other direction
        lambda p: handmade.moved(handmade.with_duplex(p, "half"), "0SEND_F0", 17),
        Rule.LINK,
        ("link 0-1 at 20 ns", "2SEND_B0 starts 2 ns before 0SEND_F0 ends", "20 ns, need 22 ns"),
    ),
    (
        "stock",
        lambda p: handmade.with_(p, microbatches=1),
        Rule.VERSIONS,
        ("stage 0", "got 1 micro-batches", "need 2", "3 are in flight"),
    ),
    (
        "tied",
        lambda p: named(p, {0: ("wte",), 1: ("wte", "b")}),
        Rule.TIED,
        ("'wte'", "layer 1 is on GPU 1", "need GPU 0", "layer 0"),
    ),
    (
        "rows",
        lambda p: handmade.with_(p, memory=p.memory[:1]),
        Rule.MEMORY,
        ("got 1 rows", "need 2"),
    ),
    ("order", lambda p: handmade.with_(p, memory=p.memory[::-1]), Rule.MEMORY, ("[1, 0]",)),
    (
        "saved",
        lambda p: row(p, 0, saved_bytes=27),
        Rule.MEMORY,
        ("GPU 0, saved_bytes", "got 27", "need 26"),
    ),
    (
        "budget row",
        lambda p: row(p, 1, budget_bytes=9_999),
        Rule.MEMORY,
        ("GPU 1, budget_bytes", "got 9999", "need 10000"),
    ),
    (
        "one byte short",
        lambda p: limit(p, 0, p.memory[0].peak_bytes - 1),
        Rule.BUDGET,
        ("GPU 0", "got peak 487 bytes", "need at most 486", "1 over"),
    ),
    ("step", lambda p: handmade.with_(p, step_ns=241), Rule.STEP, ("got 241 ns", "need 240 ns")),
    (
        "bound above",
        solver(bounds=Bounds(any=(121, 2)), gap=0.0),
        Rule.BOUNDS,
        ("solver.bounds.any", "got 121/2", "need at most 60"),
    ),
    (
        "k1 above",
        solver(bounds=Bounds(k1=(61, 1))),
        Rule.BOUNDS,
        ("solver.bounds.k1", "got 61", "need at most 60"),
    ),
    (
        "gap wrong",
        solver(bounds=Bounds(any=(50, 1)), gap=0.21),
        Rule.BOUNDS,
        ("solver.gap", "got 0.21", "need 0.2"),
    ),
    ("gap missing", solver(bounds=Bounds(any=(50, 1))), Rule.BOUNDS, ("got None", "need 0.2")),
    ("gap made up", solver(gap=0.2), Rule.BOUNDS, ("got 0.2", "need null")),
    (
        "gap of the other bound",
        solver(bounds=Bounds(any=(50, 1)), gap=0.2, gap_bound="k1"),
        Rule.BOUNDS,
        ("got 0.2", "need null", "'k1'"),
    ),
    (
        "gap of a bound for others",
        solver(bounds=Bounds(contiguous=(60, 1)), gap=0.0, gap_bound="contiguous"),
        Rule.BOUNDS,
        ("solver.gap_bound", "got 'contiguous'", "one stage per GPU"),
    ),
    (
        "not optimal",
        solver(bounds=Bounds(any=(50, 1)), gap=0.2, status="optimal"),
        Rule.BOUNDS,
        ("solver.status", "got 'optimal'", "need 'feasible'", "50 ns"),
    ),
    (
        "modest",
        solver(bounds=Bounds(any=(60, 1)), gap=0.0),
        Rule.BOUNDS,
        ("solver.status", "need 'optimal'"),
    ),
    ("unproven", solver(status="optimal"), Rule.BOUNDS, ("solver.status", "unknown")),
    (
        "pin broken",
        solver(pins=((0, 0), (1, 0))),
        Rule.BOUNDS,
        ("solver.pins[1]", "got layer 1 on GPU 1", "need it on GPU 0"),
    ),
    (
        "pin of no layer",
        solver(pins=((999, 1),)),
        Rule.BOUNDS,
        ("solver.pins[0]", "got layer 999", "below 3"),
    ),
    ("pin to no GPU", solver(pins=((0, 77),)), Rule.BOUNDS, ("got GPU 77", "below 2")),
    (
        "pin twice",
        solver(pins=((0, 0), (0, 0))),
        Rule.BOUNDS,
        ("solver.pins[1]", "layer 0 again"),
    ),
    ("digest", lambda p: handmade.with_(p, chain_digest="00"), Rule.DIGESTS, ("got '00'",)),
    ("task", lambda p: handmade.with_(p, task_digest="ab"), Rule.DIGESTS, ("got 'ab'", "None")),
]


def named(plan: Plan, parameters: dict[int, tuple[str, ...]]) -> Plan:
    """`plan` whose layers own these parameters."""
    layers = tuple(
        layer.model_copy(update={"parameters": parameters.get(i, ())})
        for i, layer in enumerate(plan.chain.layers)
    )
    chain = plan.chain.model_copy(update={"layers": layers})
    return handmade.with_(plan, chain=chain, chain_digest=chain.digest())


def test_the_base_plan_keeps_every_rule() -> None:
    """The plan that all mutations start from is valid, also on half-duplex links."""
    assert verify(handmade.base()) == ()
    assert verify(handmade.with_duplex(handmade.base(), "half")) == ()
    check(handmade.base())


@pytest.mark.parametrize(
    ("mutate", "rule", "words"), [m[1:] for m in MUTATIONS], ids=[m[0] for m in MUTATIONS]
)
def test_a_mutation_is_rejected_by_the_rule_it_breaks(
    mutate: Callable[[Plan], Plan], rule: Rule, words: tuple[str, ...]
) -> None:
    """The broken rule is named, with the place and both numbers on one line."""
    lines = [str(v) for v in verify(mutate(handmade.base())) if v.rule is rule]
    assert any(all(word in line for word in words) for line in lines), lines
    assert all("\n" not in line for line in lines)


def test_mutations_cover_every_rule() -> None:
    """No rule is without a mutation (fifo and host have tests of their own)."""
    assert {m[2] for m in MUTATIONS} == set(Rule) - {Rule.FIFO, Rule.HOST}


@pytest.mark.parametrize(("label", "time"), [("0B0", 145), ("2F0", 45), ("2B0", 70), ("1B0", 95)])
def test_an_op_moved_within_its_slack_is_accepted(label: str, time: int) -> None:
    """A neutral move keeps every rule once the memory table and the step are told anew."""
    assert verify(handmade.filled(handmade.moved(handmade.base(), label, time))) == ()


def test_the_exact_budget_is_accepted() -> None:
    """A limit equal to the peak is kept; one byte less is the mutation above."""
    plan = handmade.base()
    assert verify(limit(plan, 0, plan.memory[0].peak_bytes)) == ()


def test_tied_layers_on_one_gpu_are_accepted() -> None:
    """Layers 0 and 2 share GPU 0, so they may share a parameter."""
    assert verify(named(handmade.base(), {0: ("wte",), 2: ("wte",)})) == ()


def test_pins_that_are_kept_are_accepted() -> None:
    """Every layer pinned to the GPU that hosts it."""
    assert verify(solver(pins=((0, 0), (1, 1), (2, 0)))(handmade.base())) == ()


def test_pins_of_unsound_stages_are_judged_without_them() -> None:
    """A layer that no stage hosts is on no GPU: only what the pin itself says can be wrong."""
    plan = solver(pins=((2, 1), (9, 0)))(handmade.base())
    plan = handmade.with_(plan, stages=plan.stages[:2], ops=())
    lines = [str(v) for v in verify(plan) if v.rule is Rule.BOUNDS]
    assert len(lines) == 1
    assert "solver.pins[1]" in lines[0]
