"""The search that is nothing but the paper's literal ILP: a reference, not a rival."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from ortools.util.python.solve_interrupter import SolveInterrupter

from pipeplan.errors import InputError
from pipeplan.ilp.bounds.load import closed_form_bound
from pipeplan.ilp.incumbent import Incumbent
from pipeplan.ilp.paper import method as paper_ilp
from pipeplan.ilp.paper.method import PaperResult

NOTE = "method paper-ilp minimizes over plans with k = 1; method auto tries more"


def search(state: Incumbent) -> None:
    """Solve the ILP (1)-(36) into `state`, from its best schedule if it has one.

    Ctrl-C ends it early.

    Raises:
        InputError: if chain, cluster or options are outside the paper's setting.
        KeyboardInterrupt: on Ctrl-C before any plan was found.
    """
    _check(state)
    state.set_phase("paper ilp")
    result = _answer(state)
    if result.status == "infeasible":
        state.infeasible = (
            f"chain {state.costs.chain.name!r}: no plan exists: the paper's ILP has no solution on"
            f" {state.costs.gpus} GPUs of {state.costs.budgets[0]} bytes. Method auto says what"
            " is missing; more memory, more GPUs or a smaller micro-batch would help."
        )
        return
    state.raise_bound("any", closed_form_bound(state.costs))
    if result.bound is not None:
        state.raise_bound("k1", result.bound)
    if result.schedule is not None:
        state.offer(result.schedule)
    state.notes.append(NOTE)


def _check(state: Incumbent) -> None:
    if state.costs.semantics != "2bw":
        raise InputError(
            f"method paper-ilp, semantics: got {state.costs.semantics!r}, need '2bw': the paper's"
            " pipeline never drains. Use --method auto."
        )
    if state.options.ks != (1,):
        raise InputError(
            f"method paper-ilp, k: got {state.options.ks[0]}, need 1: the paper's period holds"
            " one micro-batch. Use --method auto."
        )


def _answer(state: Incumbent) -> PaperResult:
    """Solve in a thread of its own, so that Ctrl-C is heard and stops it."""
    interrupter = SolveInterrupter()
    options = state.options
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(
            paper_ilp.solve,
            state.costs,
            time_limit=state.remaining,
            in_flight_limit=state.most_in_flight,
            start=state.best,
            workers=options.workers,
            seed=options.seed,
            deterministic=options.deterministic,
            interrupter=interrupter,
        )
        try:
            return answer.result()
        except KeyboardInterrupt:
            interrupter.interrupt()
            result = answer.result()
            if result.schedule is None and state.best is None:
                raise
            state.set_phase("interrupted")
            return result
