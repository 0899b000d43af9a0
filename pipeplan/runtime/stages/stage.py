"""One stage: forward and backward of its layers for one micro-batch, segment by segment.

A stage is a sequence of segments (`segment`): layers whose graph is kept from F to B, and runs of
layers that keep only their input and are computed again in B, as a sequence of segments of their
own. Of what the former keep,
`activation_offload` moves what the plan lets wait on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from pipeplan.errors import InputError, InternalError
from pipeplan.host_copy import CopyEngine
from pipeplan.plan import LayerRanges, inside, outermost
from pipeplan.runtime.parameters.hooks import ParameterHooks
from pipeplan.runtime.parameters.ownership import StageParameters
from pipeplan.runtime.stages.activation_offload import ActivationOffload
from pipeplan.runtime.stages.in_place import explained
from pipeplan.runtime.stages.saved_tensors import SavedTensor
from pipeplan.runtime.stages.segment import (
    CheckpointedSegment,
    Fed,
    Heard,
    Loss,
    SegmentSpec,
    StoredSegment,
)
from pipeplan.runtime.transport.endpoints import CPU
from pipeplan.split_model import TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpec:
    """What a stage is made of; `loss` only for the last stage of the chain."""

    index: int
    first_layer: int
    """0-based index in the chain: part of every random seed."""
    layers: tuple[nn.Module, ...]
    fqns: tuple[dict[str, str], ...]
    """Per layer: name of a parameter or buffer in the layer -> its name in the user's model."""
    boundaries: tuple[tuple[TensorSpec, ...], ...]
    """Before each layer."""
    outputs: tuple[TensorSpec, ...]
    """Empty for the last stage, whose output is the loss."""
    loss: Loss | None
    seed: int
    scale: Callable[[int], float] = lambda _: 1.0
    """Step -> loss scale; used by the last stage."""
    number: Callable[[int], int] = lambda microbatch: microbatch
    """Micro-batch -> its number in the data: part of every random seed."""
    fed: Mapping[int, Fed] = field(default_factory=dict)
    """Index in `layers` -> what that layer gets behind its boundary."""
    runs: LayerRanges = ()
    """First and last index in `layers` of what is computed again, each before those inside it."""
    offload: LayerRanges = ()
    """Those of runs that may wait on the host between their two ends; apart from `runs`."""
    offload_input: bool = False
    """Whether what is saved of the stage's input may, too: by the first layer or its run."""
    lends_output: bool = False
    """Whether what the last layer, which is in none of `runs`, saves of its output leaves with the
    input of the next stage, which is on the same rank."""
    device: torch.device = CPU
    """Where its tensors are."""
    autocast: torch.dtype | None = None
    """What layers and loss run under."""
    host: CopyEngine | None = None
    """The way there; needed where something is offloaded."""
    shared: frozenset[str] = frozenset()
    """Names of buffers that layers of other stages have, too, whose forwards come in another
    order than the model's."""
    split_backward: bool = False
    """Whether gradients of weights wait for `StageRunner.weight_backward`."""


class StageRunner:
    """Runs the layers of one stage; tensors pass through, none stays in a Python frame."""

    def __init__(
        self,
        spec: StageSpec,
        microbatches: int,
        held: StageParameters,
        before: StageRunner | None = None,
    ) -> None:
        """Takes what the stage is made of.

        Args:
            spec: layers and boundaries.
            microbatches: per step.
            held: its parameters.
            before: the stage before, if that lends its output.
        """
        self.spec = spec
        self._before = before
        self.weights = held.weights
        self.units = held.units
        self.slots = held.slots
        self._microbatches = microbatches
        self._open: set[int] = set()
        self._leaving: set[int] = set()
        """Micro-batches whose copies begin with the forward that is to come."""
        self._segments = tuple(_segments(spec, (0, len(spec.layers) - 1), spec.runs))
        self._offload = ActivationOffload(spec.index, spec.host) if spec.host else None
        self.names: dict[nn.Parameter, str] = {
            parameter: fqns[local]
            for layer, fqns in zip(spec.layers, spec.fqns, strict=True)
            for local, parameter in layer.named_parameters()
        }
        """Name in the user's model of each parameter, as the optimizer knows it."""
        self._trained = self._flags()
        self._hooks = tuple(ParameterHooks(slots, self.names) for slots in self.slots)
        self._shared: dict[str, tuple[Tensor, int]] = {}

    def begin(self) -> None:
        """Take the hooks that parameters have now: a run starts from an empty pipeline."""
        for hooks in self._hooks:
            hooks.follow()
        self._leaving.clear()
        self._shared = self._shared_buffers()

    def end_step(self) -> None:
        """Refuse hooks, and gradients past leaves, that came since the run began.

        And changes of buffers that other stages have, and parameters that were frozen or unfrozen.
        The gradients of a step are complete.

        Raises:
            InputError: if there is one.
        """
        for hooks in self._hooks:
            hooks.check_none_new()
            hooks.check_none_beside()
        self._check_trained()
        for name, (buffer, writes) in self._shared_buffers().items():
            before, known = self._shared[name]
            if buffer is not before or writes != known:
                raise InputError(
                    f"task: buffer {name!r}: changes in the forward of a layer of stage"
                    f" {self.spec.index}, and layers of another stage have it, too, where other"
                    " micro-batches are under way: need changes in the model's order. Give each of"
                    " these layers a module of its own, or put them into one nn.Module, which is"
                    " one layer."
                )

    def _flags(self) -> dict[str, bool]:
        """Of each parameter, whether it is trained, by name in the user's model."""
        return {
            fqns[local]: parameter.requires_grad
            for layer, fqns in zip(self.spec.layers, self.spec.fqns, strict=True)
            for local, parameter in layer.named_parameters()
        }

    def _check_trained(self) -> None:
        now = self._flags()
        for name, before in self._trained.items():
            if now.get(name, before) != before:
                raise InputError(
                    f"task: {name}: got requires_grad={not before} during the run, need {before}"
                    " as when it began: gradients, optimizers and bytes were planned for that."
                    " Save a checkpoint before, and profile and plan the changed model."
                )

    def _shared_buffers(self) -> dict[str, tuple[Tensor, int]]:
        """Each with how often it was written to."""
        if not self.spec.shared:
            return {}
        pairs = zip(self.spec.layers, self.spec.fqns, strict=True)
        return {
            fqns[local]: (buffer, buffer._version)  # noqa: SLF001
            for layer, fqns in pairs
            for local, buffer in layer.named_buffers()
            if fqns[local] in self.spec.shared
        }

    @property
    def in_flight(self) -> int:
        """Micro-batches between their forward and the end of their backward, both halves of it."""
        return len(self._open)

    def state(self) -> dict[str, Tensor]:
        """Newest parameters and all buffers, by name in the user's model; not copied.

        Raises:
            InputError: if a forward has registered a buffer.
        """
        for unit in self.units:
            unit.settle()
        buffers = {
            self._named(fqns, local): buffer
            for layer, fqns in zip(self.spec.layers, self.spec.fqns, strict=True)
            for local, buffer in layer.named_buffers()
        }
        return {name: parameter.detach() for parameter, name in self.names.items()} | buffers

    def _named(self, fqns: dict[str, str], buffer: str) -> str:
        if buffer not in fqns:
            raise InputError(
                f"state: stage {self.spec.index}: buffer {buffer!r} has come since the run was"
                " made, need it in the model from the beginning on, or a run that goes on could"
                " not have it. Register zeros of its shape in the module's __init__."
            )
        return fqns[buffer]

    def forward(
        self, microbatch: int, inputs: list[Tensor], target: Callable[[int], Any]
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
        for slots in self.slots:
            slots.begin_graph(microbatch // self._microbatches)
        self._open.add(microbatch)
        if self.spec.offload_input and not self.spec.index:
            inputs[:] = map(_alone, inputs)
        leaves = microbatch in self._leaving
        if leaves:
            self._host().begin(microbatch, inputs, self._fixed_here())
        for segment in self._segments:
            inputs = segment.forward(microbatch, inputs, target)
        if leaves:
            self._leaving.remove(microbatch)
            self._copy(microbatch)
        return inputs

    def backward(self, microbatch: int, gradients: list[Tensor]) -> list[Tensor]:
        """Gradients of the stage's differentiable inputs; parameters' gradients accumulate.

        Where the backward is split, those of parameters wait for `weight_backward`.

        Args:
            microbatch: global number.
            gradients: of the differentiable outputs; emptied, so that the caller keeps nothing
                alive. Ignored by the last stage, which starts from its loss.

        Raises:
            InputError: if a hook on a parameter does what it must not.
        """
        step = microbatch // self._microbatches
        if self._offload:
            self._offload.wait(microbatch)
        with self._accumulating(step):
            for segment in reversed(self._segments):
                gradients = segment.backward(microbatch, gradients, self.spec.scale(step))
        if not self.spec.split_backward:
            self._end(microbatch)
        return gradients

    def weight_backward(self, microbatch: int) -> None:
        """The gradients of parameters that `backward` left accumulate.

        Raises:
            InputError: if a hook on a parameter does what it must not.
        """
        with self._accumulating(microbatch // self._microbatches):
            for segment in reversed(self._segments):
                segment.weight_backward(microbatch)
        self._end(microbatch)

    @contextmanager
    def _accumulating(self, step: int) -> Iterator[None]:
        """Around what adds to gradients of `step`: hooks see that step's leaves."""
        for slots in self.slots:
            slots.bind(step)
        marks = [hooks.before(step) for hooks in self._hooks]
        with explained(self.spec.first_layer, self.spec.layers, self.spec.fqns):
            yield
        for hooks, before in zip(self._hooks, marks, strict=True):
            hooks.check(step, before)

    def _end(self, microbatch: int) -> None:
        """Nothing of its graph is left."""
        self._open.remove(microbatch)
        for slots in self.slots:
            slots.end_graph(microbatch // self._microbatches)

    def offload(self, microbatch: int) -> None:
        """Begin to copy what lies between the ends of the offloaded runs to the host.

        And what is saved of the stage's input, where that is offloaded, here and in the stage
        before. An input that leaves alone may do so before its forward: then it begins with that.
        """
        if microbatch in self._open:
            self._copy(microbatch)
        else:
            self._leaving.add(microbatch)

    def _copy(self, microbatch: int) -> None:
        before = self._before.lent(microbatch) if self._before else []
        held = [
            segment.saved(microbatch)
            for segment in self._segments
            if segment.spec.offload or segment.spec.offload_input
        ]
        self._host().offload(microbatch, held, self._fixed_here(), before)

    def _fixed_here(self) -> list[Tensor]:
        """What is of no micro-batch, here and in the stage whose output is the input."""
        return self.fixed() + (self._before.fixed() if self._before else [])

    def lent(self, microbatch: int) -> list[SavedTensor]:
        """What is saved of the output that leaves with the next stage."""
        return self._segments[-1].saved(microbatch).lent()

    def free(self, microbatch: int) -> None:
        """Wait until that is copied, and give its bytes back."""
        self._host().free(microbatch)

    def prefetch(self, microbatch: int) -> None:
        """Take these bytes again, and begin to bring back what was in them."""
        self._host().prefetch(microbatch)

    @property
    def host_sizes(self) -> tuple[int, ...]:
        """Bytes on the host of each micro-batch that has any (H7)."""
        return self._offload.sizes if self._offload else ()

    def _host(self) -> ActivationOffload:
        if self._offload is None:
            raise InternalError(
                f"offload: stage {self.spec.index} has no way to a host. Report this plan."
            )
        return self._offload

    def fixed(self) -> list[Tensor]:
        """Weights of all versions, and buffers: what layers use, but no micro-batch keeps."""
        leaves = [leaf for each in self.slots for row in each.leaves for leaf in row]
        layers = self.spec.layers
        return [*leaves, *(t for x in layers for t in (*x.parameters(), *x.buffers()))]

    def evaluate(
        self,
        microbatch: int,
        inputs: list[Tensor],
        target: Callable[[int], Any],
        heard: Heard | None = None,
    ) -> list[Tensor]:
        """Outputs of the newest weights, without a graph; arguments as in `forward`.

        The last stage calls `heard` with what the loss is given.
        """
        for slots in self.slots:
            slots.bind_newest()
        for segment in self._segments:
            inputs = segment.evaluate(microbatch, inputs, target, heard)
        return inputs


def _alone(tensor: Tensor) -> Tensor:
    """In a storage of its own: data may come as a few rows of much more."""
    more = tensor.untyped_storage().nbytes() > tensor.nbytes
    return tensor.clone() if more else tensor


def _segments(
    spec: StageSpec, span: tuple[int, int], runs: LayerRanges
) -> Iterator[StoredSegment]:
    """The segments of the layers of `span`: the outermost of `runs`, and what lies between."""
    begin, end = span[0], span[1] + 1
    for first, last in (*outermost(runs), (end, span[1])):
        if begin < first:
            yield StoredSegment(_segment_spec(spec, begin, first))
        if first <= last:
            stays = replace(spec, offload_input=False)  # what runs again keeps its input
            again = _segments(stays, (first, last), inside(runs, (first, last)))
            yield CheckpointedSegment(_segment_spec(spec, first, last + 1), tuple(again))
        begin = last + 1


def _segment_spec(spec: StageSpec, begin: int, end: int) -> SegmentSpec:
    """Layers `begin` to `end`, exclusive, of the stage."""
    last = end == len(spec.layers)
    offload = tuple((a - begin, b - begin) for a, b in spec.offload if begin <= a < end)
    behind = spec.outputs if last else spec.boundaries[end]
    enters = spec.index > 0 or begin > 0
    fed = {index - begin: fetch for index, fetch in spec.fed.items() if begin <= index < end}
    return SegmentSpec(
        first_layer=spec.first_layer + begin,
        layers=spec.layers[begin:end],
        inputs=spec.boundaries[begin],
        entered=tuple(each.differentiable and enters for each in spec.boundaries[begin]),
        left=(True,) if last and spec.loss else tuple(each.differentiable for each in behind),
        loss=spec.loss if last else None,
        seed=spec.seed,
        number=spec.number,
        fed=fed,
        device=spec.device,
        offload=offload,
        offload_input=spec.offload_input and begin == 0,
        lends_output=spec.lends_output and last,
        autocast=spec.autocast,
        split_backward=spec.split_backward,
    )
