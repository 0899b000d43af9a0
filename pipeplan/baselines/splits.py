"""Contiguous splits that people use: equal numbers of layers, equal parameters."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from pipeplan.chain import Chain
from pipeplan.errors import InputError
from pipeplan.plan import Stage


def to_stages(ends: Sequence[int], gpus: Sequence[int] | None = None) -> tuple[Stage, ...]:
    """Stages that end behind layers `ends` (exclusive, increasing), stage s on `gpus[s]`.

    Args:
        ends: one past the last layer of each stage.
        gpus: one GPU per stage; None puts stage s on GPU s.
    """
    places = range(len(ends)) if gpus is None else gpus
    return tuple(
        Stage(id=index, layers=(begin, end - 1), gpu=gpu)
        for index, ((begin, end), gpu) in enumerate(zip(pairwise([0, *ends]), places, strict=True))
    )


def keeps_ties(chain: Chain, stages: Sequence[Stage]) -> bool:
    """Whether layers that share a parameter are where the chain allows them to be."""
    homes: dict[str, int] = {}
    return chain.tied == "synchronize" or all(
        homes.setdefault(name, stage.gpu) == stage.gpu
        for stage in stages
        for layer in chain.layers[stage.first : stage.last + 1]
        for name in layer.parameters
    )


def uniform_split(chain: Chain, parts: int) -> list[int]:
    """Ends of `parts` stages of equal numbers of layers; the first ones take the remainder.

    Source: the `uniform` method of DeepSpeed's pipeline module, Megatron's default.
    """
    check_parts(chain, parts)
    size, more = divmod(len(chain.layers), parts)
    return [size * part + min(part, more) for part in range(1, parts + 1)]


def parameter_balanced(chain: Chain, parts: int) -> list[int]:
    """Ends of `parts` stages whose largest sum of weights is smallest.

    Source: the `parameters` method of DeepSpeed's pipeline module.
    """
    check_parts(chain, parts)
    return balanced([layer.weight_bytes for layer in chain.layers], parts)


def time_balanced(chain: Chain, parts: int) -> list[int]:
    """Ends of `parts` stages whose largest sum of forward and backward times is smallest."""
    check_parts(chain, parts)
    return balanced([layer.forward_ns + layer.backward_ns for layer in chain.layers], parts)


def balanced(sizes: Sequence[int], parts: int) -> list[int]:
    """Ends of `parts` non-empty runs of `sizes` whose largest sum is smallest, by bisection.

    A run takes as many items as fit, but leaves one for each run behind it.
    """
    low, high = max(sizes), sum(sizes)
    while low < high:
        middle = (low + high) // 2
        if len(_filled(sizes, middle)) <= parts:
            high = middle
        else:
            low = middle + 1
    return _split_more(sizes, _filled(sizes, low), parts)


def _filled(sizes: Sequence[int], limit: int) -> list[int]:
    """Ends of as few runs as possible of sum at most `limit`."""
    ends, total = [], 0
    for index, size in enumerate(sizes):
        if total + size > limit:
            ends.append(index)
            total = 0
        total += size
    return [*ends, len(sizes)]


def _split_more(sizes: Sequence[int], ends: list[int], parts: int) -> list[int]:
    """Cut the largest runs that can be cut until there are `parts`."""
    while len(ends) < parts:
        runs = [(begin, end) for begin, end in pairwise([0, *ends]) if end - begin > 1]
        begin, end = max(runs, key=lambda run: sum(sizes[run[0] : run[1]]))
        half = sum(sizes[begin:end]) / 2
        cut = begin + 1
        while cut < end - 1 and sum(sizes[begin : cut + 1]) <= half:
            cut += 1
        ends = sorted([*ends, cut])
    return ends


def check_parts(chain: Chain, parts: int) -> None:
    """Refuse more stages than layers.

    Raises:
        InputError: if there are.
    """
    if not 1 <= parts <= len(chain.layers):
        raise InputError(
            f"split: chain {chain.name!r}: got {parts} stages, need 1 to {len(chain.layers)},"
            " the number of layers. Use fewer GPUs or stages."
        )
