"""Exclusive use of GPUs and links in the periodic model: (R3), (R4).

All resources share one window: every op ends between T and 2 T. So an op may start before T, and
two ops of one resource are disjoint modulo T where they are disjoint and the later one ends at
most T after the earlier one starts.
"""

from __future__ import annotations

from itertools import combinations

from ortools.sat.python import cp_model

from pipeplan.ilp.cpsat.precedence import SEND_F, compute_tasks, send_length, sends
from pipeplan.ilp.cpsat.variables import Linear, Literal, Task, Variables

Use = tuple[cp_model.LinearExpr, int, Literal]
"""Start, length and existence of one op on one resource."""


def add_gpus(v: Variables) -> None:
    """(R3): no overlap, and an order literal for every pair that may share a GPU."""
    model, tasks = v.model, compute_tasks(v.instance)
    for task in tasks:
        _within(v, v.position[task] + v.length(task))
    for gpu in v.instance.gpus:
        intervals = []
        for task in tasks:
            here = v.on[task[1]][gpu]
            if not isinstance(here, int) or here:
                intervals.append(_interval(v, task, v.length_on(task, gpu), here))
        model.add_no_overlap(intervals)
    for one, other in combinations(tasks, 2):
        _order(v, one, other)


def _within(v: Variables, end: Linear, *where: Literal) -> None:
    v.require(end >= v.period, *where)
    v.require(end <= 2 * v.period, *where)


def _interval(v: Variables, task: Task, length: Linear, here: Literal) -> cp_model.IntervalVar:
    start, model = v.position[task], v.model
    if isinstance(length, int):
        return model.new_optional_fixed_size_interval_var(start, length, here, f"i_{task}")
    end = model.new_int_var(0, 2 * v.period, f"e_{task}")
    return model.new_optional_interval_var(start, length, end, here, f"i_{task}")


def _order(v: Variables, one: Task, other: Task) -> None:
    """before[a, b]: a ends before b starts in the window, on the GPU they share."""
    together = v.same(one[1], other[1])
    if isinstance(together, int) and not together:
        return
    literals = [v.model.new_bool_var(f"w_{one}_{other}"), v.model.new_bool_var("w_back")]
    v.model.add(sum(literals) == together)
    for literal, (first, second) in zip(literals, ((one, other), (other, one)), strict=True):
        v.before[first, second] = literal
        start, following = v.position[first], v.position[second]
        v.model.add(start + v.length(first) <= following).only_enforce_if(literal)
        last = following + v.length(second)
        v.model.add(last <= start + v.period).only_enforce_if(literal)


def add_links(v: Variables) -> None:
    """(R4): each send stands twice on its link, a period apart. Sends of no length are free."""
    uses: dict[tuple[int, int], list[Use]] = {}
    for kind, item, boundary in sends(v.instance):
        if (kind, item, 0) not in v.position:
            continue
        for copy in v.instance.copies:
            task = (kind, item, copy)
            end = v.position[task] + send_length(v, task, boundary)
            _within(v, end, v.cut(boundary))
            v.require(v.position[task] >= v.period, v.same(boundary, boundary + 1))
            for link, use in _uses(v, task, boundary):
                uses.setdefault(link, []).append(use)
    for shared in uses.values():
        v.model.add_no_overlap(
            [
                v.model.new_optional_fixed_size_interval_var(start + later, length, here, "link")
                for start, length, here in shared
                for later in (0, v.period)
            ]
        )


def _uses(v: Variables, task: Task, boundary: int) -> list[tuple[tuple[int, int], Use]]:
    """(link, use) for every pair of GPUs that a send may run between and take time."""
    kind, item, _ = task
    source, target = (boundary, boundary + 1)[:: 1 if kind is SEND_F else -1]
    found: list[tuple[tuple[int, int], Use]] = []
    for p in v.instance.gpus:
        for q in v.instance.gpus:
            length = v.instance.send_ticks(kind, item, p, q) if p != q else 0
            here = v.both(v.on[source][p], v.on[target][q]) if length else 0
            if not isinstance(here, int) or here:
                link = v.instance.costs.cluster.links.resource(p, q)
                found.append((link, (v.position[task], length, here)))
    return found
