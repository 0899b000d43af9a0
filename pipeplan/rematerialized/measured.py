"""What a split module costs on one device, measured one layer at a time.

All boundaries and one layer's tape are alive at once: far less than the whole module keeps.
The loss counts as one more layer behind the module's own, which the caller's code runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

from torch import Tensor, nn

from pipeplan.capture.boundary_trace import call_layer
from pipeplan.capture.layer_costs import layer_bytes
from pipeplan.capture.layer_costs.layer_bytes import LayerBytes
from pipeplan.capture.layer_costs.layer_run import LayerPass, LayerRun, fed_tensors
from pipeplan.livebytes import LiveBytes, storage_bytes
from pipeplan.remat import Costs
from pipeplan.rematerialized.facts import LayerFacts, fresh, layer_facts, shared
from pipeplan.rematerialized.parts import buffers_of
from pipeplan.rematerialized.units import taped
from pipeplan.split_model import SplitModel

Loss = Callable[[Tensor, Tensor], Tensor]
LOSS = "the loss"
_NOTHING = LayerBytes(
    output=0,
    output_gradient=0,
    saved_input=0,
    saved=0,
    saved_output=0,
    saved_passing=0,
    forward_workspace=0,
    backward_workspace=0,
    forward_peak=0,
    backward_peak=0,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What the module is planned for."""

    source: Tensor
    loss: tuple[Loss, Tensor] | None
    """The loss and its target, where they are to be counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleMeasurements:
    """All that was found; one entry of `facts` per layer of the module, without the loss."""

    facts: tuple[LayerFacts, ...]
    sizes: tuple[LayerBytes, ...]
    backward_work: tuple[int, ...]
    """Working bytes of each backward beside what is kept and the gradients."""
    gradients: tuple[int, ...]
    """Bytes of the storages of the gradients behind each layer."""
    loss_bytes: int
    """Of the storage behind the loss, which may be larger than a scalar; 0 without a loss."""


def measure_module(split: SplitModel, sample: Sample, offload: bool) -> ModuleMeasurements:
    """Bytes of each layer of `split`, and of the loss behind them.

    With `offload` as units are found that may leave.

    Raises:
        InputError: if a layer fails, or changes what it gets in place.
    """
    runs = list(_Runs(split, sample))
    own = runs[: len(split.layers)]
    facts = _changed_by_any(own, [layer_facts(run) for run in own])
    sizes: list[LayerBytes] = []
    for run in runs:
        with taped() if offload and run.name != LOSS else nullcontext():
            sizes.append(layer_bytes.measure_bytes(run))
    back = _backwards(runs, sizes, offload)
    if sample.loss is None:
        sizes.append(_NOTHING)
        back.append(_Backward(work=0, gradient=0))
    return ModuleMeasurements(
        facts=facts,
        sizes=tuple(sizes),
        backward_work=tuple(each.work for each in back),
        gradients=(*(each.gradient for each in back[1:]), sizes[-1].output_gradient),
        loss_bytes=_loss_bytes(runs[-1]),
    )


def _changed_by_any(runs: list[LayerRun], found: list[LayerFacts]) -> tuple[LayerFacts, ...]:
    """`found` where a buffer that one layer changes is so for all that have it."""
    changed = {id(each.tensor) for facts in found for each in facts.changed}
    own = [[b for b in buffers_of([run.layer]) if id(b.tensor) in changed] for run in runs]
    pairs = zip(found, own, strict=True)
    return tuple(replace(facts, changed=tuple(buffers)) for facts, buffers in pairs)


class _Runs:
    """The layers, each with what the ones before it really compute."""

    def __init__(self, split: SplitModel, sample: Sample) -> None:
        self._split, self._sample = split, sample

    def __iter__(self) -> _Runs:
        self._index = 0
        self._values: tuple[Tensor, ...] = (self._sample.source.detach(),)
        self._flags: tuple[bool, ...] = (self._sample.source.requires_grad,)
        return self

    def __next__(self) -> LayerRun:
        index, split = self._index, self._split
        if index == len(split.layers):
            if self._sample.loss is None:
                raise StopIteration
            self._index += 1
            return LayerRun(
                name=LOSS,
                layer=nn.Identity(),
                inputs=self._values,
                differentiable=self._flags,
                loss=self._sample.loss,
            )
        if index > len(split.layers):
            raise StopIteration
        run = LayerRun(
            name=split.names[index],
            layer=split.layers[index],
            inputs=self._values,
            differentiable=self._flags,
            fed=fed_tensors(split, index, (self._sample.source.detach(),)),
        )
        outputs = call_layer(run.name, run.layer, fresh(run))
        self._values = tuple(output.detach() for output in outputs)
        self._flags = tuple(output.requires_grad for output in outputs)
        self._index += 1
        return run


def _loss_bytes(run: LayerRun) -> int:
    if run.loss is None:
        return 0
    function, target = run.loss
    return storage_bytes([function(fresh(run)[0], target)])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Backward:
    work: int
    gradient: int
    """Bytes of the storages behind the gradients of the inputs."""


def _backwards(runs: list[LayerRun], sizes: list[LayerBytes], offload: bool) -> list[_Backward]:
    """Working bytes of each backward, from the last one to the first, one entry per layer.

    Each gets the very gradients that the one before returned: how they lie in memory decides
    what has to be copied, and parts of one storage live together.
    """
    found: list[_Backward] = []
    gradients: list[Tensor] = []
    for run, size in zip(reversed(runs), reversed(sizes), strict=True):
        with taped() if offload and run.name != LOSS else nullcontext():
            found.append(_one_backward(run, size, gradients))
    return found[::-1]


def _one_backward(run: LayerRun, size: LayerBytes, gradients: list[Tensor]) -> _Backward:
    """Takes what is in `gradients` and leaves what comes out there."""
    states = [*run.layer.parameters(), *run.layer.buffers()]
    live = LiveBytes([*states, *(state.grad for state in states if state.grad is not None)])
    with live:
        base = live.live
        one = LayerPass(run)
        one.forward()
        arrived = storage_bytes(gradients)
        live.count(gradients)
        made = one.receive_gradients(gradients)
        live.reset_peak()
        gradients.extend(one.backward())
        left = storage_bytes(gradients)
        work = live.peak - base - size.kept - (arrived or made) - left
    return _Backward(work=work, gradient=left)


def costs_of(split: SplitModel, found: ModuleMeasurements, sample: Sample, static: int) -> Costs:
    """What planners read, without times: the chain of the module's layers and the loss.

    The module's input lives all the time in the caller's hands: it is static, not boundary 0.
    """
    sizes = found.sizes
    scalar = sizes[-1].output
    given = sample.source.nbytes if sample.source.requires_grad else 0
    own = (found.backward_work[0] + given, *found.backward_work[1:])
    none = (0,) * len(sizes)
    return Costs(
        names=(*split.names, LOSS),
        forward=none,
        light=none,
        backward=none,
        boundary=(0, *(facts.boundary_bytes for facts in found.facts), scalar),
        gradient=found.gradients,
        saved_input=(0, *(size.saved_input for size in sizes[1:])),
        saved=tuple(size.saved for size in sizes),
        saved_output=tuple(size.saved_output for size in sizes),
        forward_work=tuple(size.forward_workspace for size in sizes),
        light_work=tuple(size.light_workspace for size in sizes),
        backward_work=own,
        static=static,
        storages=shared(found.facts, sizes[-1]),
    )


def constant_bytes(
    module: nn.Module, split: SplitModel, sample: Sample, found: ModuleMeasurements
) -> int:
    """Bytes that live all the time: weights, buffers, gradients, input, target, and the loss.

    The loss is held by the caller, its gradient by autograd.
    """
    layers = split.layers
    weights = dict.fromkeys([*module.parameters(), *(p for x in layers for p in x.parameters())])
    buffers = [*module.buffers(), *(buffer for layer in layers for buffer in layer.buffers())]
    gradients = sum(parameter.nbytes for parameter in weights if parameter.requires_grad)
    data: Sequence[Tensor] = (sample.source, *((sample.loss[1],) if sample.loss else ()))
    loss = found.loss_bytes + found.sizes[-1].output
    return storage_bytes([*weights, *buffers, *data]) + gradients + loss


def shared_parameters(split: SplitModel) -> dict[nn.Parameter, int]:
    """Trained parameters of several layers -> the last of these, whose backward comes first."""
    uses: dict[nn.Parameter, list[int]] = {}
    for index, layer in enumerate(split.layers):
        for parameter in layer.parameters():
            uses.setdefault(parameter, []).append(index)
    pairs = uses.items()
    return {one: found[-1] for one, found in pairs if len(found) > 1 and one.requires_grad}


def left_bytes(split: SplitModel) -> tuple[int, ...]:
    """Per layer: gradients of shared parameters that its backward is the first to add up apart."""
    left = [0] * (len(split.layers) + 1)
    for parameter, last in shared_parameters(split).items():
        left[last] += parameter.nbytes
    return tuple(left)
