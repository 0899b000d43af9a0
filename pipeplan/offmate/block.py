"""A layer as a block of a step: its forward and backward, and the storages that it keeps.

What a block keeps stays until the step's program gives it up, though autograd would let go of it
earlier: so the bytes behind each instruction are those that the judge counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipeplan.capture.user_model.module_attributes import held_tensors
from pipeplan.errors import InputError
from pipeplan.livebytes import key, storages
from pipeplan.nested import MicroBatch, layer_loss
from pipeplan.rematerialized.states import ForwardStates
from pipeplan.runtime.stages.saved_tensors import SavedStorage, SavedTensors
from pipeplan.runtime.stages.segment import Fed, SegmentSpec, StoredSegment
from pipeplan.split_model import SplitModel
from pipeplan.task import Task


class StepData:
    """The micro-batch of the step that runs."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._batch: MicroBatch | None = None

    def load(self, number: int) -> None:
        """Takes micro-batch `number` of the task."""
        self._batch = MicroBatch.of(self._task, number)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All of it."""
        assert self._batch is not None
        return self._batch.tensors

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """Of the model."""
        assert self._batch is not None
        return self._batch.inputs

    def target(self, _: int) -> Any:
        """What the loss compares with."""
        assert self._batch is not None
        return self._batch.target


class LayerBlock:
    """One layer; the last one with the loss."""

    def __init__(self, task: Task, split: SplitModel, index: int, data: StepData) -> None:
        self.index = index
        self.layer: nn.Module = split.layers[index]
        self.kept: list[SavedStorage] = []
        """What stays of the forward for the backward, and belongs to nobody else."""
        self.keeps_output = False
        """Whether the output is among what autograd saved."""
        self._names = split.fqns[index]
        self._data = data
        self._segment = StoredSegment(_spec(task, split, index, data))

    def forward(
        self, inputs: Sequence[Tensor], states: ForwardStates, *, keep: bool
    ) -> list[Tensor]:
        """The outputs, in storages of their own; with `keep` the backward needs no other run."""
        fixed = self._fixed()
        if not keep:
            with states.of(self.index):
                found = self._segment.evaluate(0, list(inputs), self._data.target)
            return _apart(found, [*inputs, *fixed])
        with states.of(self.index):
            found, saved = self._taped(inputs)
        fixed += self._fixed()  # a layer may have made a table that it keeps
        outputs = _apart(found, [*inputs, *fixed])
        saved.made(0, outputs)
        self.keeps_output = saved.keeps(outputs)
        self.kept = saved.kept(fixed)
        return outputs

    def backward(
        self,
        inputs: Sequence[Tensor],
        gradients: Sequence[Tensor],
        states: ForwardStates,
        *,
        again: bool,
    ) -> list[Tensor]:
        """Gradients of the inputs; those of parameters are new ones, with bytes of their own.

        Args:
            inputs: of the forward.
            gradients: of the outputs.
            states: random numbers of the forward.
            again: whether the forward has kept nothing, and runs again.
        """
        if again:
            with states.of(self.index):
                self._taped(inputs)
        parameters = [each for each in self.layer.parameters() if each.requires_grad]
        earlier = _taken(parameters)
        found = self._segment.backward(0, list(gradients), 1.0)
        made: list[Tensor] = []
        for parameter, before in zip(parameters, earlier, strict=True):
            if parameter.grad is None:
                continue
            self._check_dense(parameter, parameter.grad)
            others = [*inputs, *gradients, *made]
            (parameter.grad,) = _apart([parameter.grad], others, whole=True)
            made.append(parameter.grad)
            if before is not None:
                # Of a later block that uses it, too: autograd adds in this order.
                parameter.grad += before
        return _apart(found, [*inputs, *gradients, *made])

    def _check_dense(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        if gradient.layout is not torch.strided:
            local = next(n for n, each in self.layer.named_parameters() if each is parameter)
            raise InputError(
                f"task: parameter {self._names[local]}: got a gradient of layout"
                f" {gradient.layout}, need a dense one, which has as many bytes in each step."
                " Leave sparse=True out."
            )

    def _fixed(self) -> list[Tensor]:
        """What is not the block's to give up."""
        return [*held_tensors([self.layer]), *self._data.tensors]

    def _taped(self, inputs: Sequence[Tensor]) -> tuple[list[Tensor], SavedTensors]:
        """The outputs, and what autograd saved for their backward."""
        saved = SavedTensors(runs=((0, 0),), first_layer=self.index)
        with torch.enable_grad(), saved.layer(0, inputs):
            return self._segment.forward(0, list(inputs), self._data.target), saved


def _spec(task: Task, split: SplitModel, index: int, data: StepData) -> SegmentSpec:
    last = index == len(split.layers) - 1
    places = split.fed_to(index)
    specs = tuple(split.input_specs[place] for place in places)
    fed = {0: Fed(specs, lambda _: [data.inputs[place] for place in places])} if places else {}
    behind = () if last else split.boundaries[index + 1]
    return SegmentSpec(
        first_layer=index,
        layers=(split.layers[index],),
        inputs=split.boundaries[index],
        entered=tuple(each.differentiable and index > 0 for each in split.boundaries[index]),
        left=(True,) if last else tuple(each.differentiable for each in behind),
        loss=layer_loss(task.loss, split.returned) if last else None,
        seed=None,
        fed=fed,
        autocast=split.autocast,
    )


def _apart(
    tensors: Sequence[Tensor], others: Sequence[Tensor], whole: bool = False
) -> list[Tensor]:
    """`tensors`, copied where their storage is one of `others`.

    Args:
        tensors: to be given up on their own.
        others: that may be given up before.
        whole: whether each must fill its storage.
    """
    taken = storages(others)
    return [
        each.clone() if key(each) in taken or (whole and _is_part(each)) else each
        for each in tensors
    ]


def _taken(parameters: Sequence[nn.Parameter]) -> list[Tensor | None]:
    """The gradients of `parameters`, which have none any more."""
    found = [each.grad for each in parameters]
    for each in parameters:
        each.grad = None
    return found


def _is_part(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() != tensor.nbytes
