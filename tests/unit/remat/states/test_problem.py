"""Problems that mean nothing are refused where they are made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from pipeplan.errors import InputError
from pipeplan.remat.states.problem import StateProblem
from tests.offmate import step_of_training


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: step_of_training(bandwidth=0), "machine: bandwidth: got 0"),
        (lambda: step_of_training(host_update=0), "host_update: got 0.*Give None"),
        (lambda: step_of_training(host_update=-1), "host_update: got -1"),
        (lambda: step_of_training(management_s=-1), "management_ns: got -1"),
        (lambda: _other_machine(device_update=0), "device_update: got 0"),
        (lambda: replace(step_of_training(), blocks=(), groups=()), "got no blocks"),
    ],
)
def test_what_means_nothing_is_refused(make: Callable[[], StateProblem], words: str) -> None:
    """Rates, the host's own time, blocks."""
    with pytest.raises(InputError, match=words):
        make()


def _other_machine(**changes: int) -> StateProblem:
    problem = step_of_training()
    return replace(problem, machine=replace(problem.machine, **changes))
