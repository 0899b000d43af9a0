"""Small step plans with a split backward, written by hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeplan.plan import Plan
from tests import handmade

LAYERS: tuple[dict[str, Any], ...] = (
    {"output_bytes": 8, "saved_bytes": 2, "saved_output_bytes": 3},
    {
        "output_bytes": 6,
        "saved_input_bytes": 8,
        "saved_bytes": 3,
        "saved_output_bytes": 6,
        "backward_weight_ns": 1,
        "saved_for_weight_bytes": 5,
        "saved_input_for_weight_bytes": 4,
        "input_backward_workspace_bytes": 1,
        "weight_backward_workspace_bytes": 9,
    },
    {
        "output_bytes": 1,
        "saved_input_bytes": 5,
        "saved_bytes": 4,
        "saved_output_bytes": 1,
        "backward_weight_ns": 1,
        "saved_for_weight_bytes": 7,
        "saved_input_for_weight_bytes": 2,
    },
)
"""Stage 0 is layer 0, stage 1 layers 1 and 2. On one GPU u = 3, so si' = 5, K_1 = 6:
A(1) = 5 + 7 + 6 + 1 = 19, G(1) = 4 + (1 + 5) + 2 = 12, of which stage 0 has 3.
pI: the last layer's turn 5 + 7 + 6 + 1 + 0 + 1 + 6 = 26, the first
one's 5 + 3 + 6 + 1 + 6 + 8 + 5 = 34.
pW: the last layer's turn 12, the first one's 4 + 1 + 9 = 14."""

LATE = {"0F0": 0, "1F0": 1, "1I0": 3, "0B0": 6, "1W0": 7}
EARLY = {"0F0": 0, "1F0": 1, "1I0": 3, "1W0": 6, "0B0": 8}
"""0F 1 ns, 1F 2, 1I 2 + 1, 0B 1, 1W 1 + 1: a step of 9 ns, W after or before the backward of 0."""


def one_gpu(times: Mapping[str, int] = LATE, **changes: Mapping[str, int]) -> Plan:
    """A step plan of one micro-batch; `changes` are fields of `layer0`, `layer1`, `layer2`."""
    layers = [fields | changes.get(f"layer{i}", {}) for i, fields in enumerate(LAYERS)]
    of = handmade.chain([(1, 1), (1, 3), (1, 2)], layers)
    fields: dict[str, Any] = {"semantics": "flush", "microbatches": 1}
    return handmade.plan(of, [(0, 0, 0), (1, 2, 0)], 9, times, split=(1,), **fields)


def two_gpus() -> Plan:
    """A step of two micro-batches on two GPUs; transfers take no time.

    GPU 0: 0F 0..2, 0B 8..9 and 11..12. GPU 1: 1F 1..3 and 3..5, 1I 5..8 and 8..11, 1W 11..13 and
    13..15.
    """
    of = handmade.chain([(1, 1), (1, 3), (1, 2)], LAYERS)
    times = {
        "0F0": 0, "0F1": 1, "1F0": 1, "1F1": 3, "1I0": 5, "1I1": 8,
        "1W0": 11, "1W1": 13, "0B0": 8, "0B1": 11,
        "0SEND_F0": 1, "0SEND_F1": 2, "1SEND_B0": 8, "1SEND_B1": 11,
    }  # fmt: skip
    stages = [(0, 0, 0), (1, 2, 1)]
    fields: dict[str, Any] = {"k": 2, "semantics": "flush", "microbatches": 2}
    return handmade.plan(of, stages, 15, times, split=(1,), **fields)
