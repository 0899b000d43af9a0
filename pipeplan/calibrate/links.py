"""Latency and bandwidth of each link, measured with both directions busy.

A run sends activations one way while gradients come the other way, so that is what is timed: both
ends send and receive at once. One exchange of n bytes takes latency + n / bandwidth. The messages
take the roads that a run's take: small ones a line, if there is one, larger ones gloo.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import torch

from pipeplan.cluster import Links, Pair
from pipeplan.runtime.transport.base import Transport, wait_all
from pipeplan.runtime.transport.local_socket import LIMIT_BYTES

SMALL_BYTES = 1024
"""An exchange of this size counts as latency alone."""
LARGE_BYTES = (2**16, LIMIT_BYTES, 2**18, 2**20, 2**22)
REPEATS = 31
_ALIKE = 1.5
"""A pair gets its own entry where its figures differ from the typical ones by this factor."""


@dataclass(frozen=True, slots=True)
class Link:
    """What one pair of ranks measured."""

    ends: tuple[int, int]
    latency_ns: int
    bandwidth_bytes_per_s: int


def measure_links(transport: Transport) -> list[Link]:
    """Every pair of ranks, one after the other; all ranks get the same result."""
    links = []
    for pair in combinations(range(transport.size), 2):
        mine = _times(transport, pair) if transport.rank in pair else None
        told = [times for times in transport.gather(mine) if times is not None]
        links.append(fit(pair, [max(both) for both in zip(*told, strict=True)]))
    return links


def fit(pair: tuple[int, int], times_ns: Sequence[int]) -> Link:
    """Latency and bandwidth that explain median times of `SMALL_BYTES` and each of `LARGE_BYTES`.

    The slowest of the large sizes counts, so that a plan made with the figures has slack.
    """
    latency, large = times_ns[0], times_ns[1:]
    rates = [
        size * 10**9 // max(1, time - latency)
        for size, time in zip(LARGE_BYTES, large, strict=True)
    ]
    return Link(pair, latency, max(1, min(rates)))


def combine(links: Sequence[Link]) -> Links:
    """The links of a cluster: the typical figures, and entries for pairs that differ from them."""
    if not links:
        return Links()
    latency = int(statistics.median_high(link.latency_ns for link in links))
    bandwidth = int(statistics.median_low(link.bandwidth_bytes_per_s for link in links))
    pairs = [
        Pair.model_validate(
            {
                "from": source,
                "to": target,
                "latency_ns": link.latency_ns,
                "bandwidth_bytes_per_s": link.bandwidth_bytes_per_s,
            }
        )
        for link in links
        if not (_alike(link.latency_ns, latency) and _alike(link.bandwidth_bytes_per_s, bandwidth))
        for source, target in (link.ends, link.ends[::-1])
    ]
    return Links(latency_ns=latency, bandwidth_bytes_per_s=bandwidth, pairs=tuple(pairs))


def _alike(one: int, other: int) -> bool:
    return max(one, other) <= _ALIKE * min(one, other)


def _times(transport: Transport, pair: tuple[int, int]) -> list[int]:
    """Median ns of an exchange, for each size."""
    peer = pair[0] if transport.rank == pair[1] else pair[1]
    return [_exchange(transport, peer, size) for size in (SMALL_BYTES, *LARGE_BYTES)]


def _exchange(transport: Transport, peer: int, size: int) -> int:
    out, back = torch.zeros(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)
    times = []
    for _ in range(REPEATS):
        begin = time.perf_counter_ns()
        arriving = transport.receive(back, peer, 0)
        wait_all([transport.send(out, peer, 0), arriving])
        times.append(time.perf_counter_ns() - begin)
    return int(statistics.median(times[1:]))
