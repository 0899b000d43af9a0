"""The planners by name, each judged before its schedule is handed out, and the way they refuse."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from pipeplan.errors import InfeasibleError, InputError, InternalError
from pipeplan.remat.checkpointing.periodic import keep_all, periodic_within
from pipeplan.remat.checkpointing.revolve import revolve_within
from pipeplan.remat.checkpointing.rotor import rotor
from pipeplan.remat.combined.pofo import pofo
from pipeplan.remat.cpsat.exact import exact_offload
from pipeplan.remat.late_acceptance import GoOn, always, late_acceptance
from pipeplan.remat.min_memory import least_memory, least_with_host
from pipeplan.remat.offloading.compute_order import ComputeOrder, compute_order
from pipeplan.remat.offloading.dynprog import dynprog
from pipeplan.remat.offloading.no_wait import NoWaitSchedule, no_wait
from pipeplan.remat.offloading.selection import (
    UnitSet,
    autoswap,
    fastest_set,
    greedy,
    ranked_sets,
    tflms,
    vdnn,
)
from pipeplan.remat.schedules.costs import Costs
from pipeplan.remat.schedules.host_link import HostLink
from pipeplan.remat.schedules.replay import INSTANT, Outcome, judge
from pipeplan.remat.schedules.schedule import DeviceOpKind, DeviceSchedule
from pipeplan.units import format_bytes


@dataclass(frozen=True)
class Rematerialization:
    """A schedule within the budget, the method that found it, and what the judge says of it."""

    method: str
    schedule: DeviceSchedule
    outcome: Outcome
    budget: int

    @property
    def peak_bytes(self) -> int:
        """The most bytes."""
        return self.outcome.peak_bytes


_MAX_LAYERS = 500
_MAX_ENTRIES = 2**28
"""Of a dynamic program's table: two tables of 8 bytes each stay below 4 GiB."""
POFO_SLOTS = 50
"""Slots of POFO at most: its tables grow with their square."""
FINER = 10
"""How many times more slots our offloading takes for DYNPROG's program."""
EXACT_S = 10.0
MORE = 2
"""How many times more changes are tried before the exact search."""


@dataclass(frozen=True)
class RematProblem:
    """What a planner is asked; `channel` is None where nothing may be offloaded."""

    costs: Costs
    budget: int
    slots: int
    channel: HostLink | None

    @property
    def host(self) -> HostLink:
        """The channel of a method that offloads."""
        return self.channel or INSTANT

    @cached_property
    def line(self) -> ComputeOrder:
        """The order that keeps everything, for methods that only offload."""
        return compute_order(self.costs, keep_all(self.costs))


Planner = Callable[[RematProblem], tuple[DeviceSchedule, ...]]
"""Candidates; the best is taken, or the smallest names the minimum."""


def _rotor(problem: RematProblem) -> tuple[DeviceSchedule, ...]:
    # Rounding to slots may lose the last bytes; the two ends of the curve need no rounding.
    costs, budget = problem.costs, problem.budget
    smallest = least_memory(costs)
    if judge(costs, smallest).peak_bytes > budget:
        return (smallest,)
    found = rotor(costs, budget, problem.slots)
    return tuple(each for each in (found, smallest, keep_all(costs)) if each is not None)


def _offload(problem: RematProblem, sets: Iterable[UnitSet]) -> tuple[DeviceSchedule, ...]:
    """The best of `sets`, and what needs least memory: everything away that may be."""
    line, channel = problem.line, problem.host
    found = fastest_set(line, sets, problem.budget, channel)
    if found is not None:
        return (found[1].schedule,)
    everything = frozenset(unit.index for unit in line.units)
    smallest = no_wait(line, everything, max(problem.budget, line.least), channel)
    return () if smallest is None else (smallest.schedule,)


def _greedy(problem: RematProblem) -> tuple[DeviceSchedule, ...]:
    return _offload(problem, [greedy(problem.line, problem.budget)])


def _dynprog(problem: RematProblem) -> tuple[DeviceSchedule, ...]:
    line, budget, channel = problem.line, problem.budget, problem.host
    found = dynprog(line, budget, channel, problem.slots)
    if not found:
        # Where rounding leaves no room; GREEDY's choice needs no rounding.
        return _greedy(problem)
    fitted = late_acceptance(line, found[0][0], budget, channel)
    return () if fitted is None else (fitted.schedule,)


def _vdnn(problem: RematProblem) -> tuple[DeviceSchedule, ...]:
    return _offload(problem, vdnn(problem.line))


def _autoswap(problem: RematProblem) -> tuple[DeviceSchedule, ...]:
    return _offload(problem, autoswap(problem.line, problem.budget, problem.host))


def _tflms(problem: RematProblem) -> tuple[DeviceSchedule, ...]:
    found = tflms(problem.line, problem.budget, problem.host)
    return () if found is None else (found.schedule,)


def local_search(
    line: ComputeOrder,
    budget: int,
    channel: HostLink,
    slots: int,
    more: int = 1,
    go_on: GoOn = always,
) -> NoWaitSchedule | None:
    """The fastest schedule found around the best sets of DYNPROG, finer DYNPROG and all others.

    Args:
        line: the operations.
        budget: bytes of the device.
        channel: the way to the host.
        slots: of DYNPROG's table.
        more: times as many changes as `swap` tries; 0: only the sets themselves, without TFLMS,
            which takes longer than all of them.
        go_on: whether there is time for a few more changes.
    """
    others = [greedy(line, budget), *vdnn(line), *autoswap(line, budget, channel)]
    ranked = [dynprog(line, budget, channel, count) for count in (slots, FINER * slots)]
    ranked.append(ranked_sets(line, others, budget, channel))
    starts = dict.fromkeys(each[0][0] for each in ranked if each)
    found = [late_acceptance(line, start, budget, channel, more, go_on) for start in starts]
    if more:
        found.append(tflms(line, budget, channel))
    known = [each for each in found if each is not None]
    return min(known, key=lambda each: each.makespan_ns, default=None)


def _searched(problem: RematProblem, more: int = 1) -> NoWaitSchedule | None:
    return local_search(problem.line, problem.budget, problem.host, problem.slots, more)


def _swap(problem: RematProblem) -> tuple[DeviceSchedule, ...]:
    found = _searched(problem)
    return _offload(problem, []) if found is None else (found.schedule,)


def _exact(problem: RematProblem) -> tuple[DeviceSchedule, ...]:
    start = _searched(problem, MORE)
    if start is None:
        return _offload(problem, [])
    proof = exact_offload(problem.line, problem.budget, problem.host, EXACT_S, start)
    return () if proof.found is None else (proof.found.schedule,)


def _pofo(problem: RematProblem) -> tuple[DeviceSchedule, ...]:
    """POFO's own schedule, and both of its parts alone: sizes are rounded differently there."""
    costs, budget, channel = problem.costs, problem.budget, problem.host
    slots = min(problem.slots, POFO_SLOTS)
    alone = RematProblem(costs, budget, slots, channel)
    found = [*_rotor(alone), *_dynprog(alone), *_greedy(alone)]
    smallest = least_with_host(costs, channel)
    found += [] if smallest is None else [smallest]
    both = pofo(costs, budget, channel, slots)
    if both is not None:
        timed = no_wait(compute_order(costs, both.base), both.units, budget, channel)
        found += [] if timed is None else [timed.schedule]
    return tuple(found)


METHODS: dict[str, Planner] = {
    "rotor": _rotor,
    "revolve": lambda problem: (revolve_within(problem.costs, problem.budget),),
    "periodic": lambda problem: (periodic_within(problem.costs, problem.budget),),
    "keep-all": lambda problem: (keep_all(problem.costs),),
    "pofo": _pofo,
    "swap": _swap,
    "dynprog": _dynprog,
    "greedy": _greedy,
    "vdnn": _vdnn,
    "autoswap": _autoswap,
    "tflms": _tflms,
    "exact": _exact,
}
OFFLOADING = ("pofo", "swap", "dynprog", "greedy", "vdnn", "autoswap", "tflms", "exact")
"""The methods that need a channel to the host."""
_AUTO = ("rotor", "revolve", "periodic", "keep-all", "pofo", "swap")
"""What `auto` tries; swap begins with what all other offloading methods find."""


def rematerialize_chain(
    costs: Costs,
    budget: int,
    method: str = "auto",
    slots: int = 500,
    channel: HostLink | None = None,
    say: Callable[[str], None] | None = None,
) -> Rematerialization:
    """The fastest schedule of `method` within `budget` bytes, static bytes included.

    Args:
        costs: the chain.
        budget: bytes of the device.
        method: a name in `METHODS`, or `auto` for the best of all.
        slots: memory units of the dynamic programs; POFO takes at most `POFO_SLOTS`.
        channel: the way to the host; None where nothing may be offloaded.
        say: hears of progress. Where it is given, Ctrl-C ends the search with what is known, if
            anything within the budget is.

    Raises:
        InputError: if the chain is too long for the tables, or the method needs a channel.
        InfeasibleError: if the method has no schedule that small; names layer and bytes.
        KeyboardInterrupt: on Ctrl-C where no schedule is known, or nobody hears of progress.
    """
    if costs.layers > _MAX_LAYERS or costs.layers**2 * slots > _MAX_ENTRIES:
        raise InputError(
            f"chain: got {costs.layers} layers with {slots} slots, need at most {_MAX_LAYERS}"
            f" layers and layers * layers * slots at most {_MAX_ENTRIES}."
            " Give fewer slots, or join layers of the chain."
        )
    if method in OFFLOADING and channel is None:
        raise InputError(
            f"method {method}: got no way to the host, need one. Give channel=HostLink(...)."
        )
    problem = RematProblem(costs, budget, slots, channel)
    tried = tuple(each for each in _AUTO if channel or each not in OFFLOADING)
    return _best(problem, method, _found(problem, tried if method == "auto" else (method,), say))


def _found(
    problem: RematProblem, methods: Iterable[str], say: Callable[[str], None] | None
) -> list[Rematerialization]:
    """What the methods find, one after the other, within the budget or not.

    Raises:
        KeyboardInterrupt: on Ctrl-C, unless somebody hears of it and something is within.
    """
    found: list[Rematerialization] = []
    try:
        for name in methods:
            if say is not None:
                say(f"trying {name}")
            found += [
                Rematerialization(
                    name, each, judge(problem.costs, each, None, problem.host), problem.budget
                )
                for each in METHODS[name](problem)
            ]
    except KeyboardInterrupt:
        if say is None or all(each.outcome.peak_bytes > problem.budget for each in found):
            raise
        say("interrupted: the best so far")
    return found


def _best(
    problem: RematProblem, method: str, found: Sequence[Rematerialization]
) -> Rematerialization:
    """The fastest of what `method` found within the budget.

    Raises:
        InternalError: if one breaks a rule.
        InfeasibleError: if nothing is within.
    """
    for each in found:
        if each.outcome.violations:
            raise InternalError(
                f"{each.method}: its schedule breaks a rule: {each.outcome.violations[0]}."
                " This is a bug of pipeplan; please report it with the chain."
            )
    if not found:
        raise InfeasibleError(
            f"budget, method {method}: got {problem.budget} bytes, need room for transfers that"
            f" nothing waits for; {problem.line.peak} keep all on the device."
            " Give more, or method=swap, which waits."
        )
    fitting = [each for each in found if each.outcome.peak_bytes <= problem.budget]
    if not fitting:
        smallest = min(found, key=lambda each: each.outcome.peak_bytes)
        refusal = InfeasibleError(_refusal(problem.costs, smallest, method))
        refusal.least_bytes = smallest.outcome.peak_bytes
        raise refusal
    return min(fitting, key=lambda each: (each.outcome.makespan_ns, each.outcome.peak_bytes))


def _refusal(costs: Costs, smallest: Rematerialization, method: str) -> str:
    step, least = smallest.outcome.peak_step, smallest.outcome.peak_bytes
    layer = min(step.op.index, costs.layers - 1)
    kept = f"{step.bytes} bytes, {costs.static} of them"
    what = "backward" if step.op.kind is DeviceOpKind.BACKWARD else "forward"
    return (
        f"budget, method {method}: got {smallest.budget} bytes, need at least {least}"
        f" ({format_bytes(least)}): the {what} of layer {layer} ({costs.names[layer]!r}) holds"
        f" {kept} weights, gradients and optimizer states."
        f" Give budget={least}, a smaller micro-batch, or split that layer."
    )
