"""The planners by name, each judged before its schedule is handed out, and the way they refuse."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pipeplan.errors import InfeasibleError, InputError, InternalError
from pipeplan.remat.costs import Costs
from pipeplan.remat.judge import Outcome, judge
from pipeplan.remat.least import least_memory
from pipeplan.remat.periodic import keep_all, periodic_within
from pipeplan.remat.revolve import revolve_within
from pipeplan.remat.rotor import rotor
from pipeplan.remat.schedule import OpKind, Schedule
from pipeplan.units import format_bytes


@dataclass(frozen=True)
class Rematerialization:
    """A schedule within the budget, the method that found it, and what the judge says of it."""

    method: str
    schedule: Schedule
    outcome: Outcome
    budget: int


_MAX_LAYERS = 500
_MAX_ENTRIES = 2**28
"""Of a dynamic program's table: two tables of 8 bytes each stay below 4 GiB."""

Planner = Callable[[Costs, int, int], tuple[Schedule, ...]]
"""(costs, budget, slots) -> candidates; the best is taken, or the smallest names the minimum."""


def _rotor(costs: Costs, budget: int, slots: int) -> tuple[Schedule, ...]:
    # Rounding to slots may lose the last bytes; the two ends of the curve need no rounding.
    smallest = least_memory(costs)
    if judge(costs, smallest).peak_bytes > budget:
        return (smallest,)
    found = rotor(costs, budget, slots)
    return tuple(each for each in (found, smallest, keep_all(costs)) if each is not None)


METHODS: dict[str, Planner] = {
    "rotor": _rotor,
    "revolve": lambda costs, budget, _: (revolve_within(costs, budget),),
    "periodic": lambda costs, budget, _: (periodic_within(costs, budget),),
    "keep-all": lambda costs, budget, _: (keep_all(costs),),
}


def rematerialize_chain(
    costs: Costs, budget: int, method: str = "auto", slots: int = 500
) -> Rematerialization:
    """The fastest schedule of `method` within `budget` bytes, static bytes included.

    Args:
        costs: the chain.
        budget: bytes of the device.
        method: a name in `METHODS`, or `auto` for the best of all.
        slots: memory units of the dynamic programs.

    Raises:
        InputError: if the chain is too long for the tables.
        InfeasibleError: if the method has no schedule that small; names layer and bytes.
    """
    if costs.layers > _MAX_LAYERS or costs.layers**2 * slots > _MAX_ENTRIES:
        raise InputError(
            f"chain: got {costs.layers} layers with {slots} slots, need at most {_MAX_LAYERS}"
            f" layers and layers * layers * slots at most {_MAX_ENTRIES}."
            " Give fewer --slots, or join layers of the chain."
        )
    names = tuple(METHODS) if method == "auto" else (method,)
    found = [
        Rematerialization(name, schedule, judge(costs, schedule), budget)
        for name in names
        for schedule in METHODS[name](costs, budget, slots)
    ]
    for each in found:
        if each.outcome.violations:
            raise InternalError(
                f"{each.method}: its schedule breaks a rule: {each.outcome.violations[0]}."
                " This is a bug of pipeplan; please report it with the chain."
            )
    fitting = [each for each in found if each.outcome.peak_bytes <= budget]
    if not fitting:
        smallest = min(found, key=lambda each: each.outcome.peak_bytes)
        raise InfeasibleError(_refusal(costs, smallest, method))
    return min(fitting, key=lambda each: (each.outcome.makespan_ns, each.outcome.peak_bytes))


def _refusal(costs: Costs, smallest: Rematerialization, method: str) -> str:
    step, least = smallest.outcome.peak_step, smallest.outcome.peak_bytes
    layer = min(step.op.index, costs.layers - 1)
    what = "backward" if step.op.kind is OpKind.BACKWARD else "forward"
    return (
        f"budget, method {method}: got {smallest.budget} bytes, need at least {least}"
        f" ({format_bytes(least)}): the {what} of layer {layer} ({costs.names[layer]!r}) holds"
        f" {step.bytes} bytes, {costs.static} of them weights, gradients and optimizer states."
        f" Give --budget {least}, a smaller micro-batch, or split that layer."
    )
