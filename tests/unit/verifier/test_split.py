"""Backwards in two halves: (S1) to (S6), bytes by hand, a mutation for each rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from pipeplan.plan import Op, OpKind, Plan, Remat
from pipeplan.testing.plans_split import random_split_plan
from pipeplan.verifier import Rule, audit, verify
from tests import handmade
from tests.handmade_split import EARLY, LATE, one_gpu, two_gpus


def terms(plan: Plan) -> tuple[int, int, int]:
    """(saved, working, direct) of GPU 0 at its peak."""
    row = audit(plan).memory[0]
    return row.saved_bytes, row.working_bytes, row.direct_bytes


@pytest.mark.parametrize(
    ("times", "change", "need"),
    [
        # I: A(0) = 5 and A(1) = 19, pI - A = 15.
        (LATE, {}, (5 + 19, 34 - 19, 0)),
        # 0B, which gives u back: A(0) = 5 and all of G = 12; pB(0) = 2 + 3 + 8 + 100.
        (LATE, {"layer0": {"backward_workspace_bytes": 100}}, (5 + 12, 113 - 5, 0)),
        # W behind it: pW = 4 + 1 + 100.
        (LATE, {"layer1": {"weight_backward_workspace_bytes": 100}}, (12, 105 - 12, 0)),
        # W before 0B: stage 0 has 3 bytes of the input that W needs; the gradient of 8 waits.
        (EARLY, {"layer1": {"weight_backward_workspace_bytes": 100}}, (5 + 9, 105 - 12, 8)),
        # W before 0B, which finds nothing of G there.
        (EARLY, {"layer0": {"backward_workspace_bytes": 100}}, (5, 113 - 5, 0)),
        # The last layer's turn of I: 5 + 7 + 6 + 1 + 100 + 1 + 6.
        (LATE, {"layer2": {"input_backward_workspace_bytes": 100}}, (5 + 19, 126 - 19, 0)),
        # The last layer's turn of W, all of G beside it.
        (LATE, {"layer2": {"weight_backward_workspace_bytes": 100}}, (12, 100, 0)),
    ],
)
def test_bytes_by_hand(
    times: Mapping[str, int], change: dict[str, Any], need: tuple[int, int, int]
) -> None:
    """Each instant of a step in turn is the peak: (S3) to (S5), and u of (M2)."""
    plan = one_gpu(times, **change)
    assert verify(plan) == ()
    assert terms(plan) == need


def test_a_storage_that_the_next_weights_need_stays() -> None:
    """(S4): behind layer 1, max(so_1, xw_2): with so_1 = 0 and xw_2 = 2, 6 bytes become 2."""
    plan = one_gpu(layer1={"saved_output_bytes": 0, "input_backward_workspace_bytes": 50})
    # K_1 = 5: A(1) = 5 + 7 + 5 + 1 = 18; the first layer's turn: 5 + 3 + 2 + 50 + 6 + 8 + 5.
    assert terms(plan) == (5 + 18, 79 - 18, 0)


def test_a_run_is_computed_again_in_i() -> None:
    """(S6): of layers 1..2: si' = 8, pF = 22, pI = 37, ends 17: iw = 20; A = 5, pI = 34 again."""
    plan = one_gpu()
    stages = (
        plan.stages[0],
        plan.stages[1].model_copy(update={"remat": Remat(recompute=((1, 2),))}),
    )
    longer = {"1I0": 5, "0B0": 0, "1W0": 0}
    times = LATE | {"0B0": 8, "1W0": 9}
    ops = []
    for op in plan.ops:
        lasts = longer["1I0"] if op.label == "1I0" else op.duration_ns
        ops.append(op.model_copy(update={"start_ns": times[op.label], "duration_ns": lasts}))
    plan = handmade.with_(plan, stages=stages, ops=tuple(ops), period_ns=11)
    assert terms(plan) == (5 + 5, 34 - 5, 0)
    assert verify(handmade.filled(plan)) == ()


SLOWER = {"forward_split_ns": 4, "backward_input_ns": 5}
"""Of layer 1, whose forward takes 1 ns before a whole backward, and I 2 ns as the rest of one."""


def lasting(**durations: int) -> Plan:
    """`one_gpu` with `SLOWER`, one op behind the other; `durations` by label."""
    plan, now, ops = layer(one_gpu(), 1, **SLOWER), 0, []
    lasts = {"0F0": 1, "0B0": 1, "1W0": 2} | durations
    for label in ("0F0", "1F0", "1I0", "0B0", "1W0"):
        (op,) = (each for each in plan.ops if each.label == label)
        ops.append(op.model_copy(update={"start_ns": now, "duration_ns": lasts[label]}))
        now += lasts[label]
    return handmade.with_(plan, ops=tuple(ops), period_ns=now)


def test_a_split_backward_takes_what_was_measured_of_it() -> None:
    """(S2): 1F 4 + 1 and 1I 5 + 1 where the chain tells, not 2 and 3."""
    assert verify(handmade.filled(lasting(**{"1F0": 5, "1I0": 6}))) == ()
    wrong = verify(lasting(**{"1F0": 2, "1I0": 3}))
    assert [each.where for each in wrong if each.rule is Rule.DURATIONS] == ["op 1F0", "op 1I0"]


def test_a_run_takes_its_forward_again_as_that_of_a_split_backward() -> None:
    """(S6): the first forward of 1..2 keeps nothing and takes 2; I takes 4 + 1 and 5 + 1."""
    plan = lasting(**{"1F0": 2, "1I0": 11})
    again = plan.stages[1].model_copy(update={"remat": Remat(recompute=((1, 2),))})
    plan = handmade.filled(handmade.with_(plan, stages=(plan.stages[0], again)))
    assert verify(plan) == ()


def test_a_micro_batch_is_in_flight_until_i_ends() -> None:
    """1F 1..3 and 3..5, 1I 5..8 and 8..11, both W later: two in flight, as without W."""
    assert audit(two_gpus()).in_flight == (2, 2)
    plan = one_gpu()
    assert audit(plan).in_flight == (1, 1)
    assert plan.step_ns == 9


def split(plan: Plan, index: int, value: bool = True) -> Plan:
    """`plan` whose stage `index` is said to have I and W, or B."""
    stages = list(plan.stages)
    stages[index] = stages[index].model_copy(update={"split_backward": value})
    return handmade.with_(plan, stages=tuple(stages))


def layer(plan: Plan, index: int, **fields: Any) -> Plan:
    """`plan` with fields of one layer replaced."""
    layers = list(plan.chain.layers)
    layers[index] = layers[index].model_copy(update=fields)
    chain = plan.chain.model_copy(update={"layers": tuple(layers)})
    return plan.model_copy(update={"chain": chain, "chain_digest": chain.digest()})


def op(plan: Plan, label: str) -> Op:
    """The op `label`."""
    return next(each for each in plan.ops if each.label == label)


def more(plan: Plan, label: str, **fields: Any) -> Plan:
    """`plan` with the op `label` once more, fields replaced."""
    return handmade.with_(plan, ops=(*plan.ops, op(plan, label).model_copy(update=fields)))


def less(plan: Plan, label: str) -> Plan:
    """`plan` without the op `label`."""
    return handmade.with_(plan, ops=tuple(each for each in plan.ops if each.label != label))


MUTATIONS: list[tuple[str, Callable[[Plan], Plan], Rule, tuple[str, ...]]] = [
    (
        "first stage",
        lambda p: split(p, 0),
        Rule.STAGES,
        ("stages[0].split_backward", "first stage"),
    ),
    (
        "2bw",
        lambda p: handmade.with_(p, semantics="2bw"),
        Rule.STAGES,
        ("stages[1].split_backward", "got it under 2bw", "need flush"),
    ),
    (
        "paper",
        lambda p: handmade.with_(p, memory_model="paper"),
        Rule.STAGES,
        ("stages[1].split_backward", "paper memory model", "exact"),
    ),
    (
        "time unknown",
        lambda p: layer(p, 2, backward_weight_ns=None),
        Rule.STAGES,
        ("layer 2 has no backward_weight_ns",),
    ),
    (
        "bytes unknown",
        lambda p: layer(p, 1, saved_for_weight_bytes=None, saved_input_for_weight_bytes=0),
        Rule.STAGES,
        ("layer 1 has no saved_for_weight_bytes",),
    ),
    ("no W", lambda p: less(p, "1W0"), Rule.OPS, ("1W0", "got 0", "need 1")),
    ("no I", lambda p: less(p, "1I0"), Rule.OPS, ("1I0", "got 0", "need 1")),
    (
        "B too",
        lambda p: more(p, "1I0", kind=OpKind.B),
        Rule.OPS,
        ("1B0", "got 1", "need 0", "stage 1 is split"),
    ),
    (
        "W of a whole one",
        lambda p: more(p, "1W0", stage=0),
        Rule.OPS,
        ("0W0", "got 1", "need 0", "stage 0 is not split"),
    ),
    ("said to be whole", lambda p: split(p, 1, value=False), Rule.OPS, ("1B0", "got 0", "need 1")),
    ("W twice", lambda p: more(p, "1W0"), Rule.OPS, ("1W0", "got 2", "need 1")),
    (
        "elsewhere",
        lambda p: handmade.changed(p, "1W0", gpu=0),
        Rule.OPS,
        ("1W0", "got GPU 0", "need 1"),
    ),
    (
        "as long as B",
        lambda p: handmade.changed(p, "1I0", duration_ns=5),
        Rule.DURATIONS,
        ("1I0", "got 5 ns", "need 3 ns"),
    ),
    (
        "W too short",
        lambda p: handmade.changed(p, "1W0", duration_ns=1),
        Rule.DURATIONS,
        ("1W0", "got 1 ns", "need 2 ns"),
    ),
    (
        "W first",
        lambda p: handmade.moved(p, "1W0", 7),
        Rule.PRECEDENCE,
        ("1I0 -> 1W0", "starts at 7 ns", "need 8 ns"),
    ),
    (
        "W beside I",
        lambda p: handmade.moved(p, "1W0", 10),
        Rule.GPU,
        ("GPU 1", "1W0 starts 1 ns before 1I1 ends"),
    ),
    (
        "out of order",
        lambda p: handmade.moved(handmade.moved(p, "1W0", 13), "1W1", 11),
        Rule.FIFO,
        ("1W0 -> 1W1", "starts at 11 ns", "need 15 ns"),
    ),
    (
        "start beyond",
        lambda p: handmade.changed(p, "1W1", start_ns=15),
        Rule.SHIFTS,
        ("1W1", "got start 15 ns"),
    ),
    (
        "table",
        lambda p: handmade.with_(
            p, memory=(p.memory[0], p.memory[1].model_copy(update={"saved_bytes": 1}))
        ),
        Rule.MEMORY,
        ("GPU 1, saved_bytes",),
    ),
    ("step to I", lambda p: handmade.with_(p, step_ns=11), Rule.STEP, ("got 11 ns", "need 15 ns")),
]


def test_the_plan_of_the_mutations_keeps_every_rule() -> None:
    """Two stages, two micro-batches, W last."""
    assert verify(two_gpus()) == ()


@pytest.mark.parametrize(
    ("mutate", "rule", "words"), [m[1:] for m in MUTATIONS], ids=[m[0] for m in MUTATIONS]
)
def test_a_mutation_is_rejected_by_the_rule_it_breaks(
    mutate: Callable[[Plan], Plan], rule: Rule, words: tuple[str, ...]
) -> None:
    """The broken rule is named, with the place and the numbers."""
    lines = [str(v) for v in verify(mutate(two_gpus())) if v.rule is rule]
    assert any(all(word in line for word in words) for line in lines), lines


def test_what_comes_back_from_the_host_is_there_before_i() -> None:
    """(H3) with I in place of B, on plans of which one PREFETCH is put at the start of its I."""
    tried = 0
    for seed in range(60):
        plan = random_split_plan(seed, offload=True)
        for back in (each for each in plan.ops if each.kind is OpKind.PREFETCH):
            stage = plan.stages[back.stage]
            if not stage.split_backward or not back.duration_ns:
                continue
            inputs = op(plan, f"{back.stage}I{back.copy_}")
            late = handmade.changed(plan, back.label, start_ns=inputs.start_ns, shift=inputs.shift)
            found = [v for v in verify(late) if v.rule is Rule.PRECEDENCE]
            assert any(f"{back.label} -> {inputs.label}" in str(v) for v in found)
            tried += 1
    assert tried > 10
