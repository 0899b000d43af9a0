"""H-ILP as written: the interval form's optimum, families of constraints, what is refused."""

from __future__ import annotations

from functools import cache

import pytest

from pipeplan.errors import InputError
from pipeplan.operator_graph import StorageKind
from pipeplan.remat.graph import SearchLimits
from pipeplan.remat.graph.hierarchy.h_ilp import FAMILIES, HIlp
from pipeplan.remat.graph.hierarchy.h_partition import Sizes
from pipeplan.remat.graph.hierarchy.level import ClusterLevel
from pipeplan.remat.graph.hierarchy.solve_level import LevelSolver
from pipeplan.remat.graph.orders import peak_bytes
from pipeplan.testing.random_graphs import paired_graph
from tests import grids
from tests.integer_programs import excludes
from tests.unit.remat.graph.test_hierarchy import solved

THREE = Sizes(top=3, lower=3, operations=3)


@cache
def level(seed: int) -> tuple[ClusterLevel, int]:
    """Three clusters of two forwards each, and the bytes with every operation once."""
    hierarchy = solved(paired_graph(seed, 6), THREE)
    ledger = hierarchy.ledger
    room = peak_bytes(ledger, ledger.first_order()) - ledger.constant
    return hierarchy.highest.level, room


@grids.first(1, seed=range(8))
def test_h_ilp_is_the_interval_forms_optimum(seed: int) -> None:
    """As printed no forward runs again; with forwards of which nothing is kept, one time more."""
    found, room = level(seed)
    assert any(len(part.ways) > 1 for part in found.parts)
    times = []
    for peak in range(room, room // 2, -5):
        for fast, runs in ((False, 1), (True, 2)):
            exact = LevelSolver(found, runs).solve(peak, None, SearchLimits(20))
            written = HIlp(found, peak, fast, runs).solve()
            assert written.proven
            assert exact is None or exact.proven
            assert written.objective == (None if exact is None else exact.further_ns)
            times.append(written.objective)
    assert len(set(times)) > 2


@grids.first(1, seed=range(4))
def test_as_printed_no_forward_runs_twice(seed: int) -> None:
    """(3.18) leaves its phantom to its backward, so that more runs allowed change nothing."""
    found, room = level(seed)
    for peak in range(room, room // 2, -9):
        printed = HIlp(found, peak).solve()
        assert printed.objective == HIlp(found, peak, runs=1).solve().objective
        assert all(printed.runs.count(j) == 1 for j in range(3)) or not printed.runs


@cache
def two() -> tuple[ClusterLevel, int]:
    """Two clusters; one has three ways, of which not all read the same."""
    hierarchy = solved(paired_graph(0, 4), Sizes(top=2, lower=2, operations=2))
    ledger = hierarchy.ledger
    return hierarchy.highest.level, peak_bytes(ledger, ledger.first_order()) - ledger.constant


IMPLIED = {"not_saved_before_made", "final_values_are_there", "alive_or_deleted"}
"""(3.6) follows from (3.7) and (3.11); (3.8) from (3.9) where the last computation makes all that
is final; (3.22) from (3.21), (3.24) and (3.25) where one computation makes an allocation."""
LARGER = {"one_phantom"}
"""Of clusters with several ways, not the first one alone may run again before the last stage."""


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(each, marks=pytest.mark.long if each in IMPLIED | LARGER else ())
        for each in FAMILIES
    ],
)
def test_every_family_of_h_ilp_counts(family: str) -> None:
    """Each rules out what all others allow, as printed or with `fast`, but for what follows."""
    found, room = level(0) if family in LARGER else two()
    budget = room if family == "within_budget" else 2 * room
    rules = any(
        excludes(lambda left, fast=fast: HIlp(found, budget, fast, leave_out=left), family)
        for fast in (True, False)  # with it most are seen sooner
    )
    assert rules is (family not in IMPLIED)


def test_received_storages_are_refused() -> None:
    """The thesis knows inputs that stay."""
    plain = paired_graph(0, 4)
    kinds = [
        each.model_copy(update={"kind": StorageKind.RECEIVED}) if each.name == "x" else each
        for each in plain.storages
    ]
    found = solved(plain.model_copy(update={"storages": tuple(kinds)}), THREE)
    with pytest.raises(InputError, match="receives"):
        HIlp(found.highest.level, 100)
