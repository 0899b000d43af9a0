"""Layers of a chain from the bytes and times of each layer and its optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn

from pipeplan.capture.layer_costs.layer_bytes import Carried, LayerBytes, SplitBytes
from pipeplan.capture.layer_costs.layer_run import FusedLayers
from pipeplan.capture.layer_costs.optimizer_cost import OptimizerCost
from pipeplan.chain import Layer, RidingTensor
from pipeplan.gradients import sum_of
from pipeplan.livebytes import dense, storage_bytes
from pipeplan.split_model import SplitModel
from pipeplan.task import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitTimes:
    """What a layer takes in a stage whose backward comes in two halves, in ns."""

    weight_ns: int | None = None
    """Of the second half: gradients of weights; None where it is never split, or cannot be."""
    input_ns: int | None = None
    """Of the first one; None: of a whole backward without the second."""
    forward_ns: int | None = None
    """None: of any forward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """All that was measured or estimated of one layer."""

    forward_ns: int
    backward_ns: int
    forward_light_ns: int
    split: SplitTimes = SplitTimes()
    size: LayerBytes
    step: OptimizerCost


def owned_parameters(model: SplitModel, task: Task) -> list[list[nn.Parameter]]:
    """Per layer the parameters whose bytes it counts.

    Where layers that share a parameter sit on one GPU, it counts in the first of them only;
    where they are synchronized, each has a copy.
    """
    if task.tied == "synchronize":
        return [list(layer.parameters()) for layer in model.layers]
    again = repeated_parameters(model)
    return [
        [parameter for parameter in layer.parameters() if parameter not in others]
        for layer, others in zip(model.layers, again, strict=True)
    ]


def repeated_parameters(model: SplitModel) -> list[set[nn.Parameter]]:
    """Per layer the parameters that an earlier layer has, too."""
    seen: set[nn.Parameter] = set()
    result = []
    for layer in model.layers:
        result.append({parameter for parameter in layer.parameters() if parameter in seen})
        seen.update(layer.parameters())
    return result


def stepped_parameters(model: SplitModel, task: Task) -> list[list[list[nn.Parameter]]]:
    """Per layer the parameters that one optimizer of a rank steps, for each of its optimizers.

    There is one for what a layer owns and one for its copies of what earlier layers own; layers
    that count as one have theirs each.
    """
    seen: set[nn.Parameter] = set()
    result = []
    for layer in model.layers:
        found = []
        for part in layer.parts if isinstance(layer, FusedLayers) else (layer,):
            mine = trainable_parameters(list(part.parameters()))
            found.append([parameter for parameter in mine if parameter not in seen])
            if task.tied == "synchronize":
                found.append([parameter for parameter in mine if parameter in seen])
            seen.update(mine)
        result.append([parameters for parameters in found if parameters])
    return result


def trainable_parameters(parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """Those that are trained: only these have gradients, versions and optimizer state."""
    return [parameter for parameter in parameters if parameter.requires_grad]


def chain_layers(model: SplitModel, costs: Sequence[LayerCost], task: Task) -> tuple[Layer, ...]:
    """The layers of the chain of `model`; `costs` has one entry per layer."""
    mine = owned_parameters(model, task)
    gradients = _gradients(model, task, mine)
    rides = riding_tensors([cost.size.carried for cost in costs])
    sizes = [cost.size for cost in costs]
    costs = [
        replace(cost, size=_holding(_apart(cost.size, before), before))
        for before, cost in zip((None, *sizes), costs, strict=False)
    ]
    return tuple(
        _layer(model, index, mine[index], gradients[index], cost).model_copy(
            update={"riding": rides[index]}
        )
        for index, cost in enumerate(costs)
    )


def _apart(size: LayerBytes, before: LayerBytes | None) -> LayerBytes:
    """A layer's bytes, such that at its input the larger of what two layers keep is enough.

    Of a boundary of several tensors the layer before may keep others than this one. The smaller
    part counts as what this layer keeps inside, but for inputs that the layer before keeps, too,
    and passes on: these count there.
    """
    if before is None:
        return size
    theirs = mine = 0
    rows = zip(
        size.carried.sizes, size.kept_inputs, before.kept_outputs, before.carried.passed,
        strict=False,
    )  # fmt: skip
    for each, own, out, passed in rows:
        theirs += each if out and not own else 0
        rides = passed is not None and before.kept_inputs[passed]
        mine += each if own and not out and not rides else 0
    more = min(theirs, mine)
    split = size.split and replace(size.split, saved=size.split.saved + more)
    return replace(size, saved=size.saved + more, split=split) if more else size


def _holding(size: LayerBytes, before: LayerBytes | None) -> LayerBytes:
    """A layer's bytes, whose forward holds all that it keeps, as a chain demands.

    A parameter that a layer returns is counted as its output, and takes no bytes beside states.
    """
    there = before.output if before else size.saved_input
    kept = max(size.saved_input, before.saved_output if before else 0) + size.saved_output
    least = kept - there - size.output
    return replace(size, forward_workspace=max(size.forward_workspace, least))


def riding_tensors(layers: Sequence[Carried]) -> list[tuple[RidingTensor, ...]]:
    """Of each layer, the tensors of its input that ride, from what layers do with their inputs.

    A tensor that comes out twice is none: then there is no telling which of the two goes on.
    """
    result: list[tuple[RidingTensor, ...]] = []
    came: list[int] = []
    """Places in the layer's input of what the layer before passes on."""
    for layer in layers:
        places = [place for place in layer.passed if place is not None]
        passed = {place for place in places if places.count(place) == 1}
        riders = [*came, *sorted(passed.difference(came))]
        result.append(
            tuple(
                RidingTensor(
                    size_bytes=layer.sizes[place], kept=layer.kept[place], passed=place in passed
                )
                for place in riders
            )
        )
        came = [layer.passed.index(place) for place in riders if place in passed]
    return result


def _gradients(
    model: SplitModel, task: Task, mine: Sequence[Sequence[nn.Parameter]]
) -> list[tuple[int, int]]:
    """Per layer the bytes of all gradients, and of those that may wait for other stages.

    Every layer that uses a shared parameter has a gradient of its own, which waits for the
    first layer's; the first one of synchronized layers has room for those of all others.
    Clipping and loss scaling make every gradient wait.
    """
    first: dict[nn.Parameter, int] = {}
    kept, waiting = [0] * len(mine), [0] * len(mine)
    for index, (own, known) in enumerate(zip(mine, repeated_parameters(model), strict=True)):
        for parameter in dict.fromkeys(trainable_parameters([*own, *known])):
            total = sum_of(parameter)
            size = total.nbytes if total is not None else 0
            kept[index] += size
            waiting[index] += size if task.updates_wait or parameter in known else 0
            if parameter in known and task.tied == "synchronize":
                kept[first[parameter]] += size
            first.setdefault(parameter, index)
    return list(zip(kept, waiting, strict=True))


def _layer(
    model: SplitModel,
    index: int,
    mine: Sequence[nn.Parameter],
    gradients: tuple[int, int],
    cost: LayerCost,
) -> Layer:
    layer, fqns, size = model.layers[index], model.fqns[index], cost.size
    weights = sum(parameter.nbytes for parameter in trainable_parameters(mine))
    frozen = sum(p.nbytes for p in mine if not p.requires_grad)
    constant = frozen + storage_bytes(layer.buffers())
    same = size.output_gradient == size.output
    halves = size.split or SplitBytes()
    return Layer(
        name=model.names[index],
        forward_ns=cost.forward_ns,
        forward_light_ns=cost.forward_light_ns,
        backward_ns=cost.backward_ns,
        optimizer_ns=cost.step.step_ns,
        weight_bytes=weights,
        gradient_bytes=gradients[0],
        waiting_gradient_bytes=gradients[1],
        optimizer_bytes=cost.step.state_bytes + constant,
        output_bytes=size.output,
        output_gradient_bytes=None if same else size.output_gradient,
        saved_input_bytes=size.saved_input,
        saved_bytes=size.saved,
        saved_output_bytes=size.saved_output,
        saved_passing_bytes=size.saved_passing,
        forward_workspace_bytes=size.forward_workspace,
        backward_workspace_bytes=size.backward_workspace,
        forward_light_workspace_bytes=size.light_workspace,
        optimizer_workspace_bytes=cost.step.workspace_bytes,
        buffer_bytes=sum(part.nbytes for buffer in layer.buffers() for part in dense(buffer)),
        frozen_bytes=frozen,
        backward_weight_ns=cost.split.weight_ns,
        backward_input_ns=cost.split.input_ns,
        forward_split_ns=cost.split.forward_ns,
        saved_for_weight_bytes=None if size.split is None else halves.saved,
        saved_input_for_weight_bytes=halves.saved_input,
        input_backward_workspace_bytes=halves.input_workspace,
        weight_backward_workspace_bytes=halves.weight_workspace,
        parameters=tuple(dict.fromkeys(fqns[local] for local, _ in layer.named_parameters())),
        modules=model.modules[index] if model.modules else (),
    )
