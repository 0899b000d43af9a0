"""Time constraints of the periodic model: (R2)-(R5) at a fixed period, in ticks."""

from __future__ import annotations

from pipeplan.ilp.periodic.constraints import (
    F,
    add_chain,
    add_fifo,
    add_loads,
    add_tied,
    compute_tasks,
)
from pipeplan.ilp.periodic.resources import add_gpus, add_links
from pipeplan.ilp.periodic.turns import add_turns
from pipeplan.ilp.periodic.variables import Variables


def add_times(v: Variables) -> None:
    """Create all ops and keep precedence, exclusivity and FIFO."""
    for task in compute_tasks(v.instance):
        v.add_task(task)
    v.model.add(v.position[F, 0, 0] == v.period)
    v.model.add(v.turn[F, 0, 0] == 0)
    add_chain(v)
    add_gpus(v)
    add_links(v)
    add_turns(v)
    add_fifo(v)
    add_loads(v)
    add_tied(v)
