"""Random valid plans: ops placed one after the other at the first free time modulo the period.

Only small integers: what is free is looked up point by point, straight from (R3), (R4) and (R5).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from pipeplan.chain import Chain
from pipeplan.cluster import Cluster, Gpu, Links
from pipeplan.plan import OpKind, Plan
from tests import handmade

Stages = Sequence[tuple[int, int, int]]


class Calendar:
    """What each GPU and link does, point by point of the period."""

    def __init__(self, period: int) -> None:
        self.period = period
        self._points: dict[object, set[int]] = defaultdict(set)
        self._inner: dict[object, set[int]] = defaultdict(set)
        self._instants: dict[object, set[int]] = defaultdict(set)

    def free(self, resource: object, start: int, length: int) -> bool:
        """Whether an interval of `length` may start at `start`."""
        if not length:
            return start % self.period not in self._inner[resource]
        if length > self.period:
            return False
        points = {(start + i) % self.period for i in range(length)}
        inner = {(start + i) % self.period for i in range(1, length)}
        return not (points & self._points[resource] or inner & self._instants[resource])

    def book(self, resource: object, start: int, length: int) -> None:
        """Takes it."""
        if not length:
            self._instants[resource].add(start % self.period)
        self._points[resource] |= {(start + i) % self.period for i in range(length)}
        self._inner[resource] |= {(start + i) % self.period for i in range(1, length)}


@dataclass
class Shop:
    """Ops to place: what each lasts and uses."""

    random: Random
    period: int
    k: int
    lengths: dict[tuple[OpKind, int], int]
    resources: dict[tuple[OpKind, int], object]

    def place(self) -> dict[str, int] | None:
        """Absolute times by label, every W behind its I; None where an op finds no place."""
        calendar, ready = Calendar(self.period), [0] * self.k
        times: dict[str, int] = {}
        for (kind, stage), length in self.lengths.items():
            if kind is OpKind.W:
                inputs = self.lengths[OpKind.I, stage]
                ready = [times[f"{stage}I{copy}"] + inputs for copy in range(self.k)]
            starts = self._starts(calendar, ready, (kind, stage))
            if starts is None:
                return None
            for copy, start in enumerate(starts):
                times[f"{stage}{kind}{copy}"], ready[copy] = start, start + length
        return times

    def _starts(
        self, calendar: Calendar, ready: list[int], op: tuple[OpKind, int]
    ) -> list[int] | None:
        """One op's starts for all copies, in index order and within one period (R5)."""
        length, used, starts = self.lengths[op], self.resources[op], list[int]()
        far = self.period - 1 if op == (OpKind.F, 0) else 2 * self.period
        wait = min(far, self.random.choice((0, 0, 0, 1, self.period // 2, far)))
        for copy in range(self.k):
            earliest = max(ready[copy], starts[-1] + length) if copy else ready[0] + wait
            places = range(earliest, earliest + self.period)
            start = next((t for t in places if calendar.free(used, t, length)), None)
            if start is None or (copy and start + length > starts[0] + self.period):
                return None
            calendar.book(used, start, length)
            starts.append(start)
        return starts


def random_plan(seed: int) -> Plan:
    """A valid plan of up to 4 stages on up to 3 GPUs, k up to 3; the same for the same seed."""
    random = Random(seed)
    gpus = random.randint(1, 3)
    of, cluster = random_chain(random), random_cluster(random, gpus)
    stages = random_stages(random, len(of.layers), gpus)
    order = handmade.order(stages)
    shop = Shop(
        random=random,
        period=random.randint(1, 20),
        k=random.randint(1, 3),
        lengths={op: handmade.length(of, cluster, stages, *op) for op in order},
        resources={op: resource(cluster, stages, *op) for op in order},
    )
    while (times := shop.place()) is None:
        shop.period += random.randint(1, 8)
    return handmade.plan(
        of,
        stages,
        shop.period,
        times,
        cluster=cluster,
        k=shop.k,
        semantics=random.choice(("2bw", "flush")),
        memory_model=random.choice(("exact", "exact", "paper")),
        microbatches=random.randint(40, 50),
    )


def random_stages(random: Random, layers: int, gpus: int) -> list[tuple[int, int, int]]:
    """(first, last, GPU) of stages of one or two layers."""
    stages, first = [], 0
    while first < layers:
        last = min(layers - 1, first + random.choice((0, 0, 1)))
        stages.append((first, last, random.randrange(gpus)))
        first = last + 1
    return stages


def random_chain(random: Random) -> Chain:
    """One to four layers with small times and sizes, zeros among them."""
    count = random.randint(1, 4)
    sizes = [random.randint(0, 9) for _ in range(count + 1)]
    layers = [
        {
            "output_bytes": sizes[i + 1],
            "output_gradient_bytes": random.choice((None, random.randint(0, 9))),
            "saved_input_bytes": random.randint(0, sizes[i]),
            "saved_bytes": random.randint(0, 9),
            "saved_output_bytes": random.randint(0, sizes[i + 1]),
        }
        | {
            name: random.randint(0, 9)
            for name in (
                "optimizer_ns",
                "weight_bytes",
                "gradient_bytes",
                "optimizer_bytes",
                "forward_workspace_bytes",
                "backward_workspace_bytes",
                "optimizer_workspace_bytes",
            )
        }
        for i in range(count)
    ]
    times = [(random.choice((0, 1, 2, 3)), random.choice((0, 1, 2, 5))) for _ in range(count)]
    return handmade.chain(times, layers, input_bytes=sizes[0])


def random_cluster(random: Random, gpus: int) -> Cluster:
    """GPUs of different speed; links with or without latency and bandwidth."""
    return Cluster(
        gpus=tuple(
            Gpu(name=f"gpu{i}", memory_bytes=10**6, speed=random.choice((1.0, 1.0, 0.5, 2.0)))
            for i in range(gpus)
        ),
        action_overhead_ns=random.choice((0, 0, 1)),
        links=Links(
            duplex=random.choice(("full", "half")),
            latency_ns=random.choice((0, 0, 1, 3)),
            bandwidth_bytes_per_s=random.choice((None, 3 * 10**9)),
        ),
    )


def resource(cluster: Cluster, stages: Stages, kind: OpKind, stage: int) -> object:
    """What an op excludes others on."""
    here = stages[stage][2]
    if kind.is_compute:
        return here
    there = stages[stage + (1 if kind is OpKind.SEND_F else -1)][2]
    return frozenset((here, there)) if cluster.links.duplex == "half" else (here, there)
