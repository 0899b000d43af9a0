"""A chain and its cluster in arrays: what machine code reads of `costs`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import permutations
from typing import Any

import numpy as np

from pipeplan.ilp.compiled import Ints, compiled
from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.segment_tables import segment_tables

STATES, RETURNING, SAVED, RUNNING, SAVED_BESIDE, RUNNING_BESIDE, LATE = range(7)
"""Tables of bytes of segments; those beside are of stages behind one on the same GPU."""
SENT, RECEIVED, GRADIENT_SENT, GRADIENT_RECEIVED = range(4)
"""Bytes of what crosses a boundary."""
SIZES, SUMS, SENDS, LINKS, MESSAGES, BUDGETS, TIED, PINS, FACTS = range(9)
"""What a chain and its cluster are, in arrays (see `chain_arrays`)."""
OVERHEAD, EXACT, HALF_DUPLEX = range(3)
"""What `FACTS` are."""
FORWARD, BACKWARD = range(2)
"""Ops, and ways over a cut, as `SUMS` and `SENDS` number them."""


ChainArrays = tuple[Ints, ...]
"""What `chain_arrays` returns."""


@lru_cache(maxsize=8)
def chain_arrays(costs: CostModel) -> ChainArrays:
    """A chain and its cluster, as `SIZES` to `FACTS` number them."""
    alone, beside = (segment_tables(costs, beside=beside) for beside in (False, True))
    sizes = (alone.states, alone.backward, alone.saved, alone.running, beside.saved)
    gpus, boundaries = range(costs.gpus), range(costs.layers - 1)
    pairs = {costs.link(*pair): pair for pair in permutations(gpus, 2)}
    numbers = {link: number for number, link in enumerate(pairs)}
    both = (costs.send_forward_ns, costs.send_backward_ns)
    sends = [[[ns(at, *pair) for at in boundaries] for ns in both] for pair in pairs.values()]
    links = [[0 if a == b else numbers[costs.link(a, b)] for b in gpus] for a in gpus]
    most = max(map(len, costs.tied_groups), default=0)
    tied = [[len(one), *one, *[0] * (most - len(one))] for one in costs.tied_groups]
    half_duplex = costs.cluster.links.duplex == "half"
    return (
        np.stack([*sizes, beside.running, alone.late]),
        _ints([costs.compute_sums(gpu) for gpu in gpus]),
        _ints(sends).reshape(len(pairs), 2, len(boundaries)),
        _ints(links),
        _ints([_message(costs, at) for at in boundaries]).reshape(len(boundaries), 4),
        _ints(costs.budgets),
        _ints(tied).reshape(len(tied), 1 + most),
        _ints([-1 if gpu is None else gpu for gpu in costs.pinned_gpus]),
        _ints([costs.cluster.action_overhead_ns, costs.exact, half_duplex]),
    )


def _message(costs: CostModel, boundary: int) -> list[int]:
    """Bytes of an output with its sender and its receiver, then those of its gradient."""
    return [
        held(boundary, backward=backward)
        for backward in (False, True)
        for held in (costs.unsaved_bytes, costs.tensor_bytes)
    ]


def _ints(values: Sequence[Any]) -> Ints:
    return np.array(values, np.int64)


@compiled
def op_ns(chain: ChainArrays, op: int, first: int, behind: int, gpu: int) -> int:
    """As `CostModel.forward_ns` or `backward_ns` of layers from `first` to before `behind`."""
    sums = chain[SUMS]
    return int(sums[gpu, op, behind] - sums[gpu, op, first] + chain[FACTS][OVERHEAD])


@compiled
def send_ns(chain: ChainArrays, way: int, boundary: int, source: int, target: int) -> int:
    """As `CostModel.send_forward_ns` or `send_backward_ns`."""
    return int(chain[SENDS][chain[LINKS][source, target], way, boundary])
