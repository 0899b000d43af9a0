"""Which modules of the user's model lie in which layer of its graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from pipeplan.capture.graph.data_flow import DataFlow, Node


def layer_modules(
    flow: DataFlow, groups: Sequence[Sequence[Node]], model: nn.Module
) -> list[tuple[str, ...]]:
    """Names of the modules whose code runs in each group of steps, the innermost, as they run.

    A module without a step, such as `nn.Identity`, is in the layer of the module that is
    registered before it in the same parent, or else of the first one there that has a step.
    """
    found = [dict.fromkeys(_innermost(flow, group)) for group in groups]
    for path, layer in _without_steps(model, found):
        found[layer][path] = None
    return [tuple(each) for each in found]


def _innermost(flow: DataFlow, group: Sequence[Node]) -> Iterator[str]:
    for step in group:
        path = flow.module_path(step)
        if path and path[-1].path:
            yield path[-1].path


def _without_steps(
    model: nn.Module, found: Sequence[dict[str, None]]
) -> Iterator[tuple[str, int]]:
    """Modules in which nothing of a step lies, and the layer of each."""
    where: dict[str, list[int]] = {"": [0]}
    for layer, paths in enumerate(found):
        for path in paths:
            parts = path.split(".")
            for end in range(1, len(parts) + 1):
                where.setdefault(".".join(parts[:end]), []).append(layer)
    for name, parent in model.named_modules():
        children = [f"{name}.{child}" if name else child for child, _ in parent.named_children()]
        beside = [where[child][0] for child in children if child in where]
        if name not in where:
            continue
        layer = beside[0] if beside else where[name][0]
        for child in children:
            if child in where:
                layer = where[child][-1]
            else:
                yield child, layer
