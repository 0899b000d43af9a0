"""Symmetry classes of GPUs: GPUs that may swap places, so that only one order is searched."""

from __future__ import annotations

from pipeplan.ilp.costs import CostModel


def gpu_classes(costs: CostModel) -> list[list[int]]:
    """GPUs that may swap places without any change: same speed, memory and links to all others.

    A GPU that a layer is pinned to is like no other.
    """
    classes: list[list[int]] = []
    for gpu in range(costs.gpus):
        for members in classes:
            if _twins(costs, members[0], gpu):
                members.append(gpu)
                break
        else:
            classes.append([gpu])
    return classes


def _twins(costs: CostModel, one: int, other: int) -> bool:
    if one in costs.pinned_gpus or other in costs.pinned_gpus:
        return False
    first, second = costs.cluster.gpus[one], costs.cluster.gpus[other]
    if (first.speed, first.budget_bytes) != (second.speed, second.budget_bytes):
        return False
    if not costs.cluster.links.pairs:
        return True
    if costs.link(one, other) != costs.link(other, one):
        return False
    rest = (gpu for gpu in range(costs.gpus) if gpu not in (one, other))
    return all(
        costs.link(one, gpu) == costs.link(other, gpu)
        and costs.link(gpu, one) == costs.link(gpu, other)
        for gpu in rest
    )
