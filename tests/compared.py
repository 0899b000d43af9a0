"""Two GPUs and rows on them, for the tests of comparisons."""

from __future__ import annotations

from pipeplan.baselines import splits
from pipeplan.baselines.eager import Policy, eager_plan
from pipeplan.cluster import Cluster, uniform
from pipeplan.compare.rows import Row, row_of
from tests.baselines import chain, setting

GBYTES = 10**9


def machines(memory: int, gpus: int = 2) -> Cluster:
    """GPUs on half-duplex links of 1 byte per ns."""
    return uniform(gpus, memory, bandwidth_bytes_per_s=GBYTES, duplex="half")


def eager_row(name: str, caps: tuple[int, ...], memory: int) -> Row:
    """Loads 5 and 6 with a cut of 3 ns each way, at most `caps` in flight."""
    of = setting(
        chain([(2, 3), (2, 4)], sizes=[3, 0], saved=10), 2, bandwidth=GBYTES, memory=memory
    )
    plan = eager_plan(of.outline(splits.to_stages((1, 2)), "2bw", name), Policy(caps))
    assert plan is not None
    return row_of(name, plan)
