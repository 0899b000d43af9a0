"""Lowering of backwards in two halves: order, buffers, waits, and what holds a message up."""

from __future__ import annotations

from random import Random

import pytest

from pipeplan.errors import InputError, InvalidPlanError
from pipeplan.lowering import buffer_slots, check_deadlock, lower, wait_cycle
from pipeplan.plan import OpKind
from pipeplan.program import ActionKind, Program
from pipeplan.testing.plans_split import random_split_plan
from tests import handmade
from tests.handmade_split import EARLY, one_gpu, two_gpus
from tests.handmade_unrolled import Unrolled

GOOD = """\
0F0 0SEND_F0 0FREE_F0 0RECV_B0 0B0
1RECV_F0 1F0 1I0 1SEND_B0 1FREE_B0 1W0
"""


def test_the_order_of_one_gpu() -> None:
    """W stands where it starts; under flush there is no update in the period."""
    assert str(lower(one_gpu())).splitlines()[1] == "0,1: 0F0+0 1F0+0 1I0+0 0B0+0 1W0+0"
    assert str(lower(one_gpu(EARLY))).splitlines()[1] == "0,1: 0F0+0 1F0+0 1I0+0 1W0+0 0B0+0"


def test_the_order_of_two_gpus() -> None:
    """I ends at 8 and 11: then its gradient is sent, W comes last.

    The second activation comes at 2, inside 1F0 (1..3): it is posted at 1.
    """
    pattern = lower(two_gpus())
    assert " ".join(map(str, pattern.ranks[1])) == (
        "1RECV_F0+0 1RECV_F1+0 1F0+0 1F1+0 1I0+0 1SEND_B0+0 1FREE_B0+0 1I1+0"
        " 1SEND_B1+0 1FREE_B1+0 1W0+0 1W1+0"
    )
    check_deadlock(pattern)


def test_w_without_length_follows_all_that_happens_then() -> None:
    """(S1): at one instant the position 6S + s is behind those of the chain and of the host."""
    layers = [{"output_bytes": 8}, {"backward_weight_ns": 0, "saved_for_weight_bytes": 0}]
    of = handmade.chain([(2, 2), (0, 0)], layers)
    times = {"0F0": 0, "1F0": 2, "1I0": 2, "1W0": 2, "0B0": 2}
    fields = {"semantics": "flush", "microbatches": 1}
    plan = handmade.plan(of, [(0, 0, 0), (1, 1, 0)], 4, times, split=(1,), **fields)
    assert str(lower(plan)).splitlines()[1] == "0,1: 0F0+0 1F0+0 1I0+0 1W0+0 0B0+0"


def test_messages_wait_in_slots_from_i_and_for_i() -> None:
    """Two gradients of GPU 1 leave at once; both activations lie there before their forwards."""
    slots = buffer_slots(lower(two_gpus()))
    assert slots[ActionKind.SEND_B, 1] == 1
    assert slots[ActionKind.RECV_B, 0] == 1
    assert set(slots) == {
        (ActionKind.SEND_F, 0),
        (ActionKind.RECV_F, 1),
        (ActionKind.SEND_B, 1),
        (ActionKind.RECV_B, 0),
    }


@pytest.mark.parametrize("label", ["1I0", "1W1"])
def test_a_half_is_missing(label: str) -> None:
    """The op that a split stage lacks is named."""
    plan = two_gpus()
    ops = tuple(op for op in plan.ops if op.label != label)
    with pytest.raises(InvalidPlanError, match=f"op {label}: got no, need one"):
        lower(plan.model_copy(update={"ops": ops}))


def test_b_beside_the_halves_is_too_much() -> None:
    """A split stage has no B."""
    plan = two_gpus()
    extra = next(op for op in plan.ops if op.label == "1I0").model_copy(update={"kind": OpKind.B})
    with pytest.raises(InvalidPlanError, match="op 1B0: got one, need none"):
        lower(plan.model_copy(update={"ops": (*plan.ops, extra)}))


def test_a_written_program_ends() -> None:
    """I takes the place of B between its messages."""
    assert wait_cycle(Program.parse(GOOD)) is None


def test_w_waits_for_its_i() -> None:
    """W before I on its rank is a circle."""
    cycle = wait_cycle(Program.parse(GOOD.replace("1I0", "1W0", 1).replace("0 1W0\n", "0 1I0\n")))
    assert cycle is not None
    assert any("1W0 waits for rank 1: 1I0" in line for line in cycle)


def test_a_gradient_waits_for_its_i() -> None:
    """SEND_B before the I that makes it is a circle."""
    cycle = wait_cycle(Program.parse(GOOD.replace("1I0 1SEND_B0", "1SEND_B0 1I0")))
    assert cycle is not None
    assert any("1SEND_B0 waits for rank 1: 1I0" in line for line in cycle)


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        (" 1W0", "", "1I0 needs 1W0"),
        ("1I0 ", "", "needs 1I0"),
        ("1I0", "1I0 1B0", "got 1I0 and 1B0, need one of them"),
        ("1I0", "1B0", "needs 1I0"),
        ("1F0 ", "", "needs 1F0"),
    ],
)
def test_what_a_written_program_lacks(old: str, new: str, text: str) -> None:
    """I and W are there together, without B, behind a forward."""
    with pytest.raises(InputError, match=text):
        check_deadlock(Program.parse(GOOD.replace(old, new, 1)))


def test_holds_are_those_of_the_definition() -> None:
    """(O1)-(O3): SENDs and RECVs stand where looking at every compute puts them."""
    for seed in range(30):
        plan = random_split_plan(seed, offload=False)
        grid, pattern = Unrolled(plan), lower(plan)
        sends = [op for op in plan.ops if op.kind.is_send]
        for op in Random(seed).sample(sends, min(4, len(sends))):
            assert op.link is not None
            time = op.shift * plan.period_ns + op.start_ns
            issue = grid.hold(op.link[0], time)
            post = grid.hold(op.link[1], issue)
            peer = op.stage + (1 if op.kind is OpKind.SEND_F else -1)
            receive = ActionKind.RECV_F if op.kind is OpKind.SEND_F else ActionKind.RECV_B
            found = {(a.kind, a.stage, a.copy): a.shift for rank in pattern.ranks for a in rank}
            assert found[ActionKind(op.kind), op.stage, op.copy_] == issue // plan.period_ns
            assert found[receive, peer, op.copy_] == post // plan.period_ns
