"""Whether a run is on other machines than those that its chain was measured on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from pipeplan.capture.layer_costs.device_clock import ModelDevice
from pipeplan.plan import Plan

Facts = Mapping[str, str | int | float | bool | None]
"""About a machine, as chains have them (`device`)."""


def chain_facts(device: torch.device) -> Facts:
    """What a chain that was measured here, on `device`, would say."""
    return ModelDevice(device).facts()


def remark(plan: Plan, ranks: Sequence[Facts]) -> str | None:
    """One line about the first rank that differs from where the chain was measured, if one does.

    A GPU that the cluster calls faster or slower is another one: its name is not compared.

    Args:
        plan: with the chain.
        ranks: facts of each rank's machine, in order.
    """
    known = plan.chain.device
    if plan.chain.mode != "measured":
        return None
    for rank, facts in enumerate(ranks):
        on_gpu = facts.get("device") == "cuda"
        part = "gpu" if on_gpu else "cpu"
        for name in ("device", part, "torch", *(() if on_gpu else ("threads",))):
            same_kind = name != part or plan.cluster.gpus[rank].speed == 1.0
            if name in known and same_kind and known[name] != facts.get(name):
                return (
                    f"warning: the chain was measured elsewhere: {name} {known[name]}, and rank"
                    f" {rank} has {facts.get(name)}: its times and bytes may be others here."
                    " Profile and plan again where it runs."
                )
    return None
