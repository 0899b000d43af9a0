"""Plans of one GPU that offload: several stages, one micro-batch at a time."""

from __future__ import annotations

from typing import Final

from pipeplan.ilp.incumbent import Incumbent
from pipeplan.ilp.offload.one_at_a_time import DeviceShare, OneAtATime

NAME: Final = "one at a time"
LOOK_S: Final = 3e-5
"""What planning all that leaves counts for, for each pair of layers, where work is counted."""


def applies(state: Incumbent) -> bool:
    """Whether there is one GPU, it may offload, and it may host several stages."""
    options = state.options
    allowed = options.offload and not (options.contiguous_only or options.whole_step)
    return allowed and state.costs.gpus == 1


def run(state: Incumbent, seconds: float) -> None:
    """What the per-device planner finds at once, then with local search while there is time."""
    state.set_phase(NAME)
    end = state.elapsed + seconds
    found = _planner(state)

    def search() -> None:
        found.improve(lambda: state.elapsed < end)

    def choose() -> None:
        left = max(0.0, end - state.elapsed)
        over = state.options.clock.limit(left, LOOK_S * state.costs.layers**2)
        found.choose(lambda: not over())

    any(map(state.offer, found.schedules()))
    for step in (search, choose, search):
        if state.done:
            return
        step()
        any(map(state.offer, found.schedules()))


def offer(state: Incumbent, *, quick: bool = False) -> bool:
    """Whether a schedule that is found at once, or at a first look, fits."""
    return any(map(state.offer, _planner(state, quick=quick).schedules()))


def _planner(state: Incumbent, *, quick: bool = False) -> OneAtATime:
    """Of the whole chain."""
    costs = state.costs
    share = DeviceShare((0, costs.layers - 1), 0, costs.budgets[0])
    return OneAtATime(costs, share, quick=quick)
