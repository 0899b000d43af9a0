"""How many bytes a stage can offload, and the runs of layers that give each number: (H1).

Over the layers from left to right: a layer stays, or is offloaded with what it keeps, and with the
boundary before it if it is in one run with the layer before. Every subset sum is listed where
there are few; else `MOST` of them, spread evenly. Source: ours; the subset-sum recursion is
Bellman's.
"""

from __future__ import annotations

from functools import lru_cache

from pipeplan.chain import Chain
from pipeplan.ilp.costs import CostModel

Segment = tuple[int, int]
MOST = 32
"""Numbers of bytes that are told apart."""

Sent = tuple[int, tuple[Segment, ...], bool]
"""(bytes, runs, whether what is saved of the stage's input is among them)."""

_Runs = tuple["_Runs", Segment] | None
"""The runs before and the last one."""


def inner_bytes(chain: Chain, layer: int) -> int:
    """K of the boundary before `layer`."""
    return max(chain.layers[layer - 1].saved_output_bytes, chain.layers[layer].saved_input_bytes)


@lru_cache(maxsize=4096)
def byte_options(
    costs: CostModel, first: int, last: int
) -> tuple[tuple[int, tuple[Segment, ...]], ...]:
    """(bytes, runs) of layers first..last, fewest bytes first, all above zero.

    Layers that are recomputed never leave: they keep nothing but their input.
    """
    chain = costs.chain
    stays: dict[int, _Runs] = {0: None}
    leaves: dict[int, _Runs] = {}
    for layer in range(first, last + 1):
        own, going = chain.layers[layer].saved_bytes, leaves
        stays = _spread({**going, **stays})
        leaves = {}
        if layer not in costs.recomputed:
            leaves = {size + own: (runs, (layer, layer)) for size, runs in stays.items()}
            for size, runs in going.items():
                assert runs is not None
                joined = size + own + inner_bytes(chain, layer)
                leaves.setdefault(joined, (runs[0], (runs[1][0], layer)))
        leaves = _spread(leaves)
    found = _spread({**leaves, **stays})
    listed = ((size, _listed(costs, runs)) for size, runs in sorted(found.items()) if size)
    return tuple(listed)


def stage_options(costs: CostModel, first: int, last: int, *, covered: bool) -> tuple[Sent, ...]:
    """What a stage of layers first..last can send, fewest bytes first: runs, its input, or both.

    Args:
        costs: chain, and what of it is recomputed.
        first: layer.
        last: layer.
        covered: whether the stage before is on the same GPU.
    """
    inside = byte_options(costs, first, last)
    found: dict[int, Sent] = {size: (size, runs, False) for size, runs in inside}
    entry = own_input_bytes(costs, first, covered=covered)
    for size, runs in ((0, ()), *inside) if entry else ():
        found.setdefault(size + entry, (size + entry, runs, True))
    return tuple(found[size] for size in sorted(found))


def leaves_early(chain: Chain, first: int, sent: Sent) -> bool:
    """Whether all of a stage's input leaves alone: it is copied while the forward runs, (H3)."""
    size, runs, _ = sent
    return not runs and size == chain.input_of(first)


def offloadable_bytes(chain: Chain, run: Segment) -> int:
    """(H1) of one run."""
    first, last = run
    rests = sum(layer.saved_bytes for layer in chain.layers[first : last + 1])
    return rests + sum(inner_bytes(chain, layer) for layer in range(first + 1, last + 1))


def entry_bytes(chain: Chain, first: int, *, covered: bool) -> int:
    """What leaves of the input of a stage whose first layer is `first`: e(s) of (H1).

    Args:
        chain: the layers.
        first: layer.
        covered: whether the stage before is on the same GPU.
    """
    return inner_bytes(chain, first) if covered else chain.layers[first].saved_input_bytes


def own_input_bytes(costs: CostModel, first: int, *, covered: bool) -> int:
    """What is saved of the input of a stage that begins with layer `first`, and may leave: (H1).

    What a program keeps stays.

    Args:
        costs: chain, and what of it is recomputed.
        first: layer.
        covered: whether the stage before is on the same GPU.
    """
    if first in costs.programs:
        return 0
    if (
        covered
        and first - 1 in costs.programs
        and costs.chain.layers[first - 1].saved_output_bytes
    ):
        return 0
    return entry_bytes(costs.chain, first, covered=covered)


def _spread(found: dict[int, _Runs]) -> dict[int, _Runs]:
    """At most `MOST`: the least, the most, and some between."""
    if len(found) <= MOST:
        return found
    sizes = sorted(found)
    step = (len(sizes) - 1) / (MOST - 1)
    return {size: found[size] for size in (sizes[round(n * step)] for n in range(MOST))}


def _listed(costs: CostModel, runs: _Runs) -> tuple[Segment, ...]:
    """In order, without those that keep nothing."""
    listed: list[Segment] = []
    while runs is not None:
        runs, run = runs
        if offloadable_bytes(costs.chain, run):
            listed.append(run)
    return tuple(reversed(listed))
