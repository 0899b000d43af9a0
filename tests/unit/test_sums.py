"""Numbers that a file may hold and nobody can add are refused before anything is computed."""

from __future__ import annotations

from typing import Any

import pytest

from pipeplan.cluster import Cluster, Gpu, Host, uniform
from pipeplan.compare import Request, compare
from pipeplan.errors import InputError
from pipeplan.planner import Config, solve
from pipeplan.remat import from_chain
from pipeplan.remat.graph import Budget, GraphProblem
from pipeplan.remat.graph import solve as solve_graph
from pipeplan.sums import MOST, check_sums
from pipeplan.testing.random_graphs import random_graph
from tests import handmade

QUICK = Config(time_limit_s=1, workers=1)
SLOW = Cluster(gpus=(Gpu(name="slow", memory_bytes=2**62, speed=1e-6),))
TWO = uniform(2, 2**62, bandwidth_bytes_per_s=1)

HOST = Host(memory_bytes=2**40, bandwidth_bytes_per_s=1, update_bytes_per_s=1)
BESIDE = uniform(2, 2**62).model_copy(update={"host": HOST})


@pytest.mark.parametrize(
    ("fields", "cluster", "config", "words"),
    [
        ({"optimizer_ns": 2**61}, uniform(1, 2**62), QUICK, "times and transfers .* sum to"),
        ({"forward_ns": 2**62}, TWO, QUICK, "times and transfers .* sum to"),
        (
            {"forward_ns": 10**9},
            SLOW,
            Config(microbatches=10**6),
            r"\(1000000 micro-batches, 1 GPUs, .* sum to",
        ),
        ({"output_bytes": 2**33}, TWO, QUICK, "times and transfers .* sum to"),
        ({"saved_bytes": 2**61}, TWO, QUICK, "bytes sum to"),
        ({"weight_bytes": 2**33}, BESIDE, QUICK, "the way to the host.* sum to"),
    ],
)
def test_planners_and_comparisons_refuse_it(
    fields: dict[str, Any], cluster: Cluster, config: Config, words: str
) -> None:
    """Updates, transfers, slow GPUs and many micro-batches count."""
    chain = handmade.chain([(1, 1)] * 4, [fields] * 4)
    with pytest.raises(InputError, match=words):
        solve(chain, cluster, config)
    with pytest.raises(InputError, match=words):
        compare(Request(chain, (cluster,), config))


def test_one_device_knows_no_transfers() -> None:
    """So that only the chain's own numbers count, and up to the limit they may."""
    chain = handmade.chain([(MOST // 4, MOST // 4)] * 2, [{"output_bytes": 2**50}] * 2)
    assert from_chain(chain).layers == 2
    check_sums(chain, uniform(1, 1, bandwidth_bytes_per_s=1))
    with pytest.raises(InputError, match="'handmade': its times sum to"):
        from_chain(handmade.chain([(MOST, 1)]))


def test_a_graph_of_operators_has_sums_as_well() -> None:
    """Blocks of it hold several of its numbers in one."""
    graph = random_graph(2, 4, 3)
    large = [each.model_copy(update={"bytes": 2**61}) for each in graph.storages]
    with pytest.raises(InputError, match=f"graph 'random 2': its bytes sum to .* at most {MOST}"):
        solve_graph(GraphProblem(graph.model_copy(update={"storages": tuple(large)})), [Budget(9)])
    slow = [each.model_copy(update={"time_ns": MOST}) for each in graph.operations]
    with pytest.raises(InputError, match="graph 'random 2': its times sum to"):
        solve_graph(
            GraphProblem(graph.model_copy(update={"operations": tuple(slow)})), [Budget(9)]
        )
