"""Bytes of a backward in two halves, sum by sum as (S3) to (S5) of docs/reference/model.md say."""

from __future__ import annotations

from pipeplan.chain import Layer
from pipeplan.plan import Plan


def inputs(plan: Plan, s: int) -> int:
    """(S4): pI."""
    stage, L = plan.stages[s], plan.chain.layers
    a, b = stage.first, stage.last
    si = max(0, L[a].saved_input_bytes - above(plan, s))
    K = {i: max(L[i].saved_output_bytes, L[i + 1].saved_input_bytes) for i in range(a, b)}
    xw = {i: L[i].saved_input_for_weight_bytes for i in range(a, b + 1)} | {b + 1: 0}
    turns = []
    for i in range(a, b + 1):
        gx = L[i - 1].gradient_of_output_bytes if i else 0
        rest = sum(L[j].saved_bytes for j in range(a, i + 1)) + sum(K[j] for j in range(a, i))
        behind = sum(_wr(L[j]) for j in range(i + 1, b + 1))
        behind += sum(xw[j] for j in range(i + 2, b + 1))
        ends = max(L[i].saved_output_bytes, xw[i + 1]) + L[i].gradient_of_output_bytes + gx
        turns.append(si + rest + ends + L[i].input_backward_workspace_bytes + behind)
    return max(turns)


def weights(plan: Plan, s: int) -> tuple[int, int, int]:
    """(S3), (S5): G, pW, and what the stage before counts of G."""
    stage, L = plan.stages[s], plan.chain.layers
    a, b = stage.first, stage.last
    xw = {i: L[i].saved_input_for_weight_bytes for i in range(a, b + 1)}
    kept = xw[a] + sum(_wr(L[i]) for i in xw) + sum(xw[i] for i in range(a + 1, b + 1))
    turns = [
        xw[a]
        + sum(xw[j] for j in range(a + 1, i + 1))
        + sum(_wr(L[j]) for j in range(a, i + 1))
        + L[i].weight_backward_workspace_bytes
        for i in xw
    ]
    return kept, max(turns), min(above(plan, s), xw[a])


def above(plan: Plan, s: int) -> int:
    """U of (M2)."""
    stage = plan.stages[s]
    same = s > 0 and plan.stages[s - 1].gpu == stage.gpu
    return plan.chain.layers[stage.first - 1].saved_output_bytes if same else 0


def _wr(layer: Layer) -> int:
    assert layer.saved_for_weight_bytes is not None
    return layer.saved_for_weight_bytes - layer.saved_input_for_weight_bytes
