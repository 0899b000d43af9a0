"""The layers of one build of a model with the tensors of the next one: no second export."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, fx, nn

from pipeplan.capture.eager_modules.eager_operation import output_tensors
from pipeplan.capture.partition.graph_layers import GraphLayer


def rebound(layers: Sequence[nn.Module], before: nn.Module, after: nn.Module) -> bool:
    """Put the tensors of `after` in the places of those of `before` in `layers`.

    The layers must be graphs alone: a module that stays eager belongs to the model it came from.
    Constants of a graph, which no model holds, stay. So `after` must be made by the same code,
    from the same random state.

    Args:
        layers: of `before`; changed where the answer is True.
        before: the model that was cut.
        after: the same model, made anew.

    Returns:
        Whether it was done: modules and tensors have the same names, kinds and shapes.
    """
    if not all(isinstance(layer, GraphLayer) for layer in layers):
        return False
    parts = [part for layer in layers for part in layer.modules()]
    if any(_is_eager(part) for part in parts) or _kinds(before) != _kinds(after):
        return False
    old, new = _states(before), _states(after)
    twins = {id(tensor): new[name] for name, tensor in old.items() if name in new}
    alike = old.keys() == new.keys() and all(
        twins[id(tensor)] is new[name] and _looks(tensor) == _looks(new[name])
        for name, tensor in old.items()
    )
    if not alike or len(set(map(id, new.values()))) < len(twins):  # tied only there
        return False
    for part in parts:
        for slots in (part._parameters, part._buffers):  # noqa: SLF001
            for name, tensor in slots.items():
                if tensor is not None and id(tensor) in twins:
                    slots[name] = twins[id(tensor)]  # type: ignore[assignment]
    return True


def _is_eager(part: nn.Module) -> bool:
    """Whether a graph calls a module of the model."""
    return isinstance(part, fx.GraphModule) and any(
        node.target is output_tensors for node in part.graph.nodes
    )


def _kinds(model: nn.Module) -> list[tuple[str, type, bool]]:
    return [(name, type(part), part.training) for name, part in model.named_modules()]


def _states(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers under all of their names: tied ones have several."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def _looks(tensor: Tensor) -> tuple[object, ...]:
    device, trains = tensor.device, tensor.requires_grad
    return type(tensor), tensor.shape, tensor.dtype, device, tensor.stride(), trains
