"""Offloading in tiny pipelines held against brute force: cuts, order, what leaves and when."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

from pipeplan import planner
from pipeplan.chain import Chain
from pipeplan.cluster import Cluster, Host, uniform
from tests import handmade, oracle_offload

HOST = Host(memory_bytes=10**6, bandwidth_bytes_per_s=2 * 10**9, duplex="full")


def tiny(seed: int) -> Chain:
    """Two layers of 1 or 2 ns whose outputs are a byte and that keep 2 to 5 more."""
    draw = Random(seed)
    fields = [
        {
            "output_bytes": 1,
            "saved_output_bytes": draw.choice([0, 1]),
            "saved_input_bytes": draw.choice([0, 1]) if layer else 0,
            "saved_bytes": draw.randint(2, 5),
        }
        for layer in range(2)
    ]
    return handmade.chain([(draw.randint(1, 2), draw.randint(1, 2)) for _ in fields], fields)


def machines(memory: int, host: Host | None) -> Cluster:
    """Two GPUs; messages take no time."""
    return uniform(2, memory, bandwidth_bytes_per_s=None, host=host)


def period(seed: int, cluster: Cluster, seconds: float = 0.5) -> int:
    """Of the plan with one micro-batch per period."""
    config = planner.Config(
        k=1,
        offload="off" if cluster.host is None else "auto",
        time_limit_s=seconds,
        workers=1,
        deterministic=True,
    )
    return planner.solve(tiny(seed), cluster, config).period_ns


MISSED = pytest.param(
    33, 7, marks=pytest.mark.xfail(strict=True, reason="the plan takes 6 ns, brute force 5")
)


@pytest.mark.parametrize(
    ("seed", "memory"),
    [
        *((5, 10), (9, 10), (24, 8), (36, 6), (40, 6), (48, 8)),
        *(pytest.param(*each, marks=pytest.mark.long) for each in ((12, 10), (27, 10))),
        MISSED,
    ],
)
def test_what_offloading_gains_equals_brute_force(seed: int, memory: int) -> None:
    """Where plans are shorter with it, none is shorter still."""
    found = period(seed, machines(memory, HOST))
    assert found < period(seed, machines(memory, None))
    assert oracle_offload.optimum(tiny(seed), machines(memory, HOST), found) == found


def _limited() -> Iterator[Any]:
    """Seed and bytes of a memory, seconds: each at the least limit, a cheap one at two."""
    for seed, memory in ((3, 7), (6, 11), (4, 9), (10, 11), (20, 9)):
        for seconds in (0.5, 1, 4):
            short = seconds == 0.5 or (seed == 6 and seconds == 1)
            marks = [] if short else [pytest.mark.long]
            yield pytest.param(
                (seed, memory), seconds, marks=marks, id=f"{seed},{memory}-{seconds}"
            )


@pytest.mark.parametrize(("case", "seconds"), [*_limited()])
def test_what_leaves_gains_nothing_where_nothing_need_leave(
    case: tuple[int, int], seconds: float
) -> None:
    """Plans that may offload are as short as brute force; so are those without, at any limit.

    The joint model's schedules of shorter periods exceed a memory by their exact bytes:
    allocations are asked one by one then.
    """
    seed, memory = case
    found = period(seed, machines(memory, HOST), seconds)
    assert period(seed, machines(memory, None), seconds) == found
    assert oracle_offload.optimum(tiny(seed), machines(memory, HOST), found) == found
