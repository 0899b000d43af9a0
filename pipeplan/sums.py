"""What the numbers of a chain or a graph add up to: files hold each, nobody all sums of them.

Solvers add times of layers over GPUs and bytes of all kinds in 64 bits, and a plan file tells what
a whole step takes. So files whose sums leave that range are refused before anything is computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fractions import Fraction
from math import ceil

from pipeplan.chain import Chain
from pipeplan.cluster import Cluster, Host, Links
from pipeplan.errors import InputError
from pipeplan.operator_graph import OperatorGraph
from pipeplan.units import MAX_INT

MOST = MAX_INT // 64
"""Some sums count a number several times."""


def check_sums(chain: Chain, cluster: Cluster | None = None, microbatches: int = 1) -> None:
    """Refuse a chain whose totals leave the range of integers that can be computed with.

    Args:
        chain: what is trained.
        cluster: where; None: on one device as the chain measured it.
        microbatches: of a step.

    Raises:
        InputError: if its bytes, or the times of a step, add up to too much.
    """
    size = chain.input_bytes + sum(_numbers(chain, "_bytes"))
    name = f"chain {chain.name!r}"
    _check(name, "bytes", size, "Check that they are bytes")
    time, what = sum(_numbers(chain, "_ns")), "times"
    if cluster is not None:
        gpus = len(cluster.gpus)
        slowest = min(Fraction(str(gpu.speed)) for gpu in cluster.gpus)
        overheads = 2 * len(chain.layers) * cluster.action_overhead_ns
        time = ceil(time / slowest) + overheads + _transfers_ns(chain, cluster)
        time += _host_ns(chain, cluster.host) if cluster.host else 0
        time *= max(microbatches, gpus)  # sums over both are never multiplied
        what = (
            f"times and transfers ({microbatches} micro-batches, {gpus} GPUs, the slowest of them"
            f" and of the links{', the way to the host' if cluster.host else ''})"
        )
    step = "Check that they are ns, and speeds, bandwidths and the number of micro-batches"
    _check(name, what, time, step)


def check_graph_sums(graph: OperatorGraph) -> None:
    """Refuse a graph whose totals leave the range of integers that can be computed with.

    Raises:
        InputError: if the bytes of its storages and workspaces, or its times, add up to too much.
    """
    name = f"graph {graph.name!r}"
    size = graph.gradient_bytes + sum(each.bytes for each in graph.storages)
    size += sum(each.workspace_bytes for each in graph.operations)
    _check(name, "bytes", size, "Check that they are bytes")
    _check(name, "times", sum(each.time_ns for each in graph.operations), "Check that they are ns")


def _numbers(chain: Chain, ending: str) -> Iterator[int]:
    """What layers and their options call so, workspaces below zero without their sign."""
    for layer in chain.layers:
        for part in (layer, *layer.options):
            for name, value in part:
                if name.endswith(ending) and isinstance(value, int):
                    yield abs(value)


def _transfers_ns(chain: Chain, cluster: Cluster) -> int:
    """Every tensor between layers and its gradient on the link where they take longest."""
    if len(cluster.gpus) == 1:
        return 0
    sizes = [
        size
        for layer in chain.layers[:-1]
        for size in (layer.output_bytes, layer.gradient_of_output_bytes)
    ]
    return max(
        len(sizes) * latency + (ceil(Fraction(sum(sizes) * 10**9, rate)) if rate else 0)
        for latency, rate in _links(cluster.links)
    )


def _host_ns(chain: Chain, host: Host) -> int:
    """All that may move to the host and back, and the update of all weights there."""
    moved = sum(
        2 * layer.saved_bytes + layer.gradient_bytes + layer.weight_bytes for layer in chain.layers
    )
    moved += 2 * (chain.input_bytes + sum(layer.output_bytes for layer in chain.layers))
    weights = sum(layer.weight_bytes for layer in chain.layers)
    rates = (moved, host.bandwidth_bytes_per_s), (weights, host.update_bytes_per_s)
    return sum(ceil(Fraction(size * 10**9, rate)) for size, rate in rates if rate)


def _links(links: Links) -> Iterable[tuple[int, int | None]]:
    """(latency, bandwidth) of each kind of link."""
    pairs = {(pair.latency_ns, pair.bandwidth_bytes_per_s) for pair in links.pairs}
    return pairs | {(links.latency_ns, links.bandwidth_bytes_per_s)}


def _check(name: str, what: str, total: int, step: str) -> None:
    if total > MOST:
        raise InputError(f"{name}: its {what} sum to {total}, need at most {MOST}. {step}.")
