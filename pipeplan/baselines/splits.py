"""Contiguous splits that people use: equal numbers of layers, equal parameters."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np

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


def time_balanced(chain: Chain, speeds: Sequence[float]) -> list[int]:
    """Ends of stages whose largest time of forward and backward is smallest.

    Args:
        chain: what is cut.
        speeds: of each stage's GPU.
    """
    check_parts(chain, len(speeds))
    times = [layer.forward_ns + layer.backward_ns for layer in chain.layers]
    if len(set(speeds)) == 1:
        return balanced(times, len(speeds))
    return _balanced_by_speed(times, speeds)


def _balanced_by_speed(times: Sequence[int], speeds: Sequence[float]) -> list[int]:
    """Ends of runs of `times`, the longest as short as it can be; run s is as fast as `speeds[s]`.

    A dynamic program: the best first runs that end anywhere, then one more run behind them.
    """
    sums = np.array([0, *accumulate(times)], dtype=np.float64)
    count = len(times)
    best = np.full(count + 1, np.inf)
    best[0] = 0.0
    begins: list[list[int]] = []
    for speed in speeds:
        longest, chosen = np.full(count + 1, np.inf), [0] * (count + 1)
        for end in range(1, count + 1):
            whole = np.maximum(best[:end], (sums[end] - sums[:end]) / speed)
            chosen[end] = int(np.argmin(whole))
            longest[end] = whole[chosen[end]]
        best = longest
        begins.append(chosen)
    ends = [count]
    for chosen in begins[:0:-1]:
        ends.append(chosen[ends[-1]])
    return ends[::-1]


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
