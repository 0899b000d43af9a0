"""`rematerialize`: measure a module, plan its budget, hand back the module that keeps it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor, nn

from pipeplan.capture import split
from pipeplan.capture.place import Place, place_of
from pipeplan.capture.sweep import gradient_buffers
from pipeplan.capture.trace import unchanged_buffers
from pipeplan.errors import InputError
from pipeplan.hostcopy import measured_bandwidth
from pipeplan.livebytes import storage_bytes
from pipeplan.remat import OFFLOADING, Channel, judge, rematerialize_chain
from pipeplan.rematerialized import measured
from pipeplan.rematerialized.measured import Loss, Measured, Sample
from pipeplan.rematerialized.module import Conditions, Parts, run, wrapped
from pipeplan.rematerialized.precision import as_in, autocast
from pipeplan.rematerialized.script import Script, script_of
from pipeplan.rematerialized.steps import Prepared, Watch
from pipeplan.rematerialized.timing import rehearsed, timed
from pipeplan.task import SplitModel, Task
from pipeplan.units import parse_bandwidth, parse_bytes

Module = TypeVar("Module", bound=nn.Module)


def rematerialize(
    module: Module,
    sample: Tensor | tuple[Tensor, Tensor],
    budget: str | int,
    *,
    loss: Loss | None = None,
    offload: bool = False,
    host_bandwidth: str | None = None,
    reserve: str | int = 0,
    method: str = "auto",
    slots: int = 500,
    max_layers: int | None = None,
    repeats: int = 5,
) -> Module:
    """`module` in a form that keeps a budget of live bytes in training, bit for bit the same.

    The result is called like `module` and shares its parameters, buffers and submodules. In its
    forward and backward some layers run twice and, with `offload`, some tensors wait on the host;
    outputs, gradients, running statistics and the stream of random numbers are the plain
    module's. Without gradients or in eval mode it is the plain module.

    Live bytes are those of weights, buffers, gradients, the input, the target, and all that
    layers and autograd hold. `module` is measured with `sample`, which holds all boundaries and
    one tape, and left as it was. Then the plan that was found is rehearsed with the sample: its
    time is told from the times of its operations there. It can be read from `rematerialization`
    of the result, how far rehearsals differed from `rematerialization_spread`.

    Args:
        module: in training mode, takes one tensor and returns one.
        sample: an input like those to come; or (input, target), with `loss`.
        budget: bytes, or a size such as `8GiB`.
        loss: (output, target) -> scalar; counted as the layer behind the module. Without it, what
            the loss holds is not counted.
        offload: whether tensors may wait on the host.
        host_bandwidth: of the way there, such as `12GB/s`; measured where it is not given.
        reserve: bytes beyond those above that are taken all the time, such as optimizer states.
        method: a name in `pipeplan.remat.METHODS`, or `auto` for the best of all.
        slots: memory units of the dynamic programs.
        max_layers: merges layers until there are no more than these.
        repeats: times each layer is timed, and the plan rehearsed.

    Raises:
        InputError: if the module cannot be cut into layers, a layer works in place on its input,
            the sample does not fit the module, or an argument is out of range.
        InfeasibleError: if no schedule keeps the budget; names the layer, its bytes and the
            smallest budget that can be kept.
    """
    limit = _size(budget, "budget")
    extra = _size(reserve, "reserve")
    taken = _sample(module, sample, loss)
    _check(module, taken.source, repeats)
    _check_way(method, offload, host_bandwidth)
    place = place_of(module)
    parts = Parts.of(module)
    conditions = Conditions.of(parts, taken.source)
    with _as_it_was(module, place), as_in(place.device, autocast(place.device)):
        cut = _cut(module, taken, max_layers)
        _check_fed(cut, taken.source)
        with gradient_buffers(cut.layers):
            found = measured.measure(cut, taken, offload)

            def called(script: Script, source: Tensor, watch: Watch) -> Tensor:
                prepared = _prepared(cut, found, taken.source, script, offload)
                return run(parts, conditions, prepared, source, watch)

            static = measured.states_bytes(module, cut, taken, found) + extra
            sizes = measured.costs_of(cut, found, taken, static)
            costs = timed(sizes, called, taken, place, repeats)
            channel = _channel(cut, found, offload, host_bandwidth, place.device)
            kept = _Kept(tuple(storage_bytes(facts.changed) for facts in found.facts))
            left = measured.left_bytes(cut)
            high = replace(costs, static=static + kept.at_most + sum(left))
            plan = rematerialize_chain(high, limit, method, slots, channel)
            shown = rehearsed(costs, plan.schedule, called, taken, place, repeats)
    script = script_of(plan.schedule)
    costs = replace(shown.costs, static=static + kept.bytes(script.again), left=left)
    outcome = judge(costs, plan.schedule, limit, channel or Channel())
    prepared = _prepared(cut, found, taken.source, script, offload)
    return wrapped(
        module, prepared, replace(plan, outcome=outcome), costs, shown.spread, conditions
    )


@dataclass(frozen=True, slots=True)
class _Kept:
    """Bytes of what is kept of buffers so that layers can run again with their old values.

    `sizes` are those of the changed buffers of each layer: copies from their first forward on, and
    of the present values while a layer runs again.
    """

    sizes: tuple[int, ...]

    def bytes(self, again: frozenset[int]) -> int:
        """Where the layers `again` run more than once."""
        found = [self.sizes[layer] for layer in again]
        return sum(found) + max(found, default=0)

    @property
    def at_most(self) -> int:
        """Where all layers do."""
        return self.bytes(frozenset(range(len(self.sizes))))


def _size(value: str | int, what: str) -> int:
    if isinstance(value, str):
        return parse_bytes(value, what)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InputError(f"rematerialize: {what}: got {value!r}, need bytes or a size like 8GiB")
    return value


def _sample(
    module: nn.Module, sample: Tensor | tuple[Tensor, Tensor], loss: Loss | None
) -> Sample:
    need = "a tensor, or (input, target) and a loss"
    parts: Sequence[object] = sample if isinstance(sample, tuple | list) else (sample,)
    tensors = [part for part in parts if isinstance(part, Tensor)]
    if len(tensors) != len(parts) or len(parts) != (1 if loss is None else 2):
        kinds = ", ".join(type(part).__name__ for part in parts)
        told = "no loss" if loss is None else "a loss"
        raise InputError(f"rematerialize: sample: got ({kinds}) and {told}, need {need}")
    return Sample(source=tensors[0], loss=None if loss is None else (loss, tensors[1]))


def _check(module: nn.Module, source: Tensor, repeats: int) -> None:
    if repeats < 1:
        raise InputError(f"rematerialize: repeats: got {repeats}, need at least 1")
    if not isinstance(module, nn.Module):
        raise InputError(f"rematerialize: got a {type(module).__name__}, need an nn.Module")
    if not module.training:
        raise InputError(
            "rematerialize: got a module in eval mode, need training mode. Call train() first."
        )
    trained = any(parameter.requires_grad for parameter in module.parameters())
    if not trained and not source.requires_grad:
        raise InputError("rematerialize: got a module without gradients, need one to train")
    device = place_of(module).device
    if source.device != device:
        raise InputError(
            f"rematerialize: sample: got a tensor on {source.device}, need it on {device}, where"
            " the module is"
        )


def _check_way(method: str, offload: bool, host_bandwidth: str | None) -> None:
    """Refuse what only means something with a way to the host."""
    if offload:
        return
    if host_bandwidth is not None:
        raise InputError("rematerialize: got host_bandwidth alone, need offload=True with it")
    if method in OFFLOADING:
        raise InputError(f"rematerialize: got method {method} alone, need offload=True with it")


def _check_fed(cut: SplitModel, source: Tensor) -> None:
    fed = next((name for index, name in enumerate(cut.names) if cut.fed_to(index)), None)
    if source.requires_grad and fed is not None:
        raise InputError(
            f"rematerialize: layer {fed!r}: reads the module's input again, need an input without"
            " a gradient there. Detach the input."
        )


def _cut(module: nn.Module, taken: Sample, max_layers: int | None) -> SplitModel:
    """The module's layers; without a loss a stand-in only shows what passes between them."""
    source = taken.source.detach()
    loss, target = taken.loss or (_any_loss, torch.zeros((), device=source.device))
    task = Task(model=module, loss=loss, optimizer=_no_optimizer, data=lambda _: (source, target))
    return split(task, max_layers)


def _any_loss(output: Tensor, _: Tensor) -> Tensor:
    return output.float().sum()


def _no_optimizer(_: object) -> torch.optim.Optimizer:
    raise AssertionError("nothing is trained while a module is measured")


def _channel(
    cut: SplitModel,
    found: Measured,
    offload: bool,
    host_bandwidth: str | None,
    device: torch.device,
) -> Channel | None:
    if not offload:
        return None
    pairs = zip(cut.names, found.facts, strict=True)
    shares = next((name for name, facts in pairs if facts.shares), None)
    if shares is not None:
        raise InputError(
            f"rematerialize: layer {shares!r}: hands a tensor on that it got, need layers whose"
            " outputs are new to offload them one by one. Give offload=False."
        )
    if host_bandwidth is None:
        return Channel(measured_bandwidth(device))
    return Channel(parse_bandwidth(host_bandwidth, "host_bandwidth"))


def _prepared(
    cut: SplitModel, found: Measured, source: Tensor, script: Script, offload: bool
) -> Prepared:
    return Prepared(
        split=cut,
        script=script,
        flags=((source.requires_grad,), *(facts.left for facts in found.facts)),
        changed=tuple(facts.changed for facts in found.facts),
        shared=tuple(measured.shared_parameters(cut)),
        offload=offload,
        device=source.device,
        autocast=autocast(source.device),
    )


@contextmanager
def _as_it_was(module: nn.Module, place: Place) -> Iterator[None]:
    """Gives gradients, buffers and generators back as they were."""
    gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
    try:
        with torch.random.fork_rng(devices=place.random_devices), unchanged_buffers([module]):
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
