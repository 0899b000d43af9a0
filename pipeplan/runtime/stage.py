"""One stage: forward and backward of its layers for one micro-batch, and what lives in between.

Between F and B a stage keeps a root of zero bytes and, behind it, what autograd saved; nothing
else (docs/model.md, M2). The input is given up as soon as the first layer has run, each
inner boundary as soon as the next layer has run, the output as soon as it is handed on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pipeplan.boundary import Slot, enter, leave, run_backward
from pipeplan.errors import InputError
from pipeplan.runtime.holders import Held
from pipeplan.runtime.seeds import seed_layer
from pipeplan.task import TensorSpec

Loss = Callable[[Any, Any], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpec:
    """What a stage is made of; `loss` only for the last stage of the chain."""

    index: int
    first_layer: int
    """0-based index in the chain: part of every random seed."""
    layers: tuple[nn.Module, ...]
    fqns: tuple[dict[str, str], ...]
    """Per layer: name of a parameter or buffer in the layer -> its name in the user's model."""
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    """Empty for the last stage, whose output is the loss."""
    loss: Loss | None
    seed: int
    scale: Callable[[int], float] = lambda _: 1.0
    """Step -> loss scale; used by the last stage."""
    fed: Mapping[int, Callable[[int], list[Tensor]]] = field(default_factory=dict)
    """Index in `layers` -> micro-batch -> what that layer gets behind its boundary."""


@dataclass(slots=True)
class _Graph:
    """What waits for the backward of one micro-batch."""

    root: Tensor | None
    entry: Slot
    exit: Slot


class Stage:
    """Runs the layers of one stage; tensors pass through, none stays in a Python frame."""

    def __init__(self, spec: StageSpec, microbatches: int, held: Held) -> None:
        """Takes what the stage is made of.

        Args:
            spec: layers and boundaries.
            microbatches: per step.
            held: its parameters.
        """
        self.spec = spec
        self.weights = held.weights
        self.units = held.units
        self.leaves = held.leaves
        self._microbatches = microbatches
        self._graphs: dict[int, _Graph] = {}
        self.names: dict[nn.Parameter, str] = {
            parameter: fqns[local]
            for layer, fqns in zip(spec.layers, spec.fqns, strict=True)
            for local, parameter in layer.named_parameters()
        }
        """Name in the user's model of each parameter, as the optimizer knows it."""

    @property
    def in_flight(self) -> int:
        """Micro-batches between their forward and their backward."""
        return len(self._graphs)

    def state(self) -> dict[str, Tensor]:
        """Newest parameters and all buffers, by name in the user's model; not copied."""
        buffers = {
            fqns[local]: buffer
            for layer, fqns in zip(self.spec.layers, self.spec.fqns, strict=True)
            for local, buffer in layer.named_buffers()
        }
        return {name: parameter.detach() for parameter, name in self.names.items()} | buffers

    def forward(
        self, microbatch: int, inputs: list[Tensor], target: Callable[[int], Tensor]
    ) -> list[Tensor]:
        """Outputs of the stage for `microbatch`, cut off the graph; the last stage returns [loss].

        Args:
            microbatch: global number.
            inputs: the boundary before the stage; emptied, so that the caller keeps nothing alive.
            target: micro-batch -> what the loss compares with; called by the last stage only,
                just before its last layer.

        Raises:
            InputError: if the loss is no scalar, or a layer returns something unexpected.
        """
        for leaves in self.leaves:
            leaves.begin_graph(microbatch // self._microbatches)
        graph = _Graph(None, Slot(), Slot())
        outputs = self._run_layers(microbatch, self._enter(graph.entry, inputs), target)
        roots = [tensor for tensor in outputs if tensor.requires_grad]
        if roots:
            graph.root = leave(graph.exit, self._differentiable(outputs))
        self._graphs[microbatch] = graph
        return [tensor.detach() for tensor in outputs]

    def backward(self, microbatch: int, gradients: list[Tensor]) -> list[Tensor]:
        """Gradients of the stage's differentiable inputs; parameters' gradients accumulate.

        Args:
            microbatch: global number.
            gradients: of the differentiable outputs; emptied, so that the caller keeps nothing
                alive. Ignored by the last stage, which starts from its loss.
        """
        step = microbatch // self._microbatches
        for leaves in self.leaves:
            leaves.bind(step)
        graph = self._graphs.pop(microbatch)
        if graph.root is not None:
            if self.spec.loss:
                gradients.append(graph.root.new_full((), self.spec.scale(step)))
            graph.exit.put(gradients)
            gradients.clear()
            run_backward(graph.root)
        for leaves in self.leaves:
            leaves.end_graph(step)
        arrived = graph.entry.take()
        if arrived is not None:
            return arrived
        return [empty(spec).zero_() for spec in gradient_specs(self.spec.inputs, self.spec.index)]

    def evaluate(
        self, microbatch: int, inputs: list[Tensor], target: Callable[[int], Tensor]
    ) -> list[Tensor]:
        """Outputs of the newest weights, without a graph; arguments as in `forward`."""
        for leaves in self.leaves:
            leaves.bind_newest()
        boundary = tuple(inputs)
        inputs.clear()
        with torch.no_grad():
            return list(self._run_layers(microbatch, boundary, target))

    def _enter(self, slot: Slot, inputs: list[Tensor]) -> tuple[Tensor, ...]:
        flags = [spec.differentiable and self.spec.index > 0 for spec in self.spec.inputs]
        chosen = [tensor for tensor, flag in zip(inputs, flags, strict=True) if flag]
        entered = iter(enter(slot, chosen) if chosen else ())
        result = tuple(
            next(entered) if flag else tensor for tensor, flag in zip(inputs, flags, strict=True)
        )
        inputs.clear()
        return result

    def _run_layers(
        self, microbatch: int, boundary: tuple[Tensor, ...], target: Callable[[int], Tensor]
    ) -> tuple[Tensor, ...]:
        """`value` is the only name for what flows, so each tensor dies when it is replaced."""
        value: Any = boundary
        del boundary
        last = len(self.spec.layers) - 1
        for index, module in enumerate(self.spec.layers):
            wanted = target(microbatch) if self.spec.loss and index == last else None
            value = value if isinstance(value, tuple) else (value,)
            if index in self.spec.fed:
                value = (*value, *self.spec.fed[index](microbatch))
            seed_layer(self.spec.seed, self.spec.first_layer + index, microbatch)
            value = module(*value)
        if self.spec.loss is None:
            return value if isinstance(value, tuple) else (value,)
        value = self.spec.loss(value, wanted)
        if not isinstance(value, Tensor) or value.dim() != 0:
            got = f"shape {list(value.shape)}" if isinstance(value, Tensor) else repr(type(value))
            raise InputError(
                f"task.loss: got {got} for micro-batch {microbatch}, need a scalar tensor,"
                " the mean over the micro-batch"
            )
        return (value,)

    def _differentiable(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        if self.spec.loss:
            return list(outputs)
        pairs = zip(outputs, self.spec.outputs, strict=True)
        return [tensor for tensor, spec in pairs if spec.differentiable]


def gradient_specs(specs: Sequence[TensorSpec], stage: int) -> tuple[TensorSpec, ...]:
    """What flows back through the boundary `specs` before `stage`: nothing before the first."""
    return tuple(spec for spec in specs if spec.differentiable and stage > 0)


def empty(spec: TensorSpec) -> Tensor:
    """An uninitialised tensor of this shape and dtype."""
    return torch.empty(spec.shape, dtype=getattr(torch, spec.dtype.removeprefix("torch.")))
