"""The true optimum of tiny instances by brute force, sharing no code with the solver.

Every allocation (neighbouring layers of a GPU fused into a stage or not), every integer start of
every op of a period is tried, shortest period first; what remains is judged by the verifier. Ops
are placed along the chain, each less than a period after it could start: given where ops lie in
the period, waiting whole periods longer only keeps tensors longer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fractions import Fraction
from itertools import pairwise, product
from math import ceil

from pipeplan.chain import Chain
from pipeplan.cluster import Cluster
from pipeplan.plan import OpKind, Plan, Semantics
from pipeplan.verifier import Rule, audit, verify
from tests import handmade

Stages = list[tuple[int, int, int]]
"""(first layer, last layer, GPU)."""


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
    """
    fields = {"semantics": semantics, "memory_model": memory_model, "microbatches": 64}
    longest = serial(chain, cluster)
    allocations = [
        stages
        for stages in every_allocation(chain, cluster, pins)
        if (not contiguous or len({gpu for *_, gpu in stages}) == len(stages))
        and _Placing(chain, cluster, stages, longest, 1, fields).one_at_a_time()
    ]
    for period in range(1, limit + 1):
        for stages in allocations:
            if _Placing(chain, cluster, stages, period, k, fields).possible():
                return period
    return None


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


class _Placing:
    """Depth-first placement of all ops of one period."""

    def __init__(
        self,
        chain: Chain,
        cluster: Cluster,
        stages: Stages,
        period: int,
        k: int,
        fields: dict[str, object],
    ) -> None:
        self.chain, self.cluster, self.stages = chain, cluster, stages
        self.period, self.k, self.fields = period, k, fields
        self.ops = [(kind, stage) for kind, stage in handmade.order(stages)]
        self.lengths = [handmade.length(chain, cluster, stages, *op) for op in self.ops]
        self.places = [self._place(*op) for op in self.ops]
        self.busy: dict[object, int] = {}
        self.zero: dict[object, list[int]] = {}
        self.times: dict[tuple[int, int], int] = {}
        self.free = [self._is_free(index) for index in range(len(self.ops))]
        self.spare = self._spare()
        self.stays = self._stays()

    def possible(self) -> bool:
        """Whether some placement keeps every rule."""
        if min(self.spare) < 0:
            return False
        work: dict[object, int] = {}
        for place, length in zip(self.places, self.lengths, strict=True):
            work[place] = work.get(place, 0) + self.k * length
        return max(work.values()) <= self.period and self._next(0, 0, 0)

    def _is_free(self, index: int) -> bool:
        """Whether a transfer takes no time and carries no bytes: when it goes does not matter."""
        kind, stage = self.ops[index]
        if kind.is_compute or self.lengths[index]:
            return False
        first, last, _ = self.stages[stage]
        behind = self.chain.layers[last if kind is OpKind.SEND_F else first - 1]
        return not behind.output_bytes and not behind.gradient_of_output_bytes

    def _kept(self, first: int, last: int) -> int:
        """At least what a stage keeps of each micro-batch between its F and its B."""
        layers = self.chain.layers[first : last + 1]
        if self.fields["memory_model"] == "paper":
            return sum(x.saved_input_bytes + x.saved_bytes + x.saved_output_bytes for x in layers)
        inner = sum(
            max(one.saved_output_bytes, two.saved_input_bytes) for one, two in pairwise(layers)
        )
        return inner + sum(layer.saved_bytes for layer in layers) + layers[-1].saved_output_bytes

    def one_at_a_time(self) -> bool:
        """Whether nothing waits in a schedule that fits; no schedule of these stages needs less.

        Whenever an op runs in any schedule, its own micro-batch's bytes are in memory.
        """
        if min(self.spare) < 0:
            return False
        time = 0
        for index, length in enumerate(self.lengths):
            self.times[index, 0] = time
            time += length
        fits = self._judge()
        self.times.clear()
        return fits

    def _place(self, kind: OpKind, stage: int) -> object:
        """What the op keeps busy."""
        gpu = self.stages[stage][2]
        if kind.is_compute:
            return gpu
        other = self.stages[stage + 1 if kind is OpKind.SEND_F else stage - 1][2]
        pair = (gpu, other)
        return pair if self.cluster.links.duplex == "full" else tuple(sorted(pair))

    def _spare(self) -> list[int]:
        """Memory of each GPU less parameters and what belongs to them."""
        spare = [gpu.memory_bytes for gpu in self.cluster.gpus]
        for first, last, gpu in self.stages:
            for layer in self.chain.layers[first : last + 1]:
                if self.fields["memory_model"] == "paper":
                    spare[gpu] -= 3 * layer.weight_bytes
                else:
                    versions = 2 if self.fields["semantics"] == "2bw" else 1
                    spare[gpu] -= versions * layer.weight_bytes
                    spare[gpu] -= layer.gradient_bytes + layer.optimizer_bytes
                    spare[gpu] -= (versions - 1) * layer.waiting_gradient_bytes
        if self.fields["memory_model"] == "paper":
            for (_, last, gpu), (_, _, other) in pairwise(self.stages):
                if gpu != other:
                    spare[gpu] -= 2 * self.chain.layers[last].output_bytes
                    spare[other] -= 2 * self.chain.layers[last].output_bytes
        return spare

    def _next(self, index: int, copy: int, ready: int) -> bool:
        """Place op `index` of `copy` and all that follow."""
        if index == len(self.ops):
            return self._judge() if copy + 1 == self.k else self._next(0, copy + 1, 0)
        first, last = ready, ready + self.period - 1
        if index == 0:
            first, last = (0, 0) if copy == 0 else (self.times[0, copy - 1], self.period - 1)
        if self.free[index]:
            last = first
        for time in range(first, last + 1):
            if not self._in_order(index, copy, time):
                continue
            mask = self._mask(index, time)
            place = self.places[index]
            if mask is None or self.busy.get(place, 0) & mask:
                continue
            self.busy[place] = self.busy.get(place, 0) | mask
            self.times[index, copy] = time
            if self._room(index) and self._next(index + 1, copy, time + self.lengths[index]):
                return True
            del self.times[index, copy]
            self.busy[place] &= ~mask
        return False

    def _in_order(self, index: int, copy: int, time: int) -> bool:
        """Copies of an op in order, the next period's first behind the last."""
        length = self.lengths[index]
        if copy and time < self.times[index, copy - 1] + length:
            return False
        around = self.times.get((index, 0), time) + self.period
        return copy + 1 < self.k or time + length <= around

    def _mask(self, index: int, time: int) -> int | None:
        """The unit intervals of the period that the op fills; None if it is longer."""
        length = self.lengths[index]
        if length > self.period:
            return None
        filled = ((1 << length) - 1) << (time % self.period)
        return (filled | filled >> self.period) & ((1 << self.period) - 1)

    def _room(self, index: int) -> bool:
        """Whether what surely lies in memory fits: saved and sent bytes of what is placed."""
        gpus = {gpu for _, _, gpu in self.stages}
        level = {gpu: [0] * self.period for gpu in gpus}
        for begin, _ in enumerate(self.ops[: index + 1]):
            for gpu, size, length, end in self.stays[begin]:
                for copy in range(self.k) if size else ():
                    if (begin, copy) in self.times and (end, copy) in self.times:
                        until = self.times[end, copy] + (self.lengths[end] if length else 0)
                        start = self.times[begin, copy]
                        start += 0 if self._is_send(begin) else self.lengths[begin]
                        for time in range(start, until):
                            level[gpu][time % self.period] += size
        return all(max(level[gpu]) <= self.spare[gpu] for gpu in gpus)

    def _is_send(self, index: int) -> bool:
        return not self.ops[index][0].is_compute

    def _stays(self) -> list[list[tuple[int, int, bool, int]]]:
        """By first op: (GPU, bytes, whether to the end of the last op, last op) of each stay."""
        found: list[list[tuple[int, int, bool, int]]] = [[] for _ in self.ops]
        for index, (kind, stage) in enumerate(self.ops):
            first, last, gpu = self.stages[stage]
            if kind is OpKind.F:
                end = self.ops.index((OpKind.B, stage))
                found[index].append((gpu, self._kept(first, last), False, end))
            if kind.is_compute or self.fields["memory_model"] == "paper":
                continue
            forward = kind is OpKind.SEND_F
            layer = self.chain.layers[last if forward else first - 1]
            full = layer.output_bytes if forward else layer.gradient_of_output_bytes
            sent = full - (layer.saved_output_bytes if forward else 0)
            target = self.stages[stage + 1 if forward else stage - 1][2]
            found[index - 1].append((gpu, sent, True, index))
            found[index].append((target, full, False, index + 1))
        return found

    def _judge(self) -> bool:
        """The verifier's word on the finished schedule; zero-length ops are judged here too."""
        built = self._plan()
        told = audit(built)
        fits = all(row.peak_bytes <= row.budget_bytes for row in told.memory)
        versions = self.fields["semantics"] == "flush" or max(told.in_flight) <= 65
        return fits and versions and not self._broken(built)

    def _plan(self) -> Plan:
        times = {
            f"{stage}{kind}{copy}": self.times[index, copy]
            for index, (kind, stage) in enumerate(self.ops)
            for copy in range(self.k)
        }
        return handmade.plan(
            self.chain,
            self.stages,
            self.period,
            times,
            cluster=self.cluster,
            k=self.k,
            **self.fields,
        )

    def _broken(self, built: Plan) -> bool:
        ignored = {Rule.BOUNDS, Rule.BUDGET}
        return any(violation.rule not in ignored for violation in verify(built))


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
        2
        * max(
            latency + (ceil(Fraction(size * 10**9, band)) if band else 0)
            for latency, band in links
        )
        for size in (layer.output_bytes for layer in chain.layers[:-1])
    )
    return max(1, work + trips)
