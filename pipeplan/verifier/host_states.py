"""Updates on the host: what a stage has there and how long one takes, (U1) to (U5), (U7)."""

from __future__ import annotations

from collections.abc import Iterator

from pipeplan.chain import Layer
from pipeplan.plan import Plan, Stage
from pipeplan.units import ceil_div
from pipeplan.verifier.violation import Rule, Violation


def allowed(plan: Plan, stage: Stage) -> Iterator[Violation]:
    """Whether the states of a stage may be where the plan has them: rule `stages`."""
    if stage.states == "gpu":
        return
    where, host = f"stages[{stage.id}].states", plan.cluster.host
    if plan.memory_model != "exact":
        yield Violation(
            Rule.STAGES, where, f"got host in memory model {plan.memory_model}, need exact"
        )
    if host is None:
        yield Violation(Rule.STAGES, where, "got host, need a cluster with a host")
    elif host.update_bytes_per_s is None:
        yield Violation(
            Rule.STAGES,
            where,
            "got host, need cluster.host.update_bytes_per_s: how fast an update runs there",
        )


def movable_states(layer: Layer) -> int:
    """(U1): optimizer states and master weights; frozen parameters and buffers stay."""
    return max(0, layer.optimizer_bytes - layer.buffer_bytes - layer.frozen_bytes)


def moved(plan: Plan, stage: Stage) -> int:
    """(U2): bytes of its states that a stage does not have on its GPU."""
    if stage.states == "gpu":
        return 0
    layers = plan.chain.layers[stage.first : stage.last + 1]
    return sum(movable_states(layer) for layer in layers)


def stage_on_host(plan: Plan, stage: Stage) -> int:
    """(U3): with copies of weights and gradients."""
    if stage.states == "gpu":
        return 0
    layers = plan.chain.layers[stage.first : stage.last + 1]
    copies = sum(layer.weight_bytes + layer.gradient_bytes for layer in layers)
    return moved(plan, stage) + copies


def gradients_ns(plan: Plan, stage: Stage) -> int:
    """Of (U5): the gradients go."""
    host = plan.cluster.host
    assert host is not None
    layers = plan.chain.layers[stage.first : stage.last + 1]
    return ceil_div(
        sum(layer.gradient_bytes for layer in layers) * 10**9, host.bandwidth_bytes_per_s
    )


def behind_ns(plan: Plan, stage: Stage) -> int:
    """Of (U5): the host updates, and the weights come back."""
    host = plan.cluster.host
    assert host is not None
    assert host.update_bytes_per_s is not None
    weights = 10**9 * sum(
        layer.weight_bytes for layer in plan.chain.layers[stage.first : stage.last + 1]
    )
    return ceil_div(weights, host.update_bytes_per_s) + ceil_div(
        weights, host.bandwidth_bytes_per_s
    )


def runs_beside(plan: Plan, stage: Stage) -> bool:
    """(U7): whether its rank goes on while the host updates."""
    layers = plan.chain.layers[stage.first : stage.last + 1]
    return (
        plan.semantics == "2bw"
        and stage.states == "host"
        and not any(layer.waiting_gradient_bytes for layer in layers)
        and not any(each.offloads for each in plan.hosted(stage.gpu))
    )
