"""Small chains for the tests of baselines and comparisons."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import combinations, pairwise

from pipeplan import lowering, simulator, verifier
from pipeplan.baselines import splits
from pipeplan.baselines.listed import Lists, listed_plan
from pipeplan.baselines.timed import Setting
from pipeplan.chain import Chain, Layer
from pipeplan.cluster import uniform
from pipeplan.plan import Plan

AMPLE = 10**15


def chain(
    loads: Sequence[tuple[int, int]],
    *,
    sizes: Sequence[int] | None = None,
    weight: int = 0,
    saved: int = 0,
    weight_ns: int | None = None,
    saved_for_weight: int | None = None,
) -> Chain:
    """Layers of (forward, backward) ns; `sizes[l]` bytes leave layer l."""
    sizes = [0] * len(loads) if sizes is None else sizes
    return Chain(
        name="small",
        layers=tuple(
            Layer(
                name=f"layer{index}",
                forward_ns=forward,
                backward_ns=backward,
                weight_bytes=weight,
                gradient_bytes=weight,
                output_bytes=size,
                saved_bytes=saved,
                backward_weight_ns=weight_ns,
                saved_for_weight_bytes=saved_for_weight,
            )
            for index, ((forward, backward), size) in enumerate(zip(loads, sizes, strict=True))
        ),
    )


def random_chain(seed: int, layers: int) -> Chain:
    """Layers of 1 to 9 ns and up to 6 bytes."""
    source = random.Random(seed)
    loads = [(source.randint(1, 9), source.randint(1, 9)) for _ in range(layers)]
    sizes = [source.randint(0, 6) for _ in range(layers)]
    return chain(loads, sizes=sizes, weight=source.randint(0, 3), saved=source.randint(0, 5))


def setting(of: Chain, gpus: int, *, bandwidth: int | None = None, memory: int = AMPLE) -> Setting:
    """The chain on equal GPUs with half-duplex links of `bandwidth` bytes per second."""
    cluster = uniform(gpus, memory, bandwidth_bytes_per_s=bandwidth, duplex="half")
    return Setting(of, cluster)


def judged_step(of: Setting, lists: Lists, microbatches: int, gpus: Sequence[int]) -> Plan:
    """The step plan of one layer per stage, stage s on `gpus[s]`; every voice must accept it."""
    stages = splits.to_stages(range(1, len(of.chain.layers) + 1), gpus)
    plan = listed_plan(of.outline(stages, "flush", "test"), lists, microbatches)
    assert verifier.verify(plan) == ()
    simulator.check(plan, lowering.lower(plan))
    return plan


def splits_of(layers: int, parts: int) -> list[tuple[int, ...]]:
    """The ends of every split of `layers` into `parts` runs."""
    return [(*inner, layers) for inner in combinations(range(1, layers), parts - 1)]


def runs(ends: Sequence[int]) -> list[tuple[int, int]]:
    """[begin, end) of every run."""
    return list(pairwise((0, *ends)))
