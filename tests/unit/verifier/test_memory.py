"""Memory terms on chains worked out by hand; each number is derived in a comment."""

from __future__ import annotations

from typing import Any

import pytest

from pipeplan.cluster import uniform
from pipeplan.plan import MemoryRow, Plan
from pipeplan.verifier import verify
from tests import handmade


def terms(plan: Plan, gpu: int) -> tuple[int, int, int, int, int]:
    """(states, saved, working, direct, message) of one GPU; the plan must be valid."""
    assert verify(plan) == ()
    row = plan.memory[gpu]
    found = (row.states_bytes, row.saved_bytes, row.working_bytes)
    found += (row.direct_bytes, row.message_bytes)
    assert row.peak_bytes == sum(found)
    return found


def test_the_base_plan_by_hand() -> None:
    """Three stages, two of them on GPU 0, every transfer taking time.

    GPU 0 keeps 2*100+100 + 2*50+50 = 450 of states. At 10 its peak: 2B starts, three micro-batches
    of stage 0 (7 each) and one of stage 2 (5) are saved: 26; 2B works with gy 1 + gx 4 = 5 more;
    0F's output of 3 waits for its transfer (10..15) and a gradient of 3 for 0B (55..80): 6.
    GPU 1 keeps 600. At 15 1F starts beside one more micro-batch (15..115 is longer than T): 2*9,
    works with x 3 + y 4 = 7; at 35 1B the same: 2*9, gy 4 + gx 3 = 7, and 1F's output of 4 waits
    until 41: 629.
    """
    plan = handmade.base()
    assert plan.memory[0] == MemoryRow(
        gpu=0,
        states_bytes=450,
        saved_bytes=26,
        working_bytes=5,
        direct_bytes=0,
        message_bytes=6,
        peak_bytes=487,
        budget_bytes=10_000,
    )
    assert terms(plan, 1) == (600, 18, 7, 0, 4)


def one_stage(workspace: int, **fields: Any) -> Plan:
    """Three layers in one stage; F 0..3, B 3..6, T = 6."""
    layers = [
        {"output_bytes": 8, "saved_input_bytes": 4, "saved_bytes": 2, "saved_output_bytes": 3},
        {"output_bytes": 6, "saved_input_bytes": 8, "saved_bytes": 3, "saved_output_bytes": 6},
        {"output_bytes": 1, "saved_input_bytes": 5, "saved_bytes": 4, "saved_output_bytes": 1},
    ]
    layers[0] |= {"forward_workspace_bytes": 1, "backward_workspace_bytes": 5}
    layers[1] |= {"forward_workspace_bytes": 2, "backward_workspace_bytes": 1}
    layers[2] |= {"forward_workspace_bytes": 3, "backward_workspace_bytes": 2}
    layers[0] |= {"weight_bytes": 10, "gradient_bytes": 1, "optimizer_bytes": 100}
    layers[1] |= {"weight_bytes": 20, "gradient_bytes": 2, "optimizer_workspace_bytes": workspace}
    layers[2] |= {"weight_bytes": 30, "gradient_bytes": 3, "optimizer_workspace_bytes": 5}
    of = handmade.chain([(1, 1)] * 3, layers, input_bytes=10)
    return handmade.plan(of, [(0, 2, 0)], 6, {"0F0": 0, "0B0": 3}, **fields)


def test_boundaries_inside_a_stage_are_counted_once() -> None:
    """(M1) to (M3): K_0 = max(3, 8) = 8, K_1 = max(6, 5) = 6.

    A  = 4 + (2+3+4) + (8+6) + 1 = 28
    pF = max(10+2+1+8, 8+4+5+2+6, 6+4+8+9+3+1) = max(21, 25, 31) = 31
    pB = max(4+2+3+5+8+0, 4+5+8+6+1+6+8, 4+9+14+1+2+1+6) = max(22, 38, 37) = 38
    states = V * 60 + 6 + 100; the peak is in B: 28 + 10.
    """
    assert terms(one_stage(0), 0) == (226, 28, 10, 0, 0)
    assert terms(one_stage(0, semantics="flush"), 0) == (166, 28, 10, 0, 0)


def test_forward_can_be_the_peak() -> None:
    """With a forward workspace of 30 in layer 0: pF = 10 + 2 + 30 + 8 = 50 = 28 + 22."""
    plan = one_stage(0)
    layers = list(plan.chain.layers)
    layers[0] = layers[0].model_copy(update={"forward_workspace_bytes": 30})
    chain = plan.chain.model_copy(update={"layers": tuple(layers)})
    plan = handmade.with_(plan, chain=chain, chain_digest=chain.digest())
    assert terms(handmade.filled(plan), 0) == (226, 28, 22, 0, 0)


def test_the_optimizer_instant_of_2bw() -> None:
    """The step follows B, when nothing is saved any more: it counts alone, W = max over layers."""
    assert terms(one_stage(50), 0) == (226, 0, 50, 0, 0)
    assert terms(one_stage(37), 0) == (226, 28, 10, 0, 0)
    # 38 = 28 + 10 is a tie: at time 0 the step behind the last period's B is the first to reach it
    assert terms(one_stage(38), 0) == (226, 0, 38, 0, 0)


def test_the_optimizer_instant_of_flush() -> None:
    """The update follows the drain, after every event: it shows only where it is the larger."""
    assert terms(one_stage(39, semantics="flush"), 0) == (166, 0, 39, 0, 0)
    assert terms(one_stage(38, semantics="flush"), 0) == (166, 28, 10, 0, 0)


def test_the_2bw_step_counts_beside_what_is_alive() -> None:
    """Two stages of one GPU: when stage 1's B ends (4), stage 0 still saves 7: 7 + 20."""
    layers = [
        {"saved_bytes": 7},
        {"saved_bytes": 1, "optimizer_workspace_bytes": 20},
    ]
    of = handmade.chain([(1, 1), (1, 1)], layers)
    times = {"0F0": 0, "1F0": 1, "1B0": 3, "0B0": 5}
    stages = [(0, 0, 0), (1, 1, 0)]
    assert terms(handmade.plan(of, stages, 6, times), 0) == (0, 7, 20, 0, 0)
    assert terms(handmade.plan(of, stages, 6, times, semantics="flush"), 0) == (0, 0, 20, 0, 0)


PAIR = (
    {"output_bytes": 8, "saved_output_bytes": 5, "saved_bytes": 2, "output_gradient_bytes": 4},
    {"output_bytes": 1, "saved_input_bytes": 7, "saved_bytes": 3},
)
"""Two layers; alone on a GPU: A = 2+5 = 7, pF = 2+8 = 10, pB = 7+4 = 11, and
A = 7+3 = 10, pF = max(7, 8)+3+1 = 12, pB = 10+1+4 = 15."""


def neighbours(period: int, times: dict[str, int]) -> Plan:
    """Both layers of PAIR on one GPU, a stage each."""
    of = handmade.chain([(1, 1), (1, 1)], PAIR)
    return handmade.plan(of, [(0, 0, 0), (1, 1, 0)], period, times)


def test_neighbouring_stages_share_the_saved_output() -> None:
    """Stage 1 after stage 0's saved output of 5: si' = 2, x' = 3, A = 5, pF = 3+3+1, pB = 5+1+4.

    T = 8, one micro-batch: 10 in 0F, 7+3 direct, 12+2 in 1F, 12+5 in 1B (peak), 7+4, 7+4.
    """
    plan = neighbours(8, {"0F0": 0, "1F0": 2, "1B0": 4, "0B0": 6})
    assert terms(plan, 0) == (0, 12, 5, 0, 0)


def test_direct_bytes_between_neighbours() -> None:
    """T = 4: 1B at 1 runs beside two micro-batches of stage 0 and one of stage 1: 14 + 5.

    It works with 5; the unsaved 8 - 5 = 3 bytes of 0F's output wait from 1 to 2: 27.
    At 2 it is 19 + 2 + 4 (the gradient), at 3 19 + 4, at 0 19 + 3.
    """
    plan = neighbours(4, {"0F0": 0, "1F0": 2, "1B0": 5, "0B0": 7})
    assert terms(plan, 0) == (0, 19, 5, 3, 0)


def across(backward_ns: int, start: int, **fields: Any) -> Plan:
    """PAIR on two GPUs, transfers of 1 ns, T = 8; 1B lasts `backward_ns` from `start`."""
    of = handmade.chain([(2, 2), (3, backward_ns)], PAIR)
    times = {"0F0": 0, "0SEND_F0": 2, "1F0": 3, "1B0": start, "1SEND_B0": 11, "0B0": 12}
    stages = [(0, 0, 0), (1, 1, 1)]
    cluster = uniform(2, 1000, latency_ns=1)
    return handmade.plan(of, stages, 8, times, cluster=cluster, **fields)


@pytest.mark.parametrize(("backward_ns", "start"), [(3, 8), (4, 7)])
def test_a_receive_is_posted_before_the_compute_it_would_interrupt(
    backward_ns: int, start: int
) -> None:
    """(M5): GPU 1 is inside 1B when 0 sends at 2, so it posts at 1B's start, 0 or -1.

    There it holds the tensor's 8 beside 10 saved and 15 - 10 working: 23. GPU 0 keeps two
    micro-batches, 14, and 3 while it works from 0, 4 while it works from 4; first it reaches 18 at
    3, when it posts the gradient of 4.
    """
    plan = across(backward_ns, start)
    assert terms(plan, 1) == (0, 10, 5, 0, 8)
    assert terms(plan, 0) == (0, 14, 0, 0, 4)


def test_a_send_waits_for_the_senders_compute() -> None:
    """(O2): a transfer that starts inside a compute is issued at its start, and posted no later.

    0F 0..2, 0B 4..6 of T = 8, the transfer at 5: issued at 4, so posted at 4 as well, where GPU 1
    starts 1B (4..5). Were it posted at 5, 1B would run without these 8 bytes.
    """
    of = handmade.chain([(2, 2), (3, 1)], PAIR)
    times = {"0F0": 0, "0SEND_F0": 5, "1F0": 6, "1B0": 12, "1SEND_B0": 13, "0B0": 20}
    plan = handmade.plan(
        of, [(0, 0, 0), (1, 1, 1)], 8, times, cluster=uniform(2, 1000, latency_ns=1)
    )
    # posts at 4 = 1B's own start (12): RECV comes first, then 1B starts: 10 + 5 + 8
    assert terms(plan, 1) == (0, 10, 5, 0, 8)
    # GPU 0: three micro-batches are alive from 0 to 6 (0..22): 21. 1B's gradient is sent at
    # 13 = 5, inside 0B (4..6), so posted at 4, before 0B starts and takes the old one: 2 * 4;
    # 0F's output of 3 is there from 2 to 6: 21 + 11; 21 + 4 + 7 right after is a tie
    assert terms(plan, 0) == (0, 21, 0, 0, 11)


def test_a_message_may_wait_longer_than_a_period() -> None:
    """1F takes the message two periods after its transfer: two copies always wait, 16 bytes.

    At 18 = 2 a third is posted before 1F takes the oldest: 24; 1F runs with 12 + 16; 1B, at 4,
    with 10 + 5 + 16. The paper model counts two slots, 16, and one of 8 for the gradient.
    """
    of = handmade.chain([(2, 2), (2, 2)], PAIR)
    times = {"0F0": 0, "0SEND_F0": 2, "1F0": 18, "1B0": 20, "1SEND_B0": 22, "0B0": 22}
    stages = [(0, 0, 0), (1, 1, 1)]
    assert terms(handmade.plan(of, stages, 8, times), 1) == (0, 10, 5, 0, 16)
    paper = handmade.plan(of, stages, 8, times, memory_model="paper")
    assert [row.message_bytes for row in paper.memory] == [16, 24]


def test_paper_model() -> None:
    """(P1) to (P5) on PAIR: st = 7 and 10, buffers 8 at each end of both transfers.

    GPU 0: pF = max(7, 0) + 8 = 15, pB = 8; at 0F one older micro-batch is saved, 7 + 15 = 22; at
    0B two, 14 + 8 = 22: a tie, 0F is first. GPU 1: pF = max(10, 8) + 1, pB = 1 + 8; at 1B 10 + 9.
    """
    plan = across(3, 8, memory_model="paper")
    assert terms(plan, 0) == (0, 7, 15, 0, 16)
    assert terms(plan, 1) == (0, 10, 9, 0, 16)


def test_paper_model_of_one_stage() -> None:
    """Both layers in a stage: A = 17, pF = max(7+8, 7+10+1) = 18, pB = max(8-10, 1+8) = 9."""
    layers = [dict(PAIR[0]), dict(PAIR[1]) | {"weight_bytes": 5, "optimizer_bytes": 1000}]
    of = handmade.chain([(1, 1), (1, 1)], layers)
    times = {"0F0": 0, "0B0": 2}
    plan = handmade.plan(of, [(0, 1, 0)], 4, times, memory_model="paper")
    assert terms(plan, 0) == (15, 17, 9, 0, 0)


def test_paper_model_counts_direct_tensors_in_full() -> None:
    """Two stages of one GPU: the whole 8 bytes wait between F and F, and between B and B.

    T = 8: 1F works with max(10, 8) + 1 = 11 beside 7: 18; 1B with 9 beside 17: 26; 0B with 8
    beside 7; nothing is direct at a start.
    With T = 4 1B runs at 1 while a fresh output waits: two stages 0, one stage 1: 14 + 10 + 9 + 8.
    """
    of = handmade.chain([(1, 1), (1, 1)], PAIR)
    stages = [(0, 0, 0), (1, 1, 0)]
    slow = {"0F0": 0, "1F0": 2, "1B0": 4, "0B0": 6}
    plan = handmade.plan(of, stages, 8, slow, memory_model="paper")
    assert terms(plan, 0) == (0, 17, 9, 0, 0)
    fast = {"0F0": 0, "1F0": 2, "1B0": 5, "0B0": 7}
    plan = handmade.plan(of, stages, 4, fast, memory_model="paper")
    assert terms(plan, 0) == (0, 24, 9, 8, 0)


@pytest.mark.parametrize("model", ["exact", "paper"])
def test_a_gpu_without_stages_has_zeros(model: str) -> None:
    """Its row is there, with its budget and nothing else."""
    of = handmade.chain([(1, 1)], [{"weight_bytes": 9, "output_bytes": 1}])
    times = {"0F0": 0, "0B0": 1}
    plan = handmade.plan(of, [(0, 0, 1)], 2, times, cluster=uniform(3, 77), memory_model=model)
    assert terms(plan, 0) == terms(plan, 2) == (0, 0, 0, 0, 0)
    assert plan.memory[2].budget_bytes == 77


def test_zero_length_ops_work_for_an_instant() -> None:
    """(O5): F and B without length still run: A = 10, pF 12, pB 15 - gx of stage 1 at one time.

    Everything happens at 0. GPU 1: RECV (class 1) first: 8; then in order of position 1F: 12; 1B:
    15, its end leaves the gradient of 4 until FREE. GPU 0: 0F 10, its output of 3 waits until
    FREE, before it the gradient is posted (class 1, before 0F: 4): 4 + 10, then 4 + 7 + 3, then 0B
    takes the gradient: 11.
    """
    of = handmade.chain([(0, 0), (0, 0)], PAIR)
    times = {"0F0": 0, "1F0": 0, "1B0": 0, "0B0": 0}
    plan = handmade.plan(of, [(0, 0, 0), (1, 1, 1)], 1, times)
    assert terms(plan, 1) == (0, 10, 5, 0, 0)
    assert terms(plan, 0) == (0, 7, 3, 0, 4)


def test_handing_over_a_send_is_an_event() -> None:
    """At 0 GPU 0 only issues its SEND, and shows what it carried over the border: 14 + 3.

    Stage 0 always has two micro-batches (4..20, T = 8). 0F reaches 14 + 3 working at 4 too, but
    that is later in the period than 0.
    """
    layers = [dict(PAIR[0]) | {"output_gradient_bytes": 0}, dict(PAIR[1])]
    of = handmade.chain([(2, 2), (3, 3)], layers)
    times = {"0F0": 4, "0SEND_F0": 8, "1F0": 9, "1B0": 12, "1SEND_B0": 15, "0B0": 18}
    cluster = uniform(2, 1000, latency_ns=1)
    plan = handmade.plan(of, [(0, 0, 0), (1, 1, 1)], 8, times, cluster=cluster)
    assert terms(plan, 0) == (0, 14, 0, 0, 3)


def test_the_papers_instants_are_starts_of_computes() -> None:
    """When 0F ends, at 1, its output of 8 waits beside A = 7; the first start is 1F's, at 2."""
    of = handmade.chain([(2, 1), (1, 1)], [dict(PAIR[0]), {}])
    times = {"0F0": 7, "1F0": 10, "1B0": 11, "0B0": 13}
    stages = [(0, 0, 0), (1, 1, 0)]
    plan = handmade.plan(of, stages, 8, times, memory_model="paper")
    assert terms(plan, 0) == (0, 7, 8, 0, 0)
