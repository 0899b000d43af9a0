"""Stages that compute runs of layers again: (V1) to (V4) by hand, through both judges."""

from __future__ import annotations

import pytest

from pipeplan import lowering, simulator
from pipeplan.errors import InputError, InvalidPlanError
from pipeplan.plan import Plan, Remat, Stage
from pipeplan.testing.plans import settle
from pipeplan.units import MAX_INT
from pipeplan.verifier import Rule, audit, verify
from tests import handmade

CHAIN = handmade.chain(
    [(1, 2), (3, 4), (5, 6)],
    [
        {"output_bytes": 10, "saved_input_bytes": 4, "saved_bytes": 3, "saved_output_bytes": 5},
        {
            "output_bytes": 8,
            "saved_input_bytes": 7,
            "saved_bytes": 2,
            "saved_output_bytes": 1,
            "forward_workspace_bytes": 1,
            "backward_workspace_bytes": 1,
        },
        {
            "output_bytes": 2,
            "saved_input_bytes": 8,
            "saved_bytes": 4,
            "forward_workspace_bytes": 2,
            "backward_workspace_bytes": 3,
        },
    ],
    input_bytes=6,
)


def one_stage(run: tuple[int, int], forward: int, backward: int) -> Plan:
    """The chain on one GPU, `run` computed again, forward and backward of this length in ns."""
    stage = Stage(id=0, layers=(0, 2), gpu=0, remat=Remat(recompute=(run,)))
    period = forward + backward
    plain = handmade.plan(
        CHAIN,
        [(0, 2, 0)],
        period,
        {"0F0": 0, "0B0": forward},
        durations={"0F": forward, "0B": backward},
    )
    changed = plain.model_copy(update={"stages": (stage,)})
    found = audit(changed)
    return changed.model_copy(update={"memory": found.memory, "step_ns": found.step_ns})


@pytest.mark.parametrize(
    ("run", "forward", "backward", "saved", "peak"),
    [
        # A = 4 + 3 + x_1 10; B of the run: (V4) 34 - 22 over x_1 10, gy 2, gx 10: 7 + 34.
        ((1, 2), 9, 20, 17, 41),
        # A = 4 + 3 + K_0 7 + r_1 2 + x_2 8; again: gy 2 + x 8 + r 4 + fw 2 + y 2 = 18, back:
        # max(si 8, so 1) + r 4 + bw 3 + gy 2 + gx 8 = 25; 16 + 25.
        ((2, 2), 9, 17, 24, 41),
        # A = x_0 6; again: gy 2 + (si 4, r 9, K 7, I 8, fw 2, y 2), back at 2: si 4 + r 9 +
        # K 7 + 8 + bw 3 + gy 2 + gx 8 = 41.
        ((0, 2), 9, 21, 6, 41),
    ],
)
def test_by_hand(run: tuple[int, int], forward: int, backward: int, saved: int, peak: int) -> None:
    """Times, kept bytes and peak of a run behind a kept layer, alone at the end, and of all."""
    plan = one_stage(run, forward, backward)
    assert verify(plan) == ()
    assert plan.memory[0].saved_bytes == saved
    assert plan.memory[0].peak_bytes == peak
    simulation = simulator.check(plan, lowering.lower(plan))
    assert simulation.memory == plan.memory


def test_a_run_may_hold_another() -> None:
    """Layer 0 runs three times; when 0..2 is computed again, it keeps x_0 6 alone, not r 3, so 5.

    Again: gy 2 + (x_0 6, K_0 7, I 8, r 2 + 4, fw 2, y 2); back at 2, the most: x_0 6 + K_0 7 +
    K_1 8 + r 6 + bw 3 + gy 2 + gx 8 = 40.
    """
    nested = one_stage((0, 2), 9, 22)
    remat = Remat(recompute=((0, 2), (0, 0)))
    stages = (nested.stages[0].model_copy(update={"remat": remat}),)
    held = settle(nested.model_copy(update={"stages": stages}))
    assert verify(held) == ()
    assert simulator.check(held, lowering.lower(held)).memory == held.memory
    assert held.memory[0].peak_bytes == 40


def test_buffers_are_copied_beside_the_second_forward() -> None:
    """(V4): gy 2, si 4, K 7, r 9, I 8, fw 2, y 2 are 34; with buffers 3 + 5 more than 41 back."""
    layers = list(CHAIN.layers)
    layers[0] = layers[0].model_copy(update={"buffer_bytes": 3})
    layers[2] = layers[2].model_copy(update={"buffer_bytes": 5})
    plan = one_stage((0, 2), 9, 21)
    chain = CHAIN.model_copy(update={"layers": tuple(layers)})
    again = settle(plan.model_copy(update={"chain": chain, "chain_digest": chain.digest()}))
    assert verify(again) == ()
    assert again.memory[0].peak_bytes == 42
    assert simulator.check(again, lowering.lower(again)).memory == again.memory


@pytest.mark.parametrize(("light", "peak"), [((0, 60, 0), 84), ((60, 0, 0), 76), ((0, -8, 0), 41)])
def test_what_a_first_forward_needs_may_be_known(light: tuple[int, int, int], peak: int) -> None:
    """(V3): x_0 6 + x_1 10 + lw 60 + y 8, or x_0 6 + lw 60 + y 10; else what comes back counts."""
    layers = tuple(
        layer.model_copy(update={"forward_light_workspace_bytes": size})
        for layer, size in zip(CHAIN.layers, light, strict=True)
    )
    plan = one_stage((0, 2), 9, 21)
    chain = CHAIN.model_copy(update={"layers": layers})
    told = settle(plan.model_copy(update={"chain": chain, "chain_digest": chain.digest()}))
    assert verify(told) == ()
    assert told.memory[0].peak_bytes == peak
    assert simulator.check(told, lowering.lower(told)).memory == told.memory


@pytest.mark.parametrize(
    "field", ["forward_ns", "backward_ns", "output_bytes", "saved_bytes", "optimizer_bytes"]
)
def test_a_run_whose_sums_no_file_holds_is_judged(field: str) -> None:
    """The verifier never raises, and a replay says what it found; both called it a bug."""
    plan = one_stage((1, 2), 9, 20)
    layers = [layer.model_copy(update={field: MAX_INT}) for layer in CHAIN.layers]
    chain = CHAIN.model_copy(update={"layers": tuple(layers)})
    changed = plan.model_copy(update={"chain": chain, "chain_digest": chain.digest()})
    wanted = Rule.DURATIONS if field.endswith("_ns") else Rule.BUDGET
    assert wanted in {violation.rule for violation in verify(changed)}
    with pytest.raises((InputError, InvalidPlanError), match=r"differs|got a peak of"):
        simulator.simulate(changed, lowering.lower(changed))


def test_a_second_micro_batch_costs_what_is_kept() -> None:
    """Beside a running one, each micro-batch in flight adds A, not the whole stage's bytes."""
    one = one_stage((1, 2), 9, 20)
    ops = tuple(op.model_copy(update={"shift": 1 if op.label == "0B0" else 0}) for op in one.ops)
    two = one.model_copy(update={"ops": ops})
    assert audit(two).in_flight == (2,)
    assert audit(two).memory[0].peak_bytes == 41 + 17
