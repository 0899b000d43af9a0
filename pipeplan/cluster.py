"""The cluster: the GPUs and links a plan is made for. A file of its own, embedded in each plan."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from pipeplan.document import Count, Document, Positive, Record
from pipeplan.units import MAX_GPUS, MAX_INT


class Gpu(Record):
    """One device. `speed` divides the chain's times: 2.0 is twice as fast as the profiled one."""

    name: str
    memory_bytes: Count
    """All that it has."""
    reserve_bytes: Count = Field(default=0, exclude_if=lambda size: size == 0)
    """What of it no plan may use: the driver's context, libraries, the allocator's gaps."""
    speed: Annotated[float, Field(ge=1e-6, le=1e6)] = 1.0

    @property
    def budget_bytes(self) -> int:
        """What plans may use, as planners take it; verifier and replay count for themselves."""
        return self.memory_bytes - self.reserve_bytes

    def with_budget(self, size: int) -> Gpu:
        """The same device with `size` bytes for plans and nothing else."""
        return self.model_copy(update={"memory_bytes": size, "reserve_bytes": 0})

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.reserve_bytes > self.memory_bytes:
            raise ValueError(
                f"reserve_bytes: got {self.reserve_bytes}, need at most memory_bytes ="
                f" {self.memory_bytes}: it is a part of it"
            )
        return self


class Pair(Record):
    """A link that differs from the default; `from` and `to` are indices into `gpus`.

    Under half duplex the entry holds for both directions.
    """

    source: Annotated[int, Field(ge=0, le=MAX_INT, alias="from")]
    target: Annotated[int, Field(ge=0, le=MAX_INT, alias="to")]
    latency_ns: Count = 0
    bandwidth_bytes_per_s: Positive | None = None


class Links(Record):
    """All links: the default one and the pairs that differ. A null bandwidth is infinite."""

    duplex: Literal["full", "half"] = "full"
    latency_ns: Count = 0
    bandwidth_bytes_per_s: Positive | None = None
    pairs: tuple[Pair, ...] = ()

    def between(self, source: int, target: int) -> tuple[int, int | None]:
        """(latency in ns, bandwidth in bytes/s or None) of the link from `source` to `target`."""
        ends = (source, target)
        for pair in self.pairs:
            same = (pair.source, pair.target)
            if ends == same or (self.duplex == "half" and ends == same[::-1]):
                return pair.latency_ns, pair.bandwidth_bytes_per_s
        return self.latency_ns, self.bandwidth_bytes_per_s

    def resource(self, source: int, target: int) -> tuple[int, int]:
        """What transfers from `source` to `target` exclude each other on: the pair they share.

        Ordered under full duplex, sorted under half duplex (one link per unordered pair).
        """
        return (source, target) if self.duplex == "full" or source < target else (target, source)


class Host(Record):
    """The memory beside the GPUs and the way each GPU has to it, one for each.

    Under full duplex a GPU sends and receives at the same time, each at the whole bandwidth.
    """

    memory_bytes: Count
    bandwidth_bytes_per_s: Positive
    duplex: Annotated[
        Literal["full", "half"], Field(exclude_if=lambda duplex: duplex == "full")
    ] = "full"
    update_bytes_per_s: Positive | None = Field(default=None, exclude_if=lambda rate: rate is None)
    """Bytes of weights that one GPU's share of the processor updates per second, (U5), while the
    shares of all other GPUs do the same; None: not known, so no update runs there."""


class Cluster(Document):
    """Machines: GPUs, links between them, what each action costs beyond its kernel time."""

    format: Literal["pipeplan-cluster/1"] = "pipeplan-cluster/1"
    gpus: Annotated[tuple[Gpu, ...], Field(min_length=1, max_length=MAX_GPUS)]
    action_overhead_ns: Count = 0
    """Added to every forward and backward of a stage."""
    links: Links = Links()
    host: Host | None = None

    @property
    def labels(self) -> tuple[str, ...]:
        """The GPUs' names for people; with their index where several have one name."""
        count = Counter(gpu.name for gpu in self.gpus)
        return tuple(
            f"{gpu.name} {index}" if count[gpu.name] > 1 else gpu.name
            for index, gpu in enumerate(self.gpus)
        )

    @model_validator(mode="after")
    def _check(self) -> Self:
        seen: dict[tuple[int, int], int] = {}
        for index, pair in enumerate(self.links.pairs):
            where = f"links.pairs[{index}]"
            for field, gpu in (("from", pair.source), ("to", pair.target)):
                if gpu >= len(self.gpus):
                    raise ValueError(
                        f"{where}.{field}: got {gpu}, need an index below {len(self.gpus)}"
                    )
            if pair.source == pair.target:
                raise ValueError(
                    f"{where}: got a link from GPU {pair.source} to itself, need two GPUs"
                )
            key = self.links.resource(pair.source, pair.target)
            if key in seen:
                raise ValueError(
                    f"{where}: got the link of links.pairs[{seen[key]}] again, need each link once"
                )
            seen[key] = index
        return self


def differ_in_memory_alone(one: Cluster, other: Cluster) -> bool:
    """Whether the GPUs that both have, and all between them, are equal but for their memory.

    The GPUs of the cluster that has fewer are the first ones of the other.
    """
    count = min(len(one.gpus), len(other.gpus))
    return _first_without_memory(one, count) == _first_without_memory(other, count)


def _first_without_memory(cluster: Cluster, count: int) -> Cluster:
    pairs = tuple(
        pair for pair in cluster.links.pairs if pair.source < count and pair.target < count
    )
    return cluster.model_copy(
        update={
            "gpus": tuple(gpu.with_budget(0) for gpu in cluster.gpus[:count]),
            "links": cluster.links.model_copy(update={"pairs": pairs}),
        }
    )


def uniform(
    gpus: int,
    memory_bytes: int,
    *,
    reserve_bytes: int = 0,
    bandwidth_bytes_per_s: int | None = None,
    latency_ns: int = 0,
    duplex: Literal["full", "half"] = "full",
    action_overhead_ns: int = 0,
    host: Host | None = None,
) -> Cluster:
    """`gpus` equal GPUs, every pair joined by the same link, each with a way to the `host`."""
    return Cluster(
        gpus=tuple(
            Gpu(name=f"gpu{i}", memory_bytes=memory_bytes, reserve_bytes=reserve_bytes)
            for i in range(gpus)
        ),
        action_overhead_ns=action_overhead_ns,
        links=Links(
            duplex=duplex, latency_ns=latency_ns, bandwidth_bytes_per_s=bandwidth_bytes_per_s
        ),
        host=host,
    )
