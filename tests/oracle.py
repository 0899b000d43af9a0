"""The true optimum of tiny instances by brute force, sharing no code with the solver.

Every allocation (neighbouring layers of a GPU fused into a stage or not), with `again` of every
set of runs that are computed again and of programs that layers run, every integer start of every
op of a period is tried, shortest period first; what remains is judged by the verifier. Ops are
placed along the chain, each less than a period after it could start: given where ops lie in the
period, waiting whole periods longer only keeps tensors longer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import product
from math import ceil

from pipeplan.chain import Chain
from pipeplan.cluster import Cluster
from pipeplan.plan import Remat, Semantics, Stage
from pipeplan.verifier.recompute import without_runs
from tests import handmade
from tests.placing import Placing

Stages = list[tuple[int, int, int]]
"""(first layer, last layer, GPU)."""
Runs = tuple[tuple[int, int], ...]
"""Disjoint runs of layers, in order, each before those that it holds."""


def optimum(
    chain: Chain,
    cluster: Cluster,
    *,
    k: int = 1,
    limit: int,
    semantics: Semantics = "2bw",
    memory_model: str = "exact",
    contiguous: bool = False,
    pins: Mapping[int, int] | None = None,
    again: bool = False,
) -> int | None:
    """The shortest period of k micro-batches, at most `limit` ns; None if there is none.

    Args:
        chain: At most about five layers of a few ns.
        cluster: At most about four GPUs.
        k: Micro-batches per period.
        limit: Largest period to try.
        semantics: As in a plan.
        memory_model: As in a plan.
        contiguous: Whether only one stage per GPU is allowed.
        pins: GPU of some layers.
        again: Whether stages may compute runs of their layers again, and run programs.
    """
    fields = {"semantics": semantics, "memory_model": memory_model, "microbatches": 64}
    cases = [
        Case(one, cluster, stages, k, fields)
        for one in (every_chain(chain) if again else [chain])
        for stages in every_allocation(one, cluster, pins)
        if not contiguous or len({gpu for *_, gpu in stages}) == len(stages)
    ]
    for period in range(1, limit + 1):
        if any(case.possible(period) for case in cases):
            return period
    return None


def every_chain(chain: Chain) -> list[Chain]:
    """The chain with every set of runs that are computed again, each run one layer, and programs.

    The verifier's own reading of (V1) to (V5); no run spans two stages, as no layer does.
    """
    last = len(chain.layers) - 1
    bare = handmade.plan(chain, [(0, last, 0)], 1, {"0F0": 0}, memory=())
    return [
        without_runs(bare.model_copy(update={"stages": (_with(bare.stages[0], remat),)})).chain
        for remat in every_remat(chain)
    ]


def every_remat(chain: Chain) -> Iterator[Remat | None]:
    """All sets of runs with all programs of the layers outside of them; None for neither."""
    for runs in every_run_set(0, len(chain.layers) - 1):
        inside = {layer for first, last in runs for layer in range(first, last + 1)}
        ways = [
            [None, *range(len(layer.options) * (number not in inside))]
            for number, layer in enumerate(chain.layers)
        ]
        for chosen in product(*ways):
            programs = [(layer, way) for layer, way in enumerate(chosen) if way is not None]
            given = runs or programs
            yield Remat(recompute=runs, programs=tuple(programs)) if given else None


def _with(stage: Stage, remat: Remat | None) -> Stage:
    return stage.model_copy(update={"remat": remat})


def every_run_set(first: int, last: int) -> Iterator[Runs]:
    """All sets of runs of layers first..last: a layer is in none, or begins one with all in it."""
    if first > last:
        yield ()
        return
    for rest in every_run_set(first + 1, last):
        yield rest
    for end in range(first, last + 1):
        for inner, rest in product(every_run_set(first, end - 1), every_run_set(end + 1, last)):
            yield ((first, end), *inner, *rest)


def every_allocation(
    chain: Chain, cluster: Cluster, pins: Mapping[int, int] | None = None
) -> Iterator[Stages]:
    """All stages on all GPUs; without pins, of equal GPUs only the first new one is tried."""
    count, pins = len(chain.layers), pins or {}
    equal = not cluster.links.pairs and len({(g.speed, g.memory_bytes) for g in cluster.gpus}) == 1
    for homes in product(range(len(cluster.gpus)), repeat=count):
        if any(homes[layer] != gpu for layer, gpu in pins.items()):
            continue
        if (
            equal
            and not pins
            and any(home > max(homes[:i], default=-1) + 1 for i, home in enumerate(homes))
        ):
            continue
        if not _tied_together(chain, homes):
            continue
        for splits in product((False, True), repeat=count - 1):
            if any(split and homes[i] != homes[i + 1] for i, split in enumerate(splits)):
                continue
            yield _stages(homes, splits)


def _tied_together(chain: Chain, homes: tuple[int, ...]) -> bool:
    places: dict[str, int] = {}
    return all(
        places.setdefault(name, home) == home
        for layer, home in zip(chain.layers, homes, strict=True)
        for name in layer.parameters
    )


def _stages(homes: tuple[int, ...], splits: tuple[bool, ...]) -> Stages:
    stages: Stages = [(0, 0, homes[0])]
    for layer in range(1, len(homes)):
        first, _, gpu = stages[-1]
        if homes[layer] == gpu and not splits[layer - 1]:
            stages[-1] = (first, layer, gpu)
        else:
            stages.append((layer, layer, homes[layer]))
    return stages


@dataclass(frozen=True)
class Case:
    """Stages of a chain on GPUs, and how plans of them are written."""

    chain: Chain
    cluster: Cluster
    stages: Stages
    k: int
    fields: Mapping[str, object]

    def possible(self, period: int) -> bool:
        """Whether some schedule of this period keeps every rule."""
        if self._shortest is None or period < self._shortest:
            return False
        return self._placing(period, self.k).possible()

    @cached_property
    def _shortest(self) -> int | None:
        """The load of the busiest GPU or link; None if not even one micro-batch at a time fits."""
        alone = self._placing(max(1, serial(self.chain, self.cluster)), 1)
        if not alone.one_at_a_time():
            return None
        return self.k * max(alone.work().values())

    def _placing(self, period: int, k: int) -> Placing:
        return Placing(self.chain, self.cluster, self.stages, period, k, self.fields)


def serial(chain: Chain, cluster: Cluster) -> int:
    """A period at which one micro-batch at a time passes: none longer is ever needed."""
    slowest = min(Fraction(repr(gpu.speed)) for gpu in cluster.gpus)
    overhead = cluster.action_overhead_ns
    work = sum(
        ceil(layer.forward_ns / slowest) + ceil(layer.backward_ns / slowest) + 2 * overhead
        for layer in chain.layers
    )
    links = [(cluster.links.latency_ns, cluster.links.bandwidth_bytes_per_s)]
    links += [(pair.latency_ns, pair.bandwidth_bytes_per_s) for pair in cluster.links.pairs]
    trips = sum(
        max(
            latency + (ceil(Fraction(size * 10**9, band)) if band else 0)
            for latency, band in links
        )
        for layer in chain.layers[:-1]
        for size in (layer.output_bytes, layer.gradient_of_output_bytes)
    )
    return max(1, work + trips)
