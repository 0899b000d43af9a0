"""Bytes of all segments at once, as L x L arrays: what the contiguous DP reads.

Entry [i, j] belongs to layers i..j (i <= j) behind a stage on another GPU, or on the same one; the
formulas are those of `costs.segment`, written as differences of prefix sums and running maxima.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from pipeplan.errors import InputError
from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.segment_bytes import PAPER_WEIGHT_COPIES, movable_bytes

Array = NDArray[np.int64]

LIMIT = 2**60
"""Sums beyond it would overflow 64-bit arithmetic."""


@dataclass(frozen=True)
class SegmentTables:
    """As `SegmentBytes`, for all segments; `messages` is what boundaries may add on top."""

    saved: Array
    forward: Array
    backward: Array
    states: Array
    optimizer: Array
    late: Array
    """(M7): an update that waits for other stages, and the input that waits beside it."""
    messages: Array
    """Exact model: every tensor of both boundaries once. Paper model: the permanent slots."""

    @property
    def running(self) -> Array:
        """As `SegmentBytes.running`."""
        return np.maximum(self.forward, self.late)


def segment_tables(costs: CostModel, *, beside: bool = False) -> SegmentTables:
    """The tables of one chain.

    Args:
        costs: Durations and bytes.
        beside: Whether the stage before is on the same GPU, so that its saved output is counted
            there (u of M2).

    Raises:
        InputError: if the chain's bytes sum to more than 2**60.
    """
    total = sum(
        value
        for layer in costs.chain.layers
        for name, value in layer
        if name.endswith("_bytes") and isinstance(value, int)
    )
    if (total + costs.chain.input_bytes) * 4 > LIMIT:
        raise InputError(
            f"chain {costs.chain.name!r}: its bytes sum to {total}, need at most {LIMIT // 4}"
        )
    return _exact(costs, beside) if costs.exact else _paper(costs)


def _field(costs: CostModel, name: str) -> Array:
    return np.array([getattr(layer, name) for layer in costs.chain.layers], dtype=np.int64)


def _sums(values: Array) -> Array:
    """Prefix sums with a leading 0."""
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(values)])


def running_max(values: Array, start: int) -> Array:
    """[i, j] -> max of values[l] over i + start <= l <= j, very negative if there is none."""
    count = len(values)
    column, row = np.arange(count)[None, :], np.arange(count)[:, None]
    spread = np.where(column >= row + start, values[None, :], -LIMIT)
    return np.maximum.accumulate(spread, axis=1)


def _exact(costs: CostModel, beside: bool) -> SegmentTables:
    chain, count = costs.chain, costs.layers
    x = np.array([chain.input_of(i) for i in range(count)], dtype=np.int64)
    gx = np.array([chain.gradient_of_input(i) for i in range(count)], dtype=np.int64)
    gy = np.array([layer.gradient_of_output_bytes for layer in chain.layers], dtype=np.int64)
    y, si = _field(costs, "output_bytes"), _field(costs, "saved_input_bytes")
    rest, so = _field(costs, "saved_bytes"), _field(costs, "saved_output_bytes")
    inner = np.maximum(so[:-1], si[1:])
    shared = np.concatenate([[0], so[:-1]]) if beside else np.zeros_like(so)
    own = np.maximum(0, si - shared)
    # kept[l]: rests up to layer l - 1 and boundaries before l; head: what layer i brings itself
    rests, inners = _sums(rest), _sums(inner)
    before = np.concatenate([np.zeros(1, dtype=np.int64), inner])
    head = (own - rests[:-1] - inners)[:, None]
    saved = head + (rests[1:] + inners + so)[None, :]
    first = np.maximum(own, x - shared) + rest + _field(costs, "forward_workspace_bytes") + y
    later = (
        np.maximum(before, x)
        + inners
        - before
        + rests[1:]
        + _field(costs, "forward_workspace_bytes")
        + y
    )
    forward = np.maximum(first[:, None], head + running_max(later, 1))
    whole = rests[1:] + inners + so + _field(costs, "backward_workspace_bytes") + gy + gx
    backward = head + running_max(whole, 0) - saved
    versions = 2 if costs.semantics == "2bw" else 1
    per_layer = (
        versions * _field(costs, "weight_bytes")
        + _field(costs, "gradient_bytes")
        + (versions - 1) * _field(costs, "waiting_gradient_bytes")
        + _field(costs, "optimizer_bytes")
    )
    workspace = _field(costs, "optimizer_workspace_bytes")
    if costs.states_away:
        moved = [movable_bytes(layer) for layer in chain.layers]
        per_layer = per_layer - np.array(moved, dtype=np.int64)
        workspace = np.zeros_like(workspace)
    behind, front = y - so + gy, x + gx
    waiting = (versions - 1) * _between(_field(costs, "waiting_gradient_bytes"))
    at_once = (waiting == 0) | (waiting != _between(_field(costs, "gradient_bytes")))
    updating = running_max(workspace, 0)
    entering = np.where(np.arange(count) > 0, x - shared, 0)[:, None]
    late = np.where(waiting > 0, entering + updating, 0)
    return SegmentTables(
        saved,
        forward,
        backward,
        _between(per_layer),
        np.where(at_once, updating, 0),
        late,
        _ends(front, behind),
    )


def _paper(costs: CostModel) -> SegmentTables:
    count = costs.layers
    x = np.array([costs.chain.input_of(i) for i in range(count)], dtype=np.int64)
    y = _field(costs, "output_bytes")
    stored = sum(
        (_field(costs, f"saved_{part}bytes") for part in ("input_", "", "output_")),
        np.zeros(count, dtype=np.int64),
    )
    sums = _sums(stored)
    forward = running_max(sums[:-1] + np.maximum(stored, x) + y, 0) - sums[:-1, None]
    backward = running_max(y + x + sums[1:], 0) - sums[None, 1:]
    weights = PAPER_WEIGHT_COPIES * _field(costs, "weight_bytes")
    return SegmentTables(
        _between(stored),
        forward,
        backward,
        _between(weights),
        np.zeros_like(forward),
        np.zeros_like(forward),
        _ends(2 * x, 2 * y),
    )


def _between(values: Array) -> Array:
    """[i, j] -> sum of values[i..j]."""
    return _spread(_sums(values))


def _spread(sums: Array) -> Array:
    """[i, j] -> sums[j + 1] - sums[i]."""
    return sums[None, 1:] - sums[:-1, None]


def _ends(front: Array, behind: Array) -> Array:
    """[i, j] -> front[i] + behind[j], nothing at the chain's own ends."""
    front, behind = front.copy(), behind.copy()
    front[0] = behind[-1] = 0
    return front[:, None] + behind[None, :]


def loads(costs: CostModel, gpu: int) -> Array:
    """[i, j] -> forward plus backward ns of layers i..j on `gpu`, overhead included.

    Raises:
        InputError: if they sum to more than 2**60.
    """
    forward, backward = costs.compute_sums(gpu)
    sums = [one + other for one, other in zip(forward, backward, strict=True)]
    overhead = 2 * costs.cluster.action_overhead_ns
    if (sums[-1] + overhead) * costs.layers > LIMIT:
        raise InputError(
            f"chain {costs.chain.name!r}: its times sum to {sums[-1]} ns on GPU {gpu},"
            f" need at most {LIMIT // costs.layers}"
        )
    return _spread(np.array(sums, dtype=np.int64)) + overhead


def forwards(costs: CostModel, gpu: int) -> Array:
    """[i, j] -> the forward of layers i..j on `gpu`, overhead included."""
    sums = np.array(costs.compute_sums(gpu)[0], dtype=np.int64)
    return _spread(sums) + costs.cluster.action_overhead_ns


def cuttable(costs: CostModel) -> NDArray[np.bool_]:
    """Whether the boundary behind each layer may be cut: not inside a span of tied parameters."""
    marks = [0] * (costs.layers + 1)
    for group in costs.tied_groups:
        marks[group[0]] += 1
        marks[group[-1]] -= 1
    inside = np.array(list(accumulate(marks))[:-1], dtype=np.int64)
    return np.asarray(inside[: costs.layers] == 0)


def pinned_elsewhere(costs: CostModel, gpu: int) -> NDArray[np.bool_]:
    """[i, j] -> whether a layer of i..j is pinned to another GPU."""
    here = (None, gpu)
    return _between(np.array([home not in here for home in costs.pinned_gpus], dtype=np.int64)) > 0
