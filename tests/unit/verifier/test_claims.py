"""Bounds, gap and status: what a plan may claim, beside the mutations of the rules."""

from __future__ import annotations

from pipeplan.plan import Bounds, Solver
from pipeplan.verifier import verify
from tests import handmade


def test_true_claims_are_accepted() -> None:
    """A proven gap, an optimal status, and a bound of a class the plan is not in."""
    for claim in (
        Solver(bounds=Bounds(any=(50, 1)), gap=0.2),
        Solver(bounds=Bounds(any=(60, 1)), gap=0.0, status="optimal"),
        Solver(bounds=Bounds(any=(0, 1))),
        Solver(bounds=Bounds(any=(50, 1), k1=(120, 2), contiguous=(99, 1)), gap=0.2),
    ):
        assert verify(handmade.with_(handmade.base(), solver=claim)) == ()


def test_a_bound_for_few_microbatches_says_nothing_of_more() -> None:
    """A plan with more per step may be shorter than what is proven for less."""
    base = handmade.base()
    for most, broken in ((base.microbatches, []), (1, ["solver.most_microbatches"])):
        claim = Solver(bounds=Bounds(any=(50, 1)), gap=0.2, most_microbatches=most)
        assert [v.where for v in verify(handmade.with_(base, solver=claim))] == broken


def test_contiguous_bound_binds_contiguous_plans() -> None:
    """On a plan with one stage per GPU, a contiguous bound above its period is refused."""
    chain = handmade.chain([(1, 1), (1, 1)])
    times = {"0F0": 0, "1F0": 1, "1B0": 2, "0B0": 3}
    plan = handmade.plan(chain, [(0, 0, 0), (1, 1, 1)], 2, times)
    claim = Solver(bounds=Bounds(contiguous=(3, 1)))
    assert [v.where for v in verify(handmade.with_(plan, solver=claim))] == [
        "solver.bounds.contiguous"
    ]


def test_the_bound_is_per_microbatch() -> None:
    """With k = 2 a period of 4 takes 2 per micro-batch: 2 is optimal, k1 is not judged."""
    chain = handmade.chain([(1, 1)])
    plan = handmade.plan(chain, [(0, 0, 0)], 4, {"0F0": 0, "0B0": 1, "0F1": 2, "0B1": 3}, k=2)
    claim = Solver(bounds=Bounds(any=(2, 1), k1=(3, 1)), gap=0.0, status="optimal")
    assert verify(handmade.with_(plan, solver=claim)) == ()
