"""PipeDream's partitioner against brute force, and against what the published tool finds."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pipeplan.baselines import pipedream_graph
from pipeplan.baselines.pipedream import counted_bytes, problem
from pipeplan.chain import Chain
from pipeplan.cluster import Cluster, Gpu, Links, uniform
from pipeplan.importers.graph_txt import read_graph
from tests.baselines import chain, random_chain, runs, splits_of

PROFILES = os.environ.get("PIPEPLAN_PROFILES")
GBYTES = 10**9


def estimate(of: Chain, ends: tuple[int, ...], bandwidth: int | None) -> int:
    """PipeDream's objective by its definition: the slowest stage or cut."""
    loads = [
        sum(layer.forward_ns + layer.backward_ns for layer in of.layers[begin:end])
        for begin, end in runs(ends)
    ]
    cuts = [
        0 if bandwidth is None else -(-2 * of.layers[end - 1].output_bytes * GBYTES // bandwidth)
        for end in ends[:-1]
    ]
    return max(loads + cuts)


def rule(of: Chain, ends: tuple[int, ...]) -> int:
    """What PipeDream's memory rule counts for its largest stage."""
    return max(
        (len(ends) - 1 - stage) * sum(map(counted_bytes, of.layers[begin:end]))
        for stage, (begin, end) in enumerate(runs(ends))
    )


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("target", [None, 60, 30, 10])
def test_the_partition_is_the_best_by_its_own_objective(seed: int, target: int | None) -> None:
    """Over all splits that keep the memory rule none has a shorter slowest stage or cut."""
    of, stages = random_chain(seed, 7), 2 + seed % 3
    found = problem(of, uniform(stages, 1, bandwidth_bytes_per_s=GBYTES), stages).solve(target)
    allowed = [ends for ends in splits_of(7, stages) if target is None or rule(of, ends) <= target]
    if not allowed:
        assert found is None
        return
    assert found is not None
    assert found.ends in allowed
    assert found.period_ns == min(estimate(of, ends, GBYTES) for ends in allowed)
    assert found.period_ns == estimate(of, found.ends, GBYTES)
    assert found.memory_bytes == rule(of, found.ends)


@pytest.mark.parametrize("seed", range(8))
def test_among_equal_partitions_the_one_of_least_traffic_can_be_asked_for(seed: int) -> None:
    """It has the same objective, and no other such partition moves fewer bytes."""
    of = random_chain(seed, 8)
    asked = problem(of, uniform(3, 1, bandwidth_bytes_per_s=GBYTES), 3)
    plain, quiet = asked.solve(), asked.solve(least_traffic=True)
    assert plain is not None
    assert quiet is not None
    assert quiet.period_ns == plain.period_ns

    def traffic(ends: tuple[int, ...]) -> int:
        return sum(of.layers[end - 1].output_bytes for end in ends[:-1])

    equal = [e for e in splits_of(8, 3) if estimate(of, e, GBYTES) == plain.period_ns]
    assert traffic(quiet.ends) == min(map(traffic, equal))
    assert traffic(quiet.ends) <= traffic(plain.ends)


def test_the_memory_rule_counts_nothing_for_the_last_stage() -> None:
    """Two layers of 100 bytes: a target of 100 passes, though the last one needs as much."""
    of = chain([(1, 1), (1, 1)], sizes=[0, 0], weight=100)
    asked = problem(of, uniform(2, 1), 2)
    found = asked.solve(100)
    assert found is not None
    assert found.memory_bytes == 100
    assert asked.solve(99) is None


def test_communication_can_be_left_out_of_the_objective() -> None:
    """With it the cut of 18 ns is avoided at the price of a load of 6; without, loads decide."""
    cluster = uniform(2, 1, bandwidth_bytes_per_s=GBYTES)
    wide = chain([(2, 2), (1, 1), (1, 1)], sizes=[9, 1, 0])
    avoided = problem(wide, cluster, 2).solve()
    ignored = problem(wide, cluster, 2, communication=False).solve()
    assert avoided is not None
    assert ignored is not None
    assert (avoided.ends, avoided.period_ns) == ((2, 3), 6)
    assert (ignored.ends, ignored.period_ns) == ((1, 3), 4)


def test_a_faster_gpu_gets_more_layers() -> None:
    """Stage s runs on GPU s: at three times the speed it takes three of four equal layers."""
    of = chain([(3, 3)] * 4)
    gpus = (Gpu(name="fast", memory_bytes=1, speed=3.0), Gpu(name="slow", memory_bytes=1))
    found = problem(of, Cluster(gpus=gpus, links=Links()), 2).solve()
    assert found is not None
    assert (found.ends, found.period_ns) == ((3, 4), 6)


DIAMOND = """\
node1 -- Input0 -- forward_compute_time=0.000, backward_compute_time=0.000, \
activation_size=4.000, parameter_size=0.000
node2 -- Conv() -- forward_compute_time=1.000, backward_compute_time=1.000, \
activation_size=1.000, parameter_size=8.000
node3 -- Left() -- forward_compute_time=2.000, backward_compute_time=2.000, \
activation_size=2.000, parameter_size=8.000
node4 -- Right() -- forward_compute_time=2.000, backward_compute_time=2.000, \
activation_size=3.000, parameter_size=8.000
node5 -- Add() -- forward_compute_time=1.000, backward_compute_time=1.000, \
activation_size=1.000, parameter_size=0.000
\tnode1 -- node2
\tnode2 -- node3
\tnode2 -- node4
\tnode3 -- node5
\tnode4 -- node5
"""


def test_a_graph_is_cut_through_its_branches() -> None:
    """Two balanced halves of 6 ms exist only with one branch on each side.

    Left side first: conv and left (6 ms) leave outputs of 1 + 2 bytes, 6 ns at 1 GB/s.
    """
    found = pipedream_graph.partition(read_graph(DIAMOND, "diamond"), 2, GBYTES)
    assert found is not None
    assert found.period_ns == 6 * 10**6
    assert {len(stage) for stage in found.stages} == {2}
    assert found.stages[0] in ({"node2", "node3"}, {"node2", "node4"})
    assert pipedream_graph.partition(read_graph(DIAMOND, "diamond"), 2, GBYTES, 0) is None


def test_a_cut_of_a_graph_carries_all_outputs_needed_behind() -> None:
    """At 1 kB/s: behind conv 2 ms, behind conv and a branch 6 or 8 ms, before add 10 ms."""
    found = pipedream_graph.partition(read_graph(DIAMOND, "diamond"), 2, 1000)
    assert found is not None
    assert found.period_ns == 6 * 10**6
    assert found.stages[0] == {"node2", "node3"}


@pytest.mark.skipif(PROFILES is None, reason="PIPEPLAN_PROFILES does not name a folder")
def test_the_published_tools_partitions_are_found() -> None:
    """VGG16 on 4 GPUs 235.6 ms (274.0 ms with 16 GB), ResNet-50 111.5 ms on 4, 68.5 on 8 GPUs."""
    folder = Path(PROFILES or "")
    vgg = Chain.from_json((folder / "vgg16-b128.chain.json").read_text())
    asked = problem(vgg, uniform(4, 1, bandwidth_bytes_per_s=12 * GBYTES), 4)
    free, limited = asked.solve(), asked.solve(16 * GBYTES)
    assert free is not None
    assert limited is not None
    assert (free.ends, free.period_ns) == ((3, 4, 8, 21), 235_590_000)
    assert limited.period_ns == 274_027_862
    for name, gpus, target, period in (
        ("vgg16", 4, None, 235_590_000),
        ("vgg16", 4, 16 * GBYTES, 274_027_862),
        ("resnet50", 4, None, 111_497_000),
        ("resnet50", 4, 16 * GBYTES, 119_422_000),
        ("resnet50", 8, None, 68_506_966),
    ):
        text = (folder / f"pipedream-{name}-b128.graph.txt").read_text()
        found = pipedream_graph.partition(read_graph(text, name), gpus, 12 * GBYTES, target)
        assert found is not None
        assert found.period_ns == pytest.approx(period, abs=1000), (name, gpus, target)
