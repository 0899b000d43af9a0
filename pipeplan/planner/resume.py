"""Which plans a search may start from."""

from __future__ import annotations

from pipeplan import verifier
from pipeplan.chain import Chain
from pipeplan.cluster import Cluster
from pipeplan.errors import InputError
from pipeplan.plan import Plan
from pipeplan.planner.config import Config


def check(plan: Plan, chain: Chain, cluster: Cluster, config: Config) -> None:
    """Refuse to start from a plan that is wrong or answers another question, before any search.

    Raises:
        InvalidPlanError: if the plan breaks a rule.
        InputError: if the plan is for another chain, uses GPUs that are not there, or computes
            again or offloads what the search keeps.
    """
    verifier.check(plan)
    if plan.chain.digest() != chain.digest():
        raise InputError(
            f"config.resume: got a plan for chain {plan.chain.name!r}"
            f" ({len(plan.chain.layers)} layers, digest {plan.chain.digest()[:12]}), need one for"
            f" {chain.name!r} ({len(chain.layers)} layers, digest {chain.digest()[:12]})."
            " Plan without config.resume."
        )
    if config.recompute != "auto" and plan.recomputes:
        raise InputError(
            "config.resume: got a plan whose stages recompute layers, need one without: the"
            " search keeps all that is saved. Plan without config.resume."
        )
    if config.offload != "auto" and any(op.kind.is_host for op in plan.ops):
        raise InputError(
            "config.resume: got a plan whose stages send what they keep to the host, need one"
            " without: the search keeps all on the GPUs. Plan without config.resume."
        )
    if config.offload == "off" and any(stage.states == "host" for stage in plan.stages):
        raise InputError(
            "config.resume: got a plan whose optimizers' states are on the host, need one without:"
            " the search keeps all on the GPUs. Plan without config.resume."
        )
    most, gpus = max(stage.gpu for stage in plan.stages), len(cluster.gpus)
    if most >= gpus:
        raise InputError(
            f"config.resume: got a plan that uses GPU {most}, need GPUs below {gpus}."
            " Plan without config.resume."
        )
