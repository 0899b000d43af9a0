"""Whether the replicas on one machine fit into its memory with what they offload, all together.

The plan's rule `host` judges one pipeline alone; replicas share the memory, not the plan.
"""

from __future__ import annotations

from pipeplan.errors import InputError
from pipeplan.plan import Plan
from pipeplan.runtime.transport.torchrun_env import TorchrunEnv
from pipeplan.units import format_bytes


def check_host_room(plan: Plan, place: TorchrunEnv, replicas: int) -> None:
    """Refuse replicas that offload more than the host's memory holds: R x sum of `host_bytes`.

    Args:
        plan: of one replica.
        place: this process; R is how many whole replicas its machine has, or all of them if
            nothing was launched.
        replicas: side by side, on all machines.

    Raises:
        InputError: if they do.
    """
    host, each = plan.cluster.host, sum(row.host_bytes for row in plan.memory)
    if host is None or not each:
        return
    here = min(replicas, max(1, place.local_size // len(plan.cluster.gpus)))
    here = here if place.launched else replicas
    if here * each > host.memory_bytes:
        raise InputError(
            f"replicas: memory of the host: got {here} replicas on this machine that offload"
            f" {format_bytes(each)} each, {here * each} bytes together, need at most"
            f" {host.memory_bytes} bytes, the cluster's host. Use fewer replicas on a machine, or"
            f" plan with a host of {format_bytes(host.memory_bytes // here)}."
        )
