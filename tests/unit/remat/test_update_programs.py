"""The judge of programs with updates, by hand: what the host has, and when it updates."""

from __future__ import annotations

import pytest

from pipeplan.operator_graph import Operation, OperatorGraph, Phase, Storage, StorageKind
from pipeplan.remat import HostLink
from pipeplan.remat.programs import Placement, ProgramOutcome, judge
from tests.operator_graphs import program

X, W, M, Y, TY, G = range(6)
FORWARD, BACKWARD, ON_DEVICE, ON_HOST = range(4)
_KIND = StorageKind
SECOND = 10**9


def _graph() -> OperatorGraph:
    """One parameter of 4 bytes, its states of 8, its gradient of 4."""
    storages = (
        Storage(name="x", bytes=1, kind=_KIND.INPUT),
        Storage(name="w", bytes=4, kind=_KIND.PARAMETER),
        Storage(name="m", bytes=8, kind=_KIND.OPTIMIZER),
        Storage(name="y", bytes=2, kind=_KIND.ACTIVATION),
        Storage(name="ty", bytes=2, kind=_KIND.TANGENT),
        Storage(name="g", bytes=4, kind=_KIND.GRADIENT),
    )
    operations = (
        Operation(name="f", phase=Phase.FORWARD, reads=(X, W), writes=(Y,), time_ns=SECOND),
        Operation(
            name="b", phase=Phase.INPUT_GRADIENT, reads=(X, W, TY), writes=(G,), time_ns=SECOND
        ),
        Operation(name="u", phase=Phase.UPDATE, reads=(W, G, M), writes=(W, M), time_ns=2),
        Operation(name="host u", phase=Phase.UPDATE, reads=(W, G, M), writes=(W, M), time_ns=50),
    )
    return OperatorGraph(name="step", storages=storages, operations=operations, outputs=(Y,))


ON_THE_DEVICE = [
    f"run {FORWARD}",
    "end F",
    f"free {Y}",
    f"run {BACKWARD}",
    f"free {TY}",
    "end I",
    f"run {ON_DEVICE}",
    f"free {G}",
]
ON_THE_HOST = [
    f"prefetch {W}",
    f"wait {W}",
    *ON_THE_DEVICE[:6],
    f"free {W}",
    f"copy {G}",
    f"wait {G}",
    f"free {G}",
    f"host {ON_HOST}",
    f"free {G}",
]
AWAY = Placement(frozenset(), frozenset({W, M}))
LINK = HostLink(4, duplex=True)


def _judged(lines: list[str], begin: Placement | None = None) -> ProgramOutcome:
    return judge(_graph(), program(lines), None, LINK, begin)


def test_an_update_on_the_device_is_in_place() -> None:
    """The peak is the backward's: parameter, states, input, tangent, gradient."""
    outcome = _judged(ON_THE_DEVICE)
    assert outcome.violations == ()
    assert outcome.peak_bytes == 4 + 8 + 1 + 2 + 4
    assert outcome.makespan_ns == 2 * SECOND + 2
    assert outcome.host_peak_bytes == 0


def test_an_update_on_the_host_keeps_states_there() -> None:
    """Copies of 4 bytes take a second each way; the host has places for w, m and g."""
    outcome = _judged(ON_THE_HOST, AWAY)
    assert outcome.violations == ()
    assert outcome.peak_bytes == 4 + 1 + 2 + 4
    assert outcome.host_peak_bytes == 4 + 8 + 4
    assert outcome.makespan_ns == 4 * SECOND + 50


def test_a_copy_stays_and_the_host_waits_for_it() -> None:
    """A copy holds no further bytes; the host begins behind it though no one waits."""
    lines = [*ON_THE_DEVICE, f"copy {W}", f"wait {W}", f"free {W}"]
    begin = Placement(frozenset({M}), frozenset({W}))
    outcome = _judged([f"prefetch {W}", f"wait {W}", *lines], begin)
    assert outcome.violations == ()
    assert outcome.steps[-3].bytes == 4 + 8 + 1
    assert outcome.steps[-1].host_bytes == 4


def test_gradients_may_wait_for_the_next_step() -> None:
    """What one step leaves, the next updates before it reads."""
    begin = Placement(frozenset(), frozenset({W, M, G}))
    update, rest = ON_THE_HOST[-2:], ON_THE_HOST[:-2]
    outcome = _judged([*update, *rest], begin)
    assert outcome.violations == ()
    # The value comes back behind the host's update.
    assert outcome.steps[2].start_ns == 50


BROKEN = {
    "(A6)": ["offload 1"],
    "(A12) it is no state": ["copy 0"],
    "(A13) the host has not its value": ["free 1"],
    "(A14) storage 1 is on the device, need it on the host": [f"host {ON_HOST}"],
    "(A14) the graph has no such update": [f"host {FORWARD}"],
    "(A14) storage 5 is not there": [f"run {ON_DEVICE}"],
}


@pytest.mark.parametrize("message", BROKEN)
def test_each_rule_is_enforced(message: str) -> None:
    """The first instruction breaks it."""
    (violation,) = _judged([*BROKEN[message], *ON_THE_DEVICE]).violations
    assert message in violation


def _without(lines: list[str], line: str) -> list[str]:
    return [each for each in lines if each != line]


ENDS = {
    "(A15) reads storage 1, whose update has not run": (
        ON_THE_HOST,
        Placement(frozenset(), frozenset({W, M, G})),
    ),
    "(A13) the host has not its value": (
        [each for each in ON_THE_DEVICE if each != f"run {ON_DEVICE}"],
        None,
    ),
    "(A16) storage 1 is not updated once": ([*ON_THE_DEVICE[:3], f"free {TY}", "end I"], None),
    "(A11) storage 1 is on the host": ([*ON_THE_DEVICE, f"copy {W}", f"wait {W}"], None),
    "the begin: (A16) storage 2 is neither": (ON_THE_HOST, Placement(frozenset(), frozenset({W}))),
    "the begin: (A16) storage 3 does not stay": (
        ON_THE_HOST,
        Placement(frozenset({Y, W, M}), frozenset()),
    ),
}


@pytest.mark.parametrize("message", ENDS)
def test_each_end_is_checked(message: str) -> None:
    """Both ends of a step are alike, each update runs once, in time."""
    lines, begin = ENDS[message]
    violations = _judged(lines, begin).violations
    assert any(message in each for each in violations), violations
