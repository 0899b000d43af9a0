"""Time constraints of the periodic model: (R2)-(R5) at a fixed period, in ticks."""

from __future__ import annotations

from pipeplan.ilp.cpsat.no_overlap import add_gpus, add_links
from pipeplan.ilp.cpsat.precedence import (
    F,
    add_chain,
    add_fifo,
    add_loads,
    add_tied,
    compute_tasks,
)
from pipeplan.ilp.cpsat.shifts import add_shifts
from pipeplan.ilp.cpsat.variables import Variables


def add_times(v: Variables) -> None:
    """Create all ops and keep precedence, exclusivity and FIFO."""
    for task in compute_tasks(v.instance):
        v.add_task(task)
    v.model.add(v.position[F, 0, 0] == v.period)
    v.model.add(v.shift[F, 0, 0] == 0)
    add_chain(v)
    add_gpus(v)
    add_links(v)
    add_shifts(v)
    add_fifo(v)
    add_loads(v)
    add_tied(v)
