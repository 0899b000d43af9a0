"""One micro-batch through one layer alone, as a stage of that layer runs it in the runtime.

Nothing but autograd keeps the layer's input, output or gradients alive, so whoever watches the
storages (bytes) or the operations (times) meanwhile sees what a rank will hold and do.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipeplan.autograd_cut import Slot, enter_some, leave, run_backward
from pipeplan.capture.boundary_trace import alone, call_layer, check_loss
from pipeplan.layout import is_dense
from pipeplan.livebytes import key
from pipeplan.nested import LayerLoss, MicroBatch, layer_loss, mapped
from pipeplan.precision import casting
from pipeplan.split_model import SplitModel
from pipeplan.weight_gradients import WeightGradients

Loss = Callable[[Any, Any], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRun:
    """One layer with the data to run it on."""

    name: str
    layer: nn.Module
    inputs: tuple[Tensor, ...]
    differentiable: tuple[bool, ...]
    """Per input: whether a gradient is sent back for it."""
    fed: tuple[Tensor, ...] = ()
    """Tensors of the model's input that it gets behind its own, from the data."""
    loss: tuple[LayerLoss, Any] | None = None
    """For the last layer: the loss function and its target."""
    autocast: torch.dtype | None = None
    """What layer and loss run under."""
    compiled: bool = False
    """Whether layers are compiled: then operations do not show all bytes."""
    splits: bool = False
    """Whether its backward may be split: a stage may start with it, or before it, behind 0."""

    @property
    def trains(self) -> bool:
        """Whether it has weights that get gradients."""
        return any(parameter.requires_grad for parameter in self.layer.parameters())


def fed_tensors(model: SplitModel, layer: int, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """What `layer` (0-based) gets of the model's `inputs` behind its boundary."""
    return tuple(inputs[place] for place in model.fed_to(layer))


def layer_run(
    model: SplitModel,
    index: int,
    values: tuple[Tensor, ...],
    batch: MicroBatch,
    loss: Loss | None,
) -> LayerRun:
    """Layer `index` of `model` on `values`, which the layers before it gave.

    Args:
        model: the layers.
        index: 0-based.
        values: the boundary before the layer.
        batch: what else layers and loss are given.
        loss: of the task; used for the last layer only.
    """
    last = index == len(model.layers) - 1
    return LayerRun(
        name=model.names[index],
        layer=model.layers[index],
        inputs=values,
        differentiable=tuple(spec.differentiable for spec in model.boundaries[index]),
        fed=fed_tensors(model, index, batch.inputs),
        loss=(layer_loss(loss, model.returned), batch.target) if last else None,
        autocast=model.autocast,
        compiled=model.compile is not None,
        splits=index > 0 and not isinstance(model.layers[index], FusedLayers),
    )


class FusedLayers(nn.Module):
    """Layers in a row that count as one, as the layers of a stage do."""

    def __init__(
        self, layers: Sequence[nn.Module], width: int, fed: Sequence[tuple[int, ...]]
    ) -> None:
        """Puts `layers` in a row.

        Args:
            layers: called one after the other.
            width: number of tensors in the boundary before the first.
            fed: per layer, which of the tensors behind that boundary it gets behind its own.
        """
        super().__init__()
        self.parts = nn.ModuleList(layers)
        self.width = width
        self.fed = tuple(fed)

    def forward(self, *values: Tensor) -> Tensor | tuple[Tensor, ...]:
        """What the last layer returns."""
        value: Any = values[: self.width]
        for part, places in zip(self.parts, self.fed, strict=True):
            value = value if isinstance(value, tuple) else (value,)
            value = part(*value, *(values[self.width + place] for place in places))
        result: Tensor | tuple[Tensor, ...] = value
        return result


def _parts(run: LayerRun) -> list[tuple[nn.Module, tuple[int, ...]]]:
    """What is called one by one, since no caller's frame may keep a row's inner tensors alive.

    With each part come the places in `run.fed` of what it gets behind its own inputs.
    """
    if isinstance(run.layer, FusedLayers):
        return list(zip(run.layer.parts, run.layer.fed, strict=True))
    return [(run.layer, tuple(range(len(run.fed))))]


class WatchedStorages:
    """Storages of some tensors, watched without keeping them alive."""

    def __init__(self, tensors: Iterable[Tensor], without: WatchedStorages | None = None) -> None:
        found = {key(tensor): tensor.untyped_storage() for tensor in tensors}
        for storage in without.living() if without else ():
            found.pop(id(storage), None)
        self._found = [weakref.ref(storage) for storage in found.values()]

    def living(self) -> list[torch.UntypedStorage]:
        """Those that are still alive."""
        return [storage for reference in self._found if (storage := reference()) is not None]

    def alive(self) -> int:
        """Bytes of those that are still alive."""
        return sum(storage.nbytes() for storage in self.living())


class LayerPass:
    """Forward, then backward of one micro-batch; use once.

    Before `forward` it holds copies of the run's inputs, as if they had just arrived; between
    `forward` and `backward` it holds nothing but the root of the graph.
    """

    def __init__(self, run: LayerRun, *, split: bool = False, held: Collection[int] = ()) -> None:
        """Takes what to run.

        Args:
            run: the layer, and what it is run on.
            split: whether `backward` leaves gradients of weights for `weights`.
            held: places of inputs that stay alive until the end, as if others kept them, too.
        """
        self._run = run
        self._waiting = WeightGradients() if split else None
        self._entry, self._exit = Slot(), Slot()
        self._root: Tensor | None = None
        self._gradients: list[tuple[torch.Size, torch.dtype, torch.device]] = []
        self._arrived = [tensor.clone() for tensor in run.inputs]
        self._held = [self._arrived[place].untyped_storage() for place in held]
        self._places = [weakref.ref(tensor.untyped_storage()) for tensor in self._arrived]
        self.inputs = WatchedStorages(self._arrived)
        self.outputs = WatchedStorages(())
        """Storages behind the outputs that are no input's; known after `forward`."""
        self.output_bytes = 0
        """Size of all outputs; known after `forward`."""
        self._made: list[weakref.ref[torch.UntypedStorage]] = []
        self._passing: list[tuple[int, int]] = []
        self.passed: tuple[int | None, ...] = ()
        """By output: the place of the input that it is, with all of its storage; None: of none.

        Known after `forward`.
        """

    def forward(self) -> None:
        """Runs the layer, and the loss behind the last one.

        Raises:
            InputError: if the layer fails, or it or the loss returns the wrong kind of value.
        """
        value: Any = self._enter()
        target: Any = None
        parts = _parts(self._run)
        for index, (part, places) in enumerate(parts):
            if self._run.loss and index == len(parts) - 1:
                target = mapped(torch.clone, self._run.loss[1])
            value = (*value, *(self._run.fed[place].clone() for place in places))
            with self._waiting.deferring(part) if self._waiting else nullcontext():
                value = call_layer(self._run.name, part, value, self._run.autocast)
        if self._run.loss:
            with casting(self._run.autocast, value[0].device):
                value = (check_loss(self._run.loss[0](alone(value), target)),)
        del target
        roots = [output for output in value if output.requires_grad]
        self._root = leave(self._exit, roots) if roots else None
        self.outputs = WatchedStorages(value, without=self.inputs)
        self.output_bytes = sum(output.nbytes for output in value)
        self._made = [weakref.ref(output.untyped_storage()) for output in value]
        self._passing = [(key(out), out.nbytes) for out in value if is_dense(out)]
        if not self._run.loss:  # nobody takes a loss that is its input
            self.passed = tuple(map(self._place, value))
        self._gradients = [(root.shape, root.dtype, root.device) for root in roots]

    def passing(self) -> int:
        """Bytes of outputs that lie in storages of the input that are alive now.

        One with holes is copied before it is sent, so it is none.
        """
        inputs = {id(storage) for storage in self.inputs.living()}
        return sum(size for name, size in self._passing if name in inputs)

    def kept(self) -> tuple[bool, ...]:
        """By input: whether its storage is alive now."""
        return tuple(storage() is not None for storage in self._places)

    def kept_outputs(self) -> tuple[bool, ...]:
        """By output: whether its storage is alive now, and no input's."""
        inputs = {id(storage) for storage in self.inputs.living()}
        found = (storage() for storage in self._made)
        return tuple(storage is not None and id(storage) not in inputs for storage in found)

    def _place(self, output: Tensor) -> int | None:
        """The place of the input that an output is; one with holes is copied before it is sent."""
        if not output.nbytes or not is_dense(output):
            return None
        storage = output.untyped_storage()
        if storage.nbytes() != output.nbytes:
            return None
        found = (place for place, each in enumerate(self._places) if each() is storage)
        return next(found, None)

    def receive_gradients(self, given: list[Tensor] | None = None) -> int:
        """Takes gradients of the outputs, as if they had just arrived; returns their bytes.

        Args:
            given: those to take; emptied, so that the caller keeps nothing alive. Otherwise made.
        """
        arrived = given or [
            torch.ones(shape, dtype=dtype, device=device)
            for shape, dtype, device in self._gradients
        ]
        self._exit.put(arrived)
        size = sum(gradient.nbytes for gradient in arrived)
        arrived.clear()
        return size

    def drawn_gradients(self) -> list[Tensor]:
        """Gradients of the outputs, of random numbers."""
        return [
            torch.randn(shape, device=device).to(dtype) for shape, dtype, device in self._gradients
        ]

    def backward(self) -> list[Tensor]:
        """Gradients of the differentiable inputs; parameters' gradients accumulate."""
        root, self._root = self._root, None
        if root is not None:
            with self._waiting.activations() if self._waiting else nullcontext():
                run_backward(root)
        taken = self._entry.take()
        if taken is not None:
            return taken
        pairs = zip(self._run.inputs, self._run.differentiable, strict=True)
        return [torch.zeros_like(value) for value, flag in pairs if flag]

    def weights(self) -> None:
        """What `backward` left."""
        if self._waiting:
            self._waiting.weights()

    def _enter(self) -> tuple[Tensor, ...]:
        """The inputs, the differentiable ones as outputs of the graph's first node."""
        arrived, self._arrived = self._arrived, []
        return enter_some(self._entry, arrived, self._run.differentiable)
