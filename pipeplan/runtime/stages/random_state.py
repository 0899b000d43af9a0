"""Random numbers that do not depend on the plan: one seed per layer and micro-batch.

Every forward of a layer starts from a seed made of the run's seed, the layer's index in the chain
and the micro-batch's global number. So dropout draws the same mask wherever and whenever the layer
runs, in one process or in sixteen.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from pipeplan.repeat import kept_generators

_MASK = 2**64 - 1


def layer_seed(seed: int, layer: int, microbatch: int) -> int:
    """The seed of `layer` (0-based) for `microbatch` (counted from the start of training).

    The finalizer of SplitMix64 (Steele, Lea, Flood 2014) is applied after each number is mixed
    in, so that neighbouring layers and micro-batches get unrelated low bits: torch's CPU generator
    uses only the low 32.
    """
    state = 0
    for number in (seed, layer, microbatch):
        state = _finalize((state + number + 0x9E3779B97F4A7C15) & _MASK)
    return state >> 1


def seed_layer(seed: int, layer: int, microbatch: int, device: torch.device) -> None:
    """Set torch's generators for the forward of `layer` on `microbatch`.

    Those of the processor and of `device`; for layers on the processor that of the current GPU.
    """
    value = layer_seed(seed, layer, microbatch)
    torch.default_generator.manual_seed(value)
    for gpu in _seeded_gpus(device):
        torch.cuda.default_generators[gpu].manual_seed(value)


def kept_randomness(device: torch.device) -> AbstractContextManager[None]:
    """Around layers on `device`: the generators that are set for them have their states back.

    Each rank sets them for other layers, and a script that draws its batches from the same
    generators must draw the same on all ranks.
    """
    return kept_generators(_seeded_gpus(device))


def _seeded_gpus(device: torch.device) -> list[int]:
    if not torch.cuda.is_initialized():
        return []
    return [torch.cuda.current_device() if device.index is None else device.index]


def _finalize(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
