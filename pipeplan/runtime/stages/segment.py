"""A segment of a stage's layers: stored for its backward, or checkpointed (computed again in it).

A checkpointed segment runs again as segments of its own, which may be checkpointed in turn.
Between forward and backward a stored segment holds a root of zero bytes and, behind it, what
autograd saved, which may leave for the host meanwhile (`saved_tensors`); a checkpointed one holds
its input and nothing else (docs/reference/model.md, M2 and V2). An input is given up as soon as
the first layer has run on it for its backward, each boundary inside as soon as the next layer has
run, the output as soon as it is handed on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from pipeplan.autograd_cut import Slot, enter_some, leave, run_backward
from pipeplan.errors import InputError
from pipeplan.plan import LayerRanges
from pipeplan.precision import casting
from pipeplan.runtime.stages.module_buffers import ModuleBuffers, Values, put_back
from pipeplan.runtime.stages.random_state import seed_layer
from pipeplan.runtime.stages.saved_tensors import SavedTensor, SavedTensors, versions
from pipeplan.runtime.stages.second_forward import SecondForward
from pipeplan.runtime.transport.endpoints import CPU, empty
from pipeplan.split_model import TensorSpec
from pipeplan.weight_gradients import WeightGradients

Loss = Callable[[Any, Any], Tensor]
Target = Callable[[int], Any]
"""Micro-batch -> what the loss compares with."""
Heard = Callable[[Any, Any], None]
"""Hears what the loss is given: output, and what it compares with."""


@dataclass(frozen=True, slots=True)
class Fed:
    """What a layer gets from the data behind its boundary."""

    specs: tuple[TensorSpec, ...]
    fetch: Callable[[int], list[Tensor]]
    """Micro-batch -> the tensors, fresh ones."""


_NOTHING_SAVED = SavedTensors()


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentSpec:
    """What a segment is made of; `loss` only for the last one of the chain."""

    first_layer: int
    """0-based index in the chain: part of every random seed."""
    layers: tuple[nn.Module, ...]
    inputs: tuple[TensorSpec, ...]
    """The boundary before it."""
    entered: tuple[bool, ...]
    """Which of its tensors get a gradient back."""
    left: tuple[bool, ...]
    """Of those behind it: which give a gradient; (True,) where there is a loss."""
    loss: Loss | None
    seed: int | None
    """Of all random numbers; None lets layers draw from torch's generator as it is."""
    number: Callable[[int], int] = lambda microbatch: microbatch
    """Micro-batch -> its number in the data: part of every random seed."""
    fed: Mapping[int, Fed] = field(default_factory=dict)
    """Index in `layers` -> what that layer gets behind its boundary."""
    device: torch.device = CPU
    """Where its tensors are."""
    offload: LayerRanges = ()
    """First and last index in `layers` of each run of which a `SavedTensors` is kept."""
    offload_input: bool = False
    """Whether that keeps what is saved of the segment's input as well."""
    lends_output: bool = False
    """Whether what it saves of its output leaves with the input of the next stage."""
    autocast: torch.dtype | None = None
    """What layers and loss run under; None leaves the setting as it is."""
    split_backward: bool = False
    """Whether gradients of weights wait for `StoredSegment.weight_backward`."""


@dataclass(slots=True)
class _SegmentGraph:
    """What waits for the backward of one micro-batch."""

    root: Tensor | None
    entry: Slot
    exit: Slot
    saved: SavedTensors
    waiting: WeightGradients | None


class StoredSegment:
    """Layers whose graph is kept; tensors pass through, none stays in a Python frame."""

    def __init__(self, spec: SegmentSpec) -> None:
        self.spec = spec
        self._graphs: dict[int, _SegmentGraph] = {}
        self._waiting: dict[int, WeightGradients] = {}

    def forward(self, microbatch: int, inputs: list[Tensor], target: Target) -> list[Tensor]:
        """Outputs for `microbatch`, cut off the graph; the last segment returns [loss].

        Args:
            microbatch: global number.
            inputs: the boundary before it; emptied, so that the caller keeps nothing alive.
            target: called by the last segment only, just before its last layer.

        Raises:
            InputError: if the loss is no scalar, or an output has a graph though none had at
                the split: no gradient would come back for it.
        """
        saved = SavedTensors(
            self.spec.offload,
            self.spec.first_layer,
            own_input=self.spec.offload_input,
            lending=len(self.spec.layers) - 1 if self.spec.lends_output else None,
        )
        waiting = WeightGradients() if self.spec.split_backward else None
        graph = _SegmentGraph(None, Slot(), Slot(), saved, waiting)
        outputs = self._run_layers(
            microbatch, self._enter(graph.entry, inputs), target, saved, waiting
        )
        self._check_left(outputs)
        if any(tensor.requires_grad for tensor in outputs):
            graph.root = leave(graph.exit, self._differentiable(outputs))
        self._graphs[microbatch] = graph
        return [tensor.detach() for tensor in outputs]

    def backward(self, microbatch: int, gradients: list[Tensor], scale: float) -> list[Tensor]:
        """Gradients of the entered inputs, zeros where none arrives; parameters' accumulate.

        Where the backward is split, those of parameters wait for `weight_backward`.

        Args:
            microbatch: global number.
            gradients: of the outputs left; emptied, so that the caller keeps nothing alive.
            scale: what the loss counts, where the segment has one; `gradients` are ignored then.
        """
        graph = self._graphs.pop(microbatch)
        if graph.root is not None:
            if self.spec.loss:
                gradients.append(graph.root.new_full((), scale))
            graph.exit.put(gradients)
            gradients.clear()
            with graph.waiting.activations() if graph.waiting else nullcontext():
                run_backward(graph.root)
        if graph.waiting:
            self._waiting[microbatch] = graph.waiting
        arrived = graph.entry.take()
        if arrived is not None:
            return arrived
        pairs = zip(self.spec.inputs, self.spec.entered, strict=True)
        return [empty(spec, self.spec.device).zero_() for spec, entered in pairs if entered]

    def weight_backward(self, microbatch: int) -> None:
        """The gradients of parameters that `backward` left accumulate."""
        self._waiting.pop(microbatch).weights()

    def saved(self, microbatch: int) -> SavedTensors:
        """What autograd saved in the runs that may be offloaded."""
        return self._graphs[microbatch].saved

    def evaluate(
        self,
        microbatch: int,
        inputs: list[Tensor],
        target: Target,
        heard: Heard | None = None,
    ) -> list[Tensor]:
        """Outputs without a graph; arguments as in `forward`; tells `heard` before the loss."""
        boundary = tuple(inputs)
        inputs.clear()
        with torch.no_grad():
            return list(self._run_layers(microbatch, boundary, target, heard=heard))

    def _enter(self, slot: Slot, inputs: list[Tensor]) -> tuple[Tensor, ...]:
        result = enter_some(slot, inputs, self.spec.entered)
        inputs.clear()
        return result

    def _run_layers(
        self,
        microbatch: int,
        boundary: tuple[Tensor, ...],
        target: Target,
        saved: SavedTensors = _NOTHING_SAVED,
        waiting: WeightGradients | None = None,
        heard: Heard | None = None,
    ) -> tuple[Tensor, ...]:
        """`value` is the only name for what flows, so each tensor dies when it is replaced."""
        value: Any = boundary
        del boundary
        for index, module in enumerate(self.spec.layers):
            wanted = target(microbatch) if self._is_loss(index) else None
            saving = saved.layer(index, value)
            if index in self.spec.fed:
                value = (*value, *self.spec.fed[index].fetch(microbatch))
            if self.spec.seed is not None:
                number = self.spec.number(microbatch)
                layer = self.spec.first_layer + index
                seed_layer(self.spec.seed, layer, number, self.spec.device)
            with saving:
                deferring = waiting.deferring(module) if waiting else nullcontext()
                with casting(self.spec.autocast, self.spec.device), deferring:
                    value = module(*value)
                if self._is_loss(index):
                    with casting(self.spec.autocast, self.spec.device):
                        if heard is not None:
                            heard(value, wanted)
                        value = self._loss(microbatch, value, wanted)
            value = value if isinstance(value, tuple) else (value,)
            saved.made(index, value)
        result: tuple[Tensor, ...] = value
        return result

    def _check_left(self, outputs: Sequence[Tensor]) -> None:
        for number, (tensor, flag) in enumerate(zip(outputs, self.spec.left, strict=True)):
            if tensor.requires_grad and not flag:
                layer = self.spec.first_layer + len(self.spec.layers) - 1
                kind = type(self.spec.layers[-1]).__name__
                raise InputError(
                    f"task: layer {layer} ({kind}): output {number}: got one with a gradient,"
                    " need none, as when the model was split: nothing"
                    " would come back for it. Let the layer return the same kind in every forward:"
                    " multiply by a buffer that is 0 at first in place of .detach()."
                )

    def _is_loss(self, index: int) -> bool:
        """Whether the loss comes behind layer `index`."""
        return self.spec.loss is not None and index == len(self.spec.layers) - 1

    def _loss(self, microbatch: int, output: Any, wanted: Any) -> Tensor:
        assert self.spec.loss is not None
        value = self.spec.loss(output, wanted)
        if not isinstance(value, Tensor) or value.dim() != 0:
            got = f"shape {list(value.shape)}" if isinstance(value, Tensor) else repr(type(value))
            raise InputError(
                f"task.loss: got {got} for micro-batch {microbatch}, need a scalar tensor,"
                " the mean over the micro-batch"
            )
        return value

    def _differentiable(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        return [tensor for tensor, flag in zip(outputs, self.spec.left, strict=True) if flag]


@dataclass(slots=True)
class _Checkpoint:
    """What one micro-batch is computed again from."""

    inputs: list[SavedTensor]
    saved: SavedTensors
    target: Target
    buffers: Values

    def taken(self) -> list[Tensor]:
        """The boundary, of which nothing is kept here any more.

        Raises:
            InputError: if it was written to since the first forward.
        """
        for each in self.inputs:
            if each.written:
                raise InputError(
                    f"task: layer {each.layer}: its input, from which it is computed again for the"
                    " backward, was changed in place by a later layer, or by the data of a later"
                    " micro-batch: need it as it was. Make the operation out of place, or plan"
                    " without --recompute."
                )
        found = [each.tensor() for each in self.inputs]
        self.inputs.clear()
        return found


class CheckpointedSegment(StoredSegment):
    """Layers that keep only their input and are computed again just before their backward."""

    def __init__(self, spec: SegmentSpec, again: Sequence[StoredSegment]) -> None:
        """Takes what the segment is made of.

        Args:
            spec: all its layers.
            again: the segments that they are when they are computed again.
        """
        super().__init__(spec)
        self._again = tuple(again)
        self._buffers = ModuleBuffers(spec.layers, self._try)
        self._second = SecondForward(_told(spec))
        self._checkpoints: dict[int, _Checkpoint] = {}

    def forward(self, microbatch: int, inputs: list[Tensor], target: Target) -> list[Tensor]:
        """As `StoredSegment.forward`, without a graph.

        Raises:
            InputError: if a layer works in place on the input that must stay as it is.
        """
        kept = list(inputs)
        inputs.clear()
        before, buffers = versions(kept), self._buffers.before()
        with torch.no_grad():
            outputs = self._run_layers(microbatch, tuple(kept), target)
        if before != versions(kept):
            raise InputError(
                f"task: layer {self.spec.first_layer}: works in place on its input, which is kept"
                " to compute the layer again. Make the operation out of place."
            )
        saved = SavedTensors(first_layer=self.spec.first_layer, own_input=self.spec.offload_input)
        self._checkpoints[microbatch] = _Checkpoint(
            saved.holding(kept), saved, target, self._buffers.kept(buffers)
        )
        self._second.made(microbatch, outputs)
        return list(outputs)

    def backward(self, microbatch: int, gradients: list[Tensor], scale: float) -> list[Tensor]:
        """As `StoredSegment.backward`, after a forward with the same random draws and buffers.

        Raises:
            InputError: if that gives other outputs than the first one, or the input it starts
                from was written to.
        """
        checkpoint = self._checkpoints.pop(microbatch)
        value = checkpoint.taken()
        now = self._buffers.turn_back(checkpoint.buffers)
        for segment in self._again:
            value = segment.forward(microbatch, value, checkpoint.target)
        self._second.check(microbatch, value)
        del value
        now = self._buffers.settle(now)
        for segment in reversed(self._again):
            gradients = segment.backward(microbatch, gradients, scale)
        put_back(now)
        return gradients

    def weight_backward(self, microbatch: int) -> None:
        """See `StoredSegment.weight_backward`."""
        for segment in reversed(self._again):
            segment.weight_backward(microbatch)

    def saved(self, microbatch: int) -> SavedTensors:
        """Its input, where that may be offloaded."""
        return self._checkpoints[microbatch].saved

    def _try(self, layers: Sequence[nn.Module]) -> list[Tensor]:
        """What `layers` return for some boundary; torch's generators stay as they are."""
        spec, cuda = self.spec, self.spec.device.type == "cuda"
        with torch.random.fork_rng([spec.device] if cuda else []):
            seed_layer(0, spec.first_layer, 0, spec.device)
            boundary = tuple(some(each, spec.device) for each in spec.inputs)
            fed = {index: _made_up(each, spec.device) for index, each in spec.fed.items()}
            tried = StoredSegment(replace(spec, layers=tuple(layers), loss=None, seed=0, fed=fed))
            return tried.evaluate(0, list(boundary), _no_target)


def _told(spec: SegmentSpec) -> str:
    """Its layers, for messages."""
    kinds = ", ".join(type(layer).__name__ for layer in spec.layers)
    return f"layers {spec.first_layer} to {spec.first_layer + len(spec.layers) - 1} ({kinds})"


def _no_target(microbatch: int) -> Tensor:
    raise NotImplementedError  # there is no loss


def _made_up(fed: Fed, device: torch.device) -> Fed:
    """`fed` without data, which are for the run alone."""
    return Fed(fed.specs, lambda _: [some(each, device) for each in fed.specs])


def some(spec: TensorSpec, device: torch.device) -> Tensor:
    """A tensor of this kind: random numbers, or zeros, which any index may be."""
    blank = empty(spec, device)
    return blank.normal_() if blank.is_floating_point() else blank.zero_()
