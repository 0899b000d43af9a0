"""Instances that benchmarks and tests plan: a network, equal GPUs, a share of the memory it wants.

The share is of the peak that the best contiguous 1F1B plan has when memory is no limit.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from pipeplan.chain import Chain
from pipeplan.cluster import Cluster, Host, uniform
from pipeplan.plan import MemoryModel
from pipeplan.planner import Config, solve
from pipeplan.testing.networks import build

BANDWIDTH = 12 * 10**9
UNLIMITED = 2**50


@dataclass(frozen=True, slots=True)
class Case:
    """One instance; `key` names it in the results."""

    name: str
    gpus: int
    fraction: float
    memory_model: MemoryModel = "exact"

    @property
    def key(self) -> str:
        """What identifies the row."""
        return f"{self.name} {self.gpus} {self.fraction:g} {self.memory_model}"

    @property
    def chain(self) -> Chain:
        """The network."""
        return chain_of(self.name)

    @property
    def cluster(self) -> Cluster:
        """Equal GPUs, 12 GB/s, one link per pair for both directions, as the source has them."""
        peak = ample_peak(self.name, self.gpus, self.memory_model)
        return machines(self.gpus, int(self.fraction * peak))

    @property
    def hosted(self) -> Cluster:
        """The same with a host: 12 GB/s both ways at once for each GPU, memory without limit."""
        host = Host(memory_bytes=UNLIMITED, bandwidth_bytes_per_s=BANDWIDTH)
        return self.cluster.model_copy(update={"host": host})


def machines(gpus: int, memory: int) -> Cluster:
    """Equal GPUs joined by half-duplex links."""
    return uniform(gpus, memory, bandwidth_bytes_per_s=BANDWIDTH, duplex="half")


@cache
def chain_of(name: str) -> Chain:
    """The computed network called `name`, or the chain file of that name."""
    return Chain.read(name) if Path(name).suffix == ".json" else build(name)


@cache
def ample_peak(name: str, gpus: int, memory_model: MemoryModel = "exact") -> int:
    """`contiguous_peak` of a network."""
    return contiguous_peak(chain_of(name), gpus, memory_model)


def contiguous_peak(chain: Chain, gpus: int, memory_model: MemoryModel) -> int:
    """Bytes that the best contiguous 1F1B plan needs when memory is no limit."""
    config = Config(method="contiguous", k=1, memory_model=memory_model)
    plan = solve(chain, machines(gpus, UNLIMITED), config)
    return max(row.peak_bytes for row in plan.memory)
