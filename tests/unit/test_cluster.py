"""The cluster: which link joins two GPUs, and what transfers exclude each other on."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from pipeplan.cluster import Cluster, Gpu, Links, Pair, uniform
from pipeplan.errors import InputError

SLOW = Pair(source=2, target=0, latency_ns=7, bandwidth_bytes_per_s=3)


def links(duplex: Literal["full", "half"]) -> Links:
    """A default link of 1 ns and infinite bandwidth, and one slow pair."""
    return Links(duplex=duplex, latency_ns=1, pairs=(SLOW,))


def test_pair_overrides_one_direction() -> None:
    """Under full duplex a pair holds for its direction only."""
    assert links("full").between(2, 0) == (7, 3)
    assert links("full").between(0, 2) == (1, None)
    assert links("full").between(0, 1) == (1, None)


def test_pair_overrides_both_directions_under_half_duplex() -> None:
    """Under half duplex there is one link per unordered pair, so a pair holds both ways."""
    assert links("half").between(2, 0) == links("half").between(0, 2) == (7, 3)


def test_shared_link() -> None:
    """Opposite transfers share a link exactly under half duplex."""
    assert links("full").resource(0, 2) != links("full").resource(2, 0)
    assert links("half").resource(0, 2) == links("half").resource(2, 0)


def test_speed_may_be_an_integer() -> None:
    """JSON has one kind of number: `2` is a speed like `2.0`."""
    data = {"gpus": [{"name": "a", "memory_bytes": 1, "speed": 2}]}
    assert repr(Cluster.from_data(data).gpus[0].speed) == "2.0"


def test_uniform() -> None:
    """Equal GPUs behind equal links, as the machine flags describe them."""
    cluster = uniform(3, 5, bandwidth_bytes_per_s=7, latency_ns=2, duplex="half")
    assert [gpu.memory_bytes for gpu in cluster.gpus] == [5, 5, 5]
    assert cluster.links.between(1, 2) == (2, 7)
    assert Cluster.from_json(cluster.to_json()) == cluster


def pairs(duplex: str, *ends: tuple[int, int]) -> dict[str, Any]:
    """Cluster data of three GPUs with one entry for each of `ends`."""
    gpus = [{"name": f"g{i}", "memory_bytes": 1} for i in range(3)]
    entries = [{"from": a, "to": b} for a, b in ends]
    return {"gpus": gpus, "links": {"duplex": duplex, "pairs": entries}}


def test_each_link_once() -> None:
    """Two entries for one link contradict each other; which two are one depends on the duplex."""
    assert Cluster.from_data(pairs("full", (0, 1), (1, 0)))
    with pytest.raises(InputError, match=r"links\.pairs\[1\]: got the link of links\.pairs\[0\]"):
        Cluster.from_data(pairs("half", (0, 1), (1, 0)))
    with pytest.raises(InputError, match=r"links\.pairs\[1\]"):
        Cluster.from_data(pairs("full", (0, 1), (0, 1)))


def test_links_end_at_two_gpus() -> None:
    """A link of a GPU to itself, or to one that is not there, is refused."""
    with pytest.raises(InputError, match="GPU 1 to itself"):
        Cluster.from_data(pairs("full", (1, 1)))
    with pytest.raises(InputError, match=r"links\.pairs\[0\]\.to: got 3, need an index below 3"):
        Cluster.from_data(pairs("full", (1, 3)))


def test_gpus_of_one_name_are_told_apart() -> None:
    """People name them by their kind; others keep their names."""
    names = ("A100", "A100", "old")
    gpus = tuple(Gpu(name=name, memory_bytes=1) for name in names)
    cluster = Cluster(gpus=gpus)
    assert cluster.labels == ("A100 0", "A100 1", "old")
    assert uniform(2, 1).labels == ("gpu0", "gpu1")
