"""`rematerialize` with whole layers: measure them, plan the budget, rehearse the plan."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from pipeplan.capture import check_output, split
from pipeplan.capture.user_model.module_attributes import attribute_tensors
from pipeplan.errors import InputError
from pipeplan.host_copy import measured_bandwidth
from pipeplan.nested import ModelArguments, tensors_in
from pipeplan.pinned import PinnedPool
from pipeplan.remat import HostLink, judge, rematerialize_chain
from pipeplan.rematerialized import measured
from pipeplan.rematerialized.conditions import Conditions
from pipeplan.rematerialized.measured import ModuleMeasurements, Sample
from pipeplan.rematerialized.module import run, wrapped
from pipeplan.rematerialized.parts import Parts, buffers_of
from pipeplan.rematerialized.precision import as_in, autocast
from pipeplan.rematerialized.request import RematerializationRequest
from pipeplan.rematerialized.script import Script, script_of
from pipeplan.rematerialized.steps import Prepared, Watch
from pipeplan.rematerialized.timing import rehearsed, with_times
from pipeplan.rematerialized.untouched import as_it_was, check_replaced, gradients
from pipeplan.split_model import SplitModel
from pipeplan.task import Task
from pipeplan.units import parse_bandwidth

Module = TypeVar("Module", bound=nn.Module)


def rematerialize_layers(request: RematerializationRequest[Module]) -> Module:
    """`request.module` in a form whose layers keep the budget, with a `Rematerialization`.

    Raises:
        InputError: if the module cannot be cut into layers, or a layer works in place on its
            input.
        InfeasibleError: if no schedule keeps the budget.
    """
    module, taken, place, repeats = request.module, request.sample, request.place, request.repeats
    touched = request.touched
    request.say("layers: measuring")
    cut = _checked_cut(request)
    with as_it_was(touched, place), as_in(place.device, autocast(place.device)):
        parts = Parts.of(module, cut.layers)
        conditions = Conditions.of(parts, taken.source)
        with gradients([*cut.layers, *touched[1:]]):
            found = measured.measure_module(cut, taken, request.offload)
            pinned = PinnedPool()

            def called(script: Script, source: Tensor, watch: Watch) -> Tensor:
                prepared = _prepared(cut, found, taken.source, script, request.offload, pinned)
                return run(parts, conditions, prepared, source, watch)

            static = measured.constant_bytes(module, cut, taken, found) + request.reserve
            sizes = measured.costs_of(cut, found, taken, static)
            costs = with_times(sizes, called, taken, place, repeats)
            channel = _channel(cut, found, request)
            kept = _KeptBuffers(tuple(facts.changed_bytes for facts in found.facts))
            left = measured.left_bytes(cut)
            high = replace(costs, static=static + kept.at_most + sum(left))
            request.say(f"layers: planning {costs.layers}")
            plan = rematerialize_chain(high, request.limit, request.method, request.slots, channel)
            request.say(f"layers: rehearsing the schedule of {plan.method}")
            shown = rehearsed(costs, plan.schedule, called, taken, place, repeats)
    script = script_of(plan.schedule)
    costs = replace(shown.costs, static=static + kept.bytes(script.again), left=left)
    outcome = judge(costs, plan.schedule, request.limit, channel or HostLink())
    prepared = _prepared(cut, found, taken.source, script, request.offload, pinned)
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


def _checked_cut(request: RematerializationRequest[Module]) -> SplitModel:
    """The module's layers; from now on it is known which frozen parameters they move."""
    module, taken, place, touched = request.module, request.sample, request.place, request.touched
    with as_it_was(touched, place), as_in(place.device, autocast(place.device)):
        there = [(each, each.tensor) for each in buffers_of(touched)]
        cut = _cut(module, taken, request.max_layers)
        source = ModelArguments.of(taken.source.detach())
        check_output(cut, module, source, lambda: check_replaced(there))
        check_replaced(there)
    _check_fed(cut, taken.source)
    return cut


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
    given = partial(loss)  # a module's own parameters are the caller's to train
    task = Task(model=module, loss=given, optimizer=_no_optimizer, data=lambda _: (source, target))
    # The module itself is evaluated.
    cut = split(task, max_layers, evaluates=False, in_order=True)
    if cut.returned is not None:
        raise InputError(
            f"rematerialize: model {type(module).__name__}: returned {len(cut.returned.leaves)}"
            " values, need one tensor. Wrap it in a module that returns the one to train on."
        )
    cut.check_torch_draws("rematerialize")
    cut.check_again(range(len(cut.layers)), "rematerialize")
    return cut


def _any_loss(output: Any, _: Tensor) -> Tensor:
    first, *others = (each.float().sum() for each in tensors_in(output))
    return sum(others, first)


def _no_optimizer(_: object) -> torch.optim.Optimizer:
    raise AssertionError("nothing is trained while a module is measured")


def _channel(
    cut: SplitModel, found: ModuleMeasurements, request: RematerializationRequest[Module]
) -> HostLink | None:
    if not request.offload:
        return None
    pairs = zip(cut.names, found.facts, strict=True)
    shares = next((name for name, facts in pairs if facts.shares), None)
    if shares is not None:
        raise InputError(
            f"rematerialize: layer {shares!r}: hands a tensor on that it got, need layers whose"
            " outputs are new to offload them one by one. Give offload=False."
        )
    if request.host_bandwidth is None:
        return HostLink(measured_bandwidth(request.place.device))
    return HostLink(parse_bandwidth(request.host_bandwidth, "host_bandwidth"))


def _prepared(
    cut: SplitModel,
    found: ModuleMeasurements,
    source: Tensor,
    script: Script,
    offload: bool,
    pinned: PinnedPool,
) -> Prepared:
    changed = {id(each.tensor) for facts in found.facts for each in facts.changed}
    return Prepared(
        split=cut,
        script=script,
        flags=((source.requires_grad,), *(facts.left for facts in found.facts)),
        changed=tuple(facts.changed for facts in found.facts),
        fixed=tuple(b for b in buffers_of(cut.layers) if id(b.tensor) not in changed),
        tables=tuple(attribute_tensors(cut.layers)) if offload else (),
        shared=tuple(measured.shared_parameters(cut)),
        offload=offload,
        device=source.device,
        autocast=autocast(source.device),
        pinned=pinned,
    )
