"""Replicas share the memory of their machine, and the plan counts one of them."""

from __future__ import annotations

import pytest

from pipeplan.cluster import Host
from pipeplan.errors import InputError
from pipeplan.launch.checks import rank_table
from pipeplan.plan import Plan
from pipeplan.runtime.startup.host_memory import check_host_room
from pipeplan.runtime.transport.torchrun_env import TorchrunEnv
from tests import launch_task


def offloading(memory_bytes: int) -> Plan:
    """A plan of two GPUs that says each has 500 bytes on the host."""
    plan = launch_task.plan(2, "flush")
    host = Host(memory_bytes=memory_bytes, bandwidth_bytes_per_s=1)
    rows = tuple(row.model_copy(update={"host_bytes": 500}) for row in plan.memory)
    cluster = plan.cluster.model_copy(update={"host": host})
    return plan.model_copy(update={"cluster": cluster, "memory": rows})


def launched(here: int) -> TorchrunEnv:
    """One of eight ranks, `here` of them on its machine."""
    return TorchrunEnv.of({"RANK": "0", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": str(here)})


@pytest.mark.parametrize(
    ("place", "replicas", "together"),
    [
        (launched(8), 4, 4000),
        (launched(4), 4, 2000),
        (launched(1), 4, 1000),
        (launched(2), 1, 1000),
        (TorchrunEnv.of({}), 3, 3000),
    ],
)
def test_replicas_on_a_machine_fit_together_or_are_refused(
    place: TorchrunEnv, replicas: int, together: int
) -> None:
    """Exactly the memory they need is enough, one byte less is not."""
    check_host_room(offloading(together), place, replicas)
    with pytest.raises(
        InputError, match=f"{together} bytes together, need at most {together - 1}"
    ):
        check_host_room(offloading(together - 1), place, replicas)


def test_plans_that_offload_nothing_have_room() -> None:
    """Without a host there is nothing to count."""
    check_host_room(launch_task.plan(2, "flush"), launched(8), 4)


def test_the_table_tells_what_waits_on_the_host() -> None:
    """A column for plans that offload, none for others."""
    assert "on the host" not in rank_table(launch_task.plan(2, "flush"))
    lines = rank_table(offloading(10**6)).splitlines()
    assert "on the host" in lines[0]
    assert all("500 B" in line for line in lines[1:3])
