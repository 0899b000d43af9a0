"""O-ILP: each family of constraints counts, the batch as a variable, solvers agree."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from pipeplan.errors import InfeasibleError, InputError
from pipeplan.remat.graph.milp.linear import Constraint, add, run
from pipeplan.remat.states.o_ilp import FAMILIES, OIlp
from pipeplan.remat.states.problem import ParameterGroup, StateProblem
from pipeplan.remat.states.solve import plan_states, relax
from tests.offmate import step_of_training

TIGHT = step_of_training(device=45, bandwidth=4)
"""Little room and a slow way: copies decide."""
SLOW_HOST = step_of_training(device=48, host_update=1, management_s=0.2)
"""The host's own time decides."""
FULL_HOST = step_of_training(device=60, host=60)
"""The host has no room for all."""
ROOMY = step_of_training(device=200, host_update=None)
"""Forwards and backwards decide."""


def _sided(problem: StateProblem) -> StateProblem:
    """Groups of later blocks are updated on the host."""
    groups = tuple(replace(each, on_host=each.blocks[0] > 1) for each in problem.groups)
    return replace(problem, groups=groups)


CASES = (TIGHT, SLOW_HOST, FULL_HOST, ROOMY)


def _least(problem: StateProblem, leave_out: str | None = None) -> float:
    """The shortest step with options that may be mixed; infinite where there is none."""
    program = OIlp(problem, relaxed=True, leave_out=leave_out)
    found, feasible, proven = run(program.model, "highs", 30)
    assert proven
    return found.objective_value if feasible else float("inf")


@pytest.mark.parametrize("family", [each for each in FAMILIES if each != "new_values_stay"])
def test_every_family_counts(family: str) -> None:
    """Without it some step would be shorter."""
    assert any(_least(each, family) < _least(each) - 1e-3 for each in CASES)


def test_new_values_and_gradients_take_room_each() -> None:
    """The one family of ours: without it, parts of both stand for each other."""
    problem = _sided(step_of_training(device=60))
    rows = range(len(list(OIlp(problem).new_values_stay())))
    assert any(_allowed_beyond(problem, row) for row in rows)


def _allowed_beyond(problem: StateProblem, row: int) -> bool:
    """Whether all other families allow a solution that breaks the row of `new_values_stay`."""
    program = OIlp(problem, relaxed=True, leave_out="new_values_stay")
    broken = list(program.new_values_stay())[row].expression
    add(program.model, Constraint(broken, 0.1, float("inf")))
    return run(program.model, "highs", 30)[1]


def test_solvers_agree() -> None:
    """HiGHS and SCIP find the same optimum, and prove it."""
    found = {solver: relax(TIGHT, 30, solver) for solver in ("highs", "scip")}
    assert found["highs"].step_ns == pytest.approx(found["scip"].step_ns, rel=1e-6)
    assert found["highs"].bound_ns == pytest.approx(found["highs"].step_ns, rel=1e-3)


def test_a_larger_batch_shares_the_copies() -> None:
    """Section 4.5.3: of the batches within bounds, none has less time for each sample."""
    chosen = relax(TIGHT, 30, batches=(0.5, 2.0))
    fixed = {batch: relax(TIGHT, 30, batches=(batch, batch)).step_ns for batch in (0.5, 1.0)}
    assert fixed[1.0] == pytest.approx(relax(TIGHT, 30).step_ns, rel=1e-6)
    assert chosen.step_ns <= min(fixed.values()) + 1e-6
    assert 0.5 <= chosen.batch <= 2.0
    at_choice = relax(TIGHT, 30, batches=(chosen.batch, chosen.batch))
    assert at_choice.step_ns == pytest.approx(chosen.step_ns, rel=1e-6)


def test_bad_problems_are_refused() -> None:
    """Indices, options and activations that have no time to leave."""
    tensors = TIGHT.groups[0].tensors
    with pytest.raises(InputError, match="block 9"):
        replace(TIGHT, groups=(ParameterGroup("w", tensors, (9,)),))
    with pytest.raises(InputError, match="ascending"):
        replace(TIGHT, groups=(ParameterGroup("w", tensors, (1, 0)),))
    with pytest.raises(InputError, match="no option"):
        replace(TIGHT, blocks=(replace(TIGHT.blocks[0], options=()), *TIGHT.blocks[1:]))
    last = replace(TIGHT.blocks[-1], options=TIGHT.blocks[0].options)
    with pytest.raises(InputError, match="last block"):
        replace(TIGHT, blocks=(*TIGHT.blocks[:-1], last))


def test_the_least_of_all_options_is_found() -> None:
    """The integer program equals the best of all choices of options, each a linear program."""
    problem = step_of_training(blocks=3, device=46, bandwidth=8)
    best = float("inf")
    for options in product(*(range(len(block.options)) for block in problem.blocks)):
        program = OIlp(problem, options=options, relaxed=True)
        found, feasible, _ = run(program.model, "highs", 30)
        if feasible:
            best = min(best, found.objective_value * program.unit_ns)
    assert best < float("inf")
    assert relax(problem, 30).step_ns == pytest.approx(best, rel=1e-6)


def test_no_room_is_said() -> None:
    """A device that cannot hold one block's backward."""
    with pytest.raises(InfeasibleError, match="there is no plan"):
        plan_states(step_of_training(device=10), 30)
