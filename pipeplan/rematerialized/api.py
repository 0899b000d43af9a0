"""`rematerialize`: measure a module, plan its budget, hand back the module that keeps it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor, nn

from pipeplan.capture import check_output, split
from pipeplan.capture.layer_costs.device_clock import device_of
from pipeplan.errors import InputError
from pipeplan.host_copy import measured_bandwidth
from pipeplan.remat import HostLink, judge, rematerialize_chain
from pipeplan.rematerialized import arguments, measured
from pipeplan.rematerialized.conditions import Conditions
from pipeplan.rematerialized.measured import Loss, ModuleMeasurements, Sample
from pipeplan.rematerialized.module import run, wrapped
from pipeplan.rematerialized.operators import rematerialize_operators
from pipeplan.rematerialized.parts import Parts, buffers_of
from pipeplan.rematerialized.precision import as_in, autocast
from pipeplan.rematerialized.script import Script, script_of
from pipeplan.rematerialized.steps import Prepared, Watch
from pipeplan.rematerialized.timing import rehearsed, with_times
from pipeplan.rematerialized.untouched import as_it_was, check_replaced, gradients
from pipeplan.task import SplitModel, Task
from pipeplan.units import parse_bandwidth

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
    outputs, gradients, running statistics and the stream of random numbers (of torch's default
    generators) are the plain module's. Without gradients or in eval mode it is the plain module.

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
            the loss holds is not counted. If it is a module, it is left as it was, too.
        offload: whether tensors may wait on the host.
        host_bandwidth: of the way there, such as `12GB/s`; measured where it is not given.
        reserve: bytes beyond those above that are taken all the time, such as optimizer states.
        method: a name in `pipeplan.remat.METHODS`, or `auto` for the best of all; or `operators`,
            which plans single operators where these plan whole layers, takes no `offload`, and
            leaves an `OperatorPlan` in `rematerialization`.
        slots: memory units of the dynamic programs.
        max_layers: merges layers until there are no more than these.
        repeats: times each layer is timed, and the plan rehearsed.

    Raises:
        InputError: if the module cannot be cut into layers, a layer works in place on its input,
            the sample does not fit the module, or an argument is out of range.
        InfeasibleError: if no schedule keeps the budget; names the layer, its bytes and the
            smallest budget that can be kept.
    """
    arguments.check_counts(slots=slots, repeats=repeats)
    if max_layers is not None:
        arguments.check_counts(max_layers=max_layers)
    arguments.check_way(method, offload, host_bandwidth)
    if method == arguments.OPERATORS and max_layers is not None:
        raise InputError(
            "rematerialize: max_layers: got it with method operators, which has no layers. Leave"
            " it out."
        )
    limit = arguments.size(budget, "budget")
    extra = arguments.size(reserve, "reserve")
    taken = arguments.sample_of(sample, loss)
    touched: list[nn.Module] = [module, *([loss] if isinstance(loss, nn.Module) else [])]
    arguments.check_module(module, taken.source)
    arguments.check_trainable(touched, taken)
    place = device_of(module)
    if method == arguments.OPERATORS:
        return rematerialize_operators(module, taken, limit, extra, repeats, place)
    with as_it_was(touched, place), as_in(place.device, autocast(place.device)):
        there = [(each, each.tensor) for each in buffers_of(touched)]
        cut = _cut(module, taken, max_layers)
        check_output(cut, module, taken.source.detach(), lambda: check_replaced(there))
        check_replaced(there)
        _check_fed(cut, taken.source)
        parts = Parts.of(module, cut.layers)
        conditions = Conditions.of(parts, taken.source)
        with gradients([*cut.layers, *touched[1:]]):
            found = measured.measure_module(cut, taken, offload)

            def called(script: Script, source: Tensor, watch: Watch) -> Tensor:
                prepared = _prepared(cut, found, taken.source, script, offload)
                return run(parts, conditions, prepared, source, watch)

            static = measured.constant_bytes(module, cut, taken, found) + extra
            sizes = measured.costs_of(cut, found, taken, static)
            costs = with_times(sizes, called, taken, place, repeats)
            channel = _channel(cut, found, offload, host_bandwidth, place.device)
            kept = _KeptBuffers(tuple(facts.changed_bytes for facts in found.facts))
            left = measured.left_bytes(cut)
            high = replace(costs, static=static + kept.at_most + sum(left))
            plan = rematerialize_chain(high, limit, method, slots, channel)
            shown = rehearsed(costs, plan.schedule, called, taken, place, repeats)
    script = script_of(plan.schedule)
    costs = replace(shown.costs, static=static + kept.bytes(script.again), left=left)
    outcome = judge(costs, plan.schedule, limit, channel or HostLink())
    prepared = _prepared(cut, found, taken.source, script, offload)
    plan = replace(plan, outcome=outcome)
    return wrapped(module, prepared, plan, costs, shown.spread, parts, conditions)


@dataclass(frozen=True, slots=True)
class _KeptBuffers:
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
    cut = split(task, max_layers)
    cut.check_again(range(len(cut.layers)), "rematerialize")
    return cut


def _any_loss(output: Tensor, _: Tensor) -> Tensor:
    return output.float().sum()


def _no_optimizer(_: object) -> torch.optim.Optimizer:
    raise AssertionError("nothing is trained while a module is measured")


def _channel(
    cut: SplitModel,
    found: ModuleMeasurements,
    offload: bool,
    host_bandwidth: str | None,
    device: torch.device,
) -> HostLink | None:
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
        return HostLink(measured_bandwidth(device))
    return HostLink(parse_bandwidth(host_bandwidth, "host_bandwidth"))


def _prepared(
    cut: SplitModel, found: ModuleMeasurements, source: Tensor, script: Script, offload: bool
) -> Prepared:
    changed = {id(each.tensor) for facts in found.facts for each in facts.changed}
    return Prepared(
        split=cut,
        script=script,
        flags=((source.requires_grad,), *(facts.left for facts in found.facts)),
        changed=tuple(facts.changed for facts in found.facts),
        fixed=tuple(b for b in buffers_of(cut.layers) if id(b.tensor) not in changed),
        shared=tuple(measured.shared_parameters(cut)),
        offload=offload,
        device=source.device,
        autocast=autocast(source.device),
    )
