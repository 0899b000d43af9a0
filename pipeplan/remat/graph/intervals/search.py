"""The least further time within a pair of budgets, with a bound; the door of this room."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import gcd
from typing import Any

from pipeplan.remat.graph.intervals.model import IntervalModel
from pipeplan.remat.graph.intervals.slots import Slots
from pipeplan.remat.graph.ledger import Ledger, Order
from pipeplan.remat.graph.orders import fits, further, tidy
from pipeplan.solver_threads import SolverThread, run_threads

MOST_UNITS = 2**40
"""Units of memory into which a peak is divided at most: CP-SAT counts in 64 bits."""


@dataclass(frozen=True)
class IntervalAnswer:
    """What a search knows at its end.

    Attributes:
        order: the best order, or None where none is known.
        bound_ns: further time that no order of the slots is below; None where there is no order.
        proven: whether the order is best, or there is none.
    """

    order: Order | None
    bound_ns: int | None
    proven: bool


@dataclass(frozen=True)
class SearchLimits:
    """What a search may take.

    Attributes:
        seconds: of wall-clock time.
        workers: of CP-SAT.
        deterministic: units of CP-SAT's deterministic time, so that a search ends where it ended
            before; None without limit.
    """

    seconds: float = 60.0
    workers: int = 1
    deterministic: float | None = None


def search(
    slots: Slots,
    peak: int,
    saved: int | None = None,
    limits: SearchLimits | None = None,
    hint: Order | None = None,
    least_ns: int = 0,
) -> IntervalAnswer:
    """The order of least further time whose bytes are within the budgets.

    Sizes are counted in their common divisor. Where a peak has more than `MOST_UNITS` of it, sizes
    are rounded up and budgets down: what is found keeps the budgets, and nothing is proven.

    Args:
        slots: where operations may run.
        peak: bytes, inputs included.
        saved: bytes that may be held at the end of the forward, inputs and tangents not counted.
        limits: time and workers.
        hint: an order to start from; taken as it is where it costs nothing.
        least_ns: further time that is known to be needed.
    """
    from ortools.sat.python import cp_model

    ledger = slots.ledger
    common = gcd(*ledger.size, *(each.workspace_bytes for each in ledger.graph.operations)) or 1
    unit = max(common, -(-(peak - ledger.constant) // MOST_UNITS))
    exact = unit == common
    cap = (peak - ledger.constant) // unit
    if cap < 0:
        return IntervalAnswer(None, None, True)
    units = [-(-each // unit) for each in ledger.size]
    during = [-(-each // unit) for each in _during(ledger, units, unit)]
    model = IntervalModel(
        cp_model.CpModel(), slots, cap, None if saved is None else saved // unit, units, during
    )
    known = None if hint is None or not fits(ledger, hint, peak, saved) else further(ledger, hint)
    if known == least_ns:
        return IntervalAnswer(hint, least_ns, True)
    model.build(known, least_ns)
    if hint is not None:
        model.runs.hint(hint)
    status, solver = run_model(model, limits or SearchLimits())
    known_order = None if known is None else hint
    if status == cp_model.INFEASIBLE:
        bound = known if exact else least_ns
        return IntervalAnswer(known_order, bound, exact)
    bound = max(least_ns, int(solver.best_objective_bound)) if exact else least_ns
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return IntervalAnswer(known_order, bound, False)
    order = tidy(ledger, model.runs.order(solver.value))
    return IntervalAnswer(order, bound, exact and status == cp_model.OPTIMAL)


def run_model(
    model: IntervalModel, limits: SearchLimits, linearization: int = 0
) -> tuple[Any, Any]:
    """CP-SAT's status, and the solver behind it; `linearization` is its level.

    Ctrl-C ends it and is raised. The propagation of `IntervalModel._heads` proves more in a second
    than linear relaxations do, but for models with choices.
    """
    from ortools.sat.python import cp_model

    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = limits.seconds
    solver.parameters.num_workers = limits.workers
    solver.parameters.random_seed = 0
    solver.parameters.linearization_level = linearization
    solver.parameters.catch_sigint_signal = False
    if limits.deterministic is not None:
        solver.parameters.max_deterministic_time = limits.deterministic
    (status,) = run_threads([SolverThread(partial(solver.solve, model.cp), solver.stop_search)])
    return status, solver


def _during(ledger: Ledger, units: list[int], unit: int) -> list[int]:
    return [
        sum(units[s] for s in writes) * unit + each.workspace_bytes
        for writes, each in zip(ledger.writes, ledger.graph.operations, strict=True)
    ]
