"""From what was found about each layer to the layers of a chain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from pipeplan.capture.layer_bytes import LayerBytes
from pipeplan.capture.optimizer_cost import OptimizerCost
from pipeplan.chain import Layer
from pipeplan.livebytes import storage_bytes
from pipeplan.task import SplitModel


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """All that was measured or estimated of one layer."""

    forward_ns: int
    backward_ns: int
    size: LayerBytes
    step: OptimizerCost


def owned(model: SplitModel) -> list[list[nn.Parameter]]:
    """Per layer the parameters whose bytes it counts: a tied one counts in its first layer only.

    Layers that share a parameter sit on one GPU, which holds it once.
    """
    seen: set[int] = set()
    result = []
    for layer in model.layers:
        mine = [parameter for parameter in layer.parameters() if id(parameter) not in seen]
        seen.update(map(id, mine))
        result.append(mine)
    return result


def trainable(parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """Those that are trained: only these have gradients, versions and optimizer state."""
    return [parameter for parameter in parameters if parameter.requires_grad]


def chain_layers(model: SplitModel, costs: Sequence[LayerCost]) -> tuple[Layer, ...]:
    """The layers of the chain of `model`; `costs` has one entry per layer."""
    mine = owned(model)
    return tuple(_layer(model, index, mine[index], cost) for index, cost in enumerate(costs))


def _layer(model: SplitModel, index: int, mine: Sequence[nn.Parameter], cost: LayerCost) -> Layer:
    layer, fqns, size = model.layers[index], model.fqns[index], cost.size
    trained = trainable(mine)
    weights = sum(parameter.nbytes for parameter in trained)
    gradients = sum(p.grad.nbytes for p in trained if p.grad is not None)
    frozen = sum(p.nbytes for p in mine if not p.requires_grad)
    constant = frozen + storage_bytes(layer.buffers())
    same = size.output_gradient == size.output
    return Layer(
        name=model.names[index],
        forward_ns=cost.forward_ns,
        backward_ns=cost.backward_ns,
        optimizer_ns=cost.step.step_ns,
        weight_bytes=weights,
        gradient_bytes=gradients,
        optimizer_bytes=cost.step.state_bytes + constant,
        output_bytes=size.output,
        output_gradient_bytes=None if same else size.output_gradient,
        saved_input_bytes=size.saved_input,
        saved_bytes=size.saved,
        saved_output_bytes=size.saved_output,
        forward_workspace_bytes=size.forward_workspace,
        backward_workspace_bytes=size.backward_workspace,
        optimizer_workspace_bytes=cost.step.workspace_bytes,
        parameters=tuple(dict.fromkeys(fqns[local] for local, _ in layer.named_parameters())),
    )
