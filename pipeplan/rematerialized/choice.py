"""Single operators or whole layers: both are planned, and the faster one is taken."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from pipeplan.errors import InfeasibleError, InputError, PipeplanError
from pipeplan.rematerialized.layers import rematerialize_layers
from pipeplan.rematerialized.operators import rematerialize_operators
from pipeplan.rematerialized.request import RematerializationRequest
from pipeplan.rematerialized.untouched import as_it_was, gradients
from pipeplan.units import format_bytes, format_ns

Module = TypeVar("Module", bound=nn.Module)
LAYERS, OPERATORS = "layers", "operators"


@dataclass(frozen=True)
class Way:
    """One of two ways to keep a budget.

    Attributes:
        name: `operators` or `layers`.
        method: that found its plan; None without one.
        peak_bytes: that its plan predicts.
        step_ns: of a forward and its backward with the sample, measured in turns with the other
            way; None where the other way has no plan.
        refusal: why it has no plan.
    """

    name: str
    method: str | None = None
    peak_bytes: int | None = None
    step_ns: int | None = None
    refusal: str | None = None

    def __str__(self) -> str:
        if self.peak_bytes is None:
            return f"{self.name}: not taken: {self.refusal}"
        step = "" if self.step_ns is None else f", {format_ns(self.step_ns)} a step"
        return f"{self.name}: {self.method}, peak {format_bytes(self.peak_bytes)}{step}"


@dataclass(frozen=True)
class Choice:
    """What `rematerialize` with method `auto` found, and which way it took.

    Attributes:
        taken: the name of that way.
        ways: all that were tried.
    """

    taken: str
    ways: tuple[Way, ...]

    def __str__(self) -> str:
        return "\n".join([f"taken: {self.taken}", *map(str, self.ways)])

    @property
    def refusal(self) -> str | None:
        """Why there is no plan of single operators; None where there is one."""
        return next(each.refusal for each in self.ways if each.name == OPERATORS)


def rematerialize_fastest(request: RematerializationRequest[Module]) -> Module:
    """The faster of both ways, whose `rematerialization_choice` tells of both.

    Raises:
        InputError: if neither has a plan, and one never has.
        InfeasibleError: if neither has a plan within the budget.
    """
    leans: dict[str, Any] = {}
    refusals: dict[str, PipeplanError] = {}
    for name, plan in _ways(leans):
        try:
            leans[name] = plan(request)
        except (InputError, InfeasibleError) as error:
            refusals[name] = error
            request.say(f"{name}: {error}")
    if not leans:
        raise _neither(refusals)
    times = _step_times(request, list(leans.values())) if len(leans) > 1 else [None]
    steps = dict(zip(leans, times, strict=True))
    taken = min(leans, key=lambda name: steps[name] or 0)
    ways = tuple(
        _way(name, leans.get(name), steps.get(name), refusals.get(name))
        for name in (OPERATORS, LAYERS)
    )
    result: Module = leans[taken]
    object.__setattr__(result, "rematerialization_choice", Choice(taken, ways))
    request.say(f"taken: {taken}")
    return result


def _ways(
    found: dict[str, Any],
) -> Sequence[tuple[str, Callable[[RematerializationRequest[Module]], Module]]]:
    """Layers first: with a plan of them, operators need not search for what they could keep."""
    return (
        (LAYERS, rematerialize_layers),
        (OPERATORS, lambda request: rematerialize_operators(request, bool(found))),
    )


def _way(name: str, lean: Any, step_ns: int | None, refusal: PipeplanError | None) -> Way:
    if lean is None:
        return Way(name, refusal=str(refusal))
    plan = lean.rematerialization
    return Way(name, plan.method, plan.peak_bytes, step_ns)


def _neither(refusals: dict[str, PipeplanError]) -> PipeplanError:
    """What names the smallest budget, or else what is in the way of layers; with the other one."""
    order = sorted(
        (LAYERS, OPERATORS), key=lambda name: getattr(refusals[name], "least_bytes", None) or 2**63
    )
    first, other = order
    refusals[first].add_note(f"{other}: {refusals[other]}")
    return refusals[first]


def _step_times(
    request: RematerializationRequest[Module], leans: Sequence[nn.Module]
) -> list[int]:
    """Medians of steps with the sample, one of each in turns; the module is left as it was."""
    request.say(f"timing {request.repeats} steps of each")
    rows = []
    with as_it_was(request.touched, request.place), gradients(request.touched):
        for _ in range(1 + request.repeats):
            rows.append([_step(each, request) for each in leans])
    return [round(statistics.median(column)) for column in zip(*rows[1:], strict=True)]


def _step(lean: nn.Module, request: RematerializationRequest[Module]) -> int:
    taken, clock = request.sample, request.place.clock
    source = taken.source.detach().requires_grad_(taken.source.requires_grad)
    begin = clock.mark()
    result = lean(source)
    if taken.loss is not None:
        result = taken.loss[0](result, taken.loss[1])
    cast = torch.autocast(request.place.device.type, enabled=False)
    with cast:
        result.backward(torch.ones_like(result))
    return clock.between(begin, clock.mark())
