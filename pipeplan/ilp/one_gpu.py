"""Plans of one GPU that offload: several stages, one micro-batch at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from pipeplan.ilp.incumbent import Incumbent
from pipeplan.ilp.offload.one_at_a_time import one_at_a_time
from pipeplan.remat.late_acceptance import always

NAME: Final = "one at a time"


def applies(state: Incumbent) -> bool:
    """Whether there is one GPU, it may offload, and it may host several stages."""
    options = state.options
    allowed = options.offload and not (options.contiguous_only or options.whole_step)
    return allowed and state.costs.gpus == 1


def run(state: Incumbent, seconds: float) -> None:
    """What the per-device planner finds at once, then with local search while there is time."""
    state.set_phase(NAME)
    end = state.elapsed + seconds
    offer(state)
    if not state.done:
        offer(state, more=1, go_on=lambda: state.elapsed < end)


def offer(state: Incumbent, more: int = 0, go_on: Callable[[], bool] = always) -> bool:
    """Whether a schedule of `one_at_a_time` fits, whose arguments these are."""
    return any(map(state.offer, one_at_a_time(state.costs, more, go_on)))
