"""Small plans that offload, written by hand: ops of (H2) put into a plan of `handmade`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pipeplan.cluster import Host
from pipeplan.layer import LayerOption
from pipeplan.plan import LayerRanges, Plan, Remat
from tests import handmade
from tests.offloading import offloaded

LAYERS = (
    {"output_bytes": 8, "saved_input_bytes": 4, "saved_bytes": 2, "saved_output_bytes": 3}
    | {"forward_workspace_bytes": 1, "backward_workspace_bytes": 5},
    {"output_bytes": 6, "saved_input_bytes": 8, "saved_bytes": 3, "saved_output_bytes": 6}
    | {"forward_workspace_bytes": 2, "backward_workspace_bytes": 1},
    {"output_bytes": 1, "saved_input_bytes": 5, "saved_bytes": 4, "saved_output_bytes": 1}
    | {"forward_workspace_bytes": 3, "backward_workspace_bytes": 2},
)
"""K_0 = 8, K_1 = 6; in one stage behind an input of 10: A = 4 + 9 + 14 + 1 = 28, pF = 31, pB = 38
(tests/unit/verifier/test_memory.py). Of runs: o(0..1) = 2+3 + 8 = 13, o(0..2) = 9 + 14 = 23."""


def with_host(
    plan: Plan,
    bandwidth: int,
    memory_bytes: int = 10_000,
    duplex: Literal["full", "half"] = "full",
) -> Plan:
    """`plan` on a cluster whose GPUs reach a host at `bandwidth` bytes per ns."""
    rate = bandwidth * 10**9
    host = Host(memory_bytes=memory_bytes, bandwidth_bytes_per_s=rate, duplex=duplex)
    cluster = plan.cluster.model_copy(update={"host": host})
    return plan.model_copy(update={"cluster": cluster})


def offloading(
    plan: Plan, stage: int, runs: LayerRanges, times: Mapping[str, int], lasts: int
) -> Plan:
    """`plan`, on a cluster with a host, whose `stage` offloads `runs`; its table told anew.

    Args:
        plan: what else happens.
        stage: which.
        runs: of layers.
        times: (T4) start with j = 0 of its OFFLOADs and PREFETCHes by label, such as `0OFFLOAD0`.
        lasts: ns of each.
    """
    given = {each.id: each.remat.offload for each in plan.stages if each.remat}
    sent = offloaded(plan, given | {stage: runs}, {stage: lasts}, times, cluster=plan.cluster)
    return handmade.filled(sent)


def one_stage(bandwidth: int = 4, **fields: Any) -> Plan:
    """LAYERS on one GPU, 0..1 offloaded (13 bytes in 4 ns at 4 bytes per ns); T = 10.

    F 0..3, OFFLOAD 3..7, PREFETCH 22..26, B 26..29: three micro-batches in flight.
    """
    of = handmade.chain([(1, 1)] * 3, LAYERS, input_bytes=10)
    plain = handmade.plan(of, [(0, 2, 0)], 10, {"0F0": 0, "0B0": 26}, **fields)
    times = {"0OFFLOAD0": 3, "0PREFETCH0": 22}
    return offloading(with_host(plain, bandwidth), 0, ((0, 1),), times, -(-13 // bandwidth))


def whole_input(saved: int = 10, at: int = 2) -> Plan:
    """A layer on one GPU that saves `saved` of an input of 10, which leaves alone; T = 10.

    F 1..5, OFFLOAD from `at` on, 2 ns, PREFETCH 25..27, B 27..31.
    """
    fields = {"output_bytes": 1, "saved_input_bytes": saved, "saved_bytes": 2}
    of = handmade.chain([(4, 4)], (fields,), input_bytes=10)
    plain = with_host(handmade.plan(of, [(0, 0, 0)], 10, {"0F0": 1, "0B0": 27}), 5)
    times = {"0OFFLOAD0": at, "0PREFETCH0": 25}
    sent = offloaded(plain, {}, {0: 2}, times, inputs=[0], cluster=plain.cluster)
    return handmade.filled(sent)


def two_copies(offloaded: Sequence[int]) -> Plan:
    """LAYERS on one GPU, k = 2, T = 20, copy 1 ten later than copy 0; 13 bytes in 1 ns.

    Copy 0: F 0..3, OFFLOAD 3..4, PREFETCH 22..23, B 26..29.
    """
    of = handmade.chain([(1, 1)] * 3, LAYERS, input_bytes=10)
    times = {"0F0": 0, "0B0": 26, "0F1": 10, "0B1": 36}
    plain = handmade.plan(of, [(0, 2, 0)], 20, times, k=2)
    host = {f"0OFFLOAD{c}": 10 * c + 3 for c in offloaded}
    host |= {f"0PREFETCH{c}": 10 * c + 22 for c in offloaded}
    return offloading(with_host(plain, 13), 0, ((0, 1),), host, 1)


def recomputing_too() -> Plan:
    """LAYERS on one GPU: 0 computed again, 1..2 offloaded: 3+4 + 6 = 13 bytes in 1 ns; T = 10.

    F 0..3, OFFLOAD 3..4, PREFETCH 20..21, B 26..30 (layer 0's forward again).
    """
    of = handmade.chain([(1, 1)] * 3, LAYERS, input_bytes=10)
    times = {"0F0": 0, "0B0": 26}
    plain = handmade.plan(of, [(0, 2, 0)], 10, times, durations={"0B": 4})
    again = plain.stages[0].model_copy(update={"remat": Remat(recompute=((0, 0),))})
    plain = with_host(plain.model_copy(update={"stages": (again,)}), 13)
    return offloading(plain, 0, ((1, 2),), {"0OFFLOAD0": 3, "0PREFETCH0": 20}, 1)


def neighbours(duplex: Literal["full", "half"] = "full", prefetch: int = 11) -> Plan:
    """Two stages on one GPU, the second offloads both its layers: 3+6 + 4 = 13 bytes in 1 ns.

    T = 8: 0F 0..1, 1F 1..3, OFFLOAD 3..4, PREFETCH 11..12, 1B 12..14, 0B 14..15.
    """
    layers = (
        {"output_bytes": 8, "saved_output_bytes": 5, "saved_bytes": 2}
        | {"output_gradient_bytes": 4},
        {"output_bytes": 4, "saved_input_bytes": 7, "saved_bytes": 3},
        {"output_bytes": 1, "saved_input_bytes": 4, "saved_bytes": 6},
    )
    of = handmade.chain([(1, 1)] * 3, layers)
    times = {"0F0": 0, "1F0": 1, "1B0": 12, "0B0": 14}
    plain = with_host(handmade.plan(of, [(0, 0, 0), (1, 2, 0)], 8, times), 13, duplex=duplex)
    return offloading(plain, 1, ((1, 2),), {"1OFFLOAD0": 3, "1PREFETCH0": prefetch}, 1)


def two_gpus(memory_bytes: int = 53) -> Plan:
    """A stage of two layers on each of two GPUs, both offloaded: 5 + 6 = 11, 7 + 3 = 10 bytes.

    T = 8: 0F 0..2, OFFLOAD 2..4, PREFETCH 14..16, 0B 18..20; 1F 2..4, OFFLOAD 4..6, PREFETCH
    10..12, 1B 12..14; transfers take no time, the ways to the host carry 6 bytes per ns.
    """
    layers = (
        {"output_bytes": 6, "saved_bytes": 2},
        {"output_bytes": 3, "saved_input_bytes": 6, "saved_bytes": 3},
        {"output_bytes": 3, "saved_input_bytes": 3, "saved_bytes": 5},
        {"output_bytes": 1, "saved_input_bytes": 3, "saved_bytes": 2},
    )
    of = handmade.chain([(1, 1)] * 4, layers)
    times = {"0F0": 0, "1F0": 2, "1B0": 12, "0B0": 18}
    plain = handmade.plan(of, [(0, 1, 0), (2, 3, 1)], 8, times)
    plain = with_host(plain, 6, memory_bytes=memory_bytes)
    one = {"0OFFLOAD0": 2, "0PREFETCH0": 14}
    first = offloading(plain, 0, ((0, 1),), one, 2)
    return offloading(first, 1, ((2, 3),), {"1OFFLOAD0": 4, "1PREFETCH0": 10}, 2)


def entering(saved_before: int = 0) -> Plan:
    """Two stages on one GPU; all that the second keeps leaves: 7 of its input, 3 + 6 + 4: 20.

    T = 8: 0F 0..1, 1F 1..3, OFFLOAD 3..4, PREFETCH 12..13, 1B 13..15, 0B 15..16.

    Args:
        saved_before: what stage 0 keeps of its output.
    """
    layers = (
        {"output_bytes": 8, "saved_output_bytes": saved_before, "saved_bytes": 2}
        | {"output_gradient_bytes": 4},
        {"output_bytes": 4, "saved_input_bytes": 7, "saved_bytes": 3},
        {"output_bytes": 1, "saved_input_bytes": 4, "saved_bytes": 6},
    )
    of = handmade.chain([(1, 1)] * 3, layers)
    times = {"0F0": 0, "1F0": 1, "1B0": 13, "0B0": 15}
    plain = with_host(handmade.plan(of, [(0, 0, 0), (1, 2, 0)], 8, times), 20)
    host = {"1OFFLOAD0": 3, "1PREFETCH0": 12}
    return offloaded(plain, {1: ((1, 2),)}, {1: 1}, host, cluster=plain.cluster, inputs={1})


def made_by(remat: Remat) -> Plan:
    """`entering` whose second stage keeps nothing of its input but sends it away.

    Stage 0 keeps 1 byte of its output; its layer has two options, which keep 0 and 1 of it.

    Args:
        remat: of stage 0.
    """
    plan = entering(saved_before=1)
    first, second, third = plan.chain.layers
    times = {"program": 0, "forward_ns": first.forward_ns, "backward_ns": first.backward_ns}
    options = tuple(LayerOption(**times, saved_output_bytes=kept) for kept in (0, 1))
    layers = (
        first.model_copy(update={"options": options}),
        second.model_copy(update={"saved_input_bytes": 0}),
        third,
    )
    stages = (
        plan.stages[0].model_copy(update={"remat": remat}),
        plan.stages[1].model_copy(update={"remat": Remat(offload_input=True)}),
    )
    chain = plan.chain.model_copy(update={"layers": layers})
    return plan.model_copy(update={"chain": chain, "stages": stages})
