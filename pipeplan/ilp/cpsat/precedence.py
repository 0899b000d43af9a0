"""The chain in the periodic model: precedence (R2), FIFO (R5), loads, tied layers; in ticks."""

from __future__ import annotations

from itertools import pairwise

from pipeplan.ilp.cpsat.variables import Instance, Linear, Literal, Task, Variables
from pipeplan.plan import OpKind

F, B, SEND_F, SEND_B = OpKind.F, OpKind.B, OpKind.SEND_F, OpKind.SEND_B


def compute_tasks(instance: Instance) -> list[Task]:
    """All F and B."""
    items = range(len(instance.items))
    return [(kind, n, c) for c in instance.copies for n in items for kind in (F, B)]


def sends(instance: Instance) -> list[tuple[OpKind, int, int]]:
    """(kind, item, boundary) of every send that may be needed."""
    last = len(instance.items) - 1
    return [(SEND_F, n, n) for n in range(last)] + [(SEND_B, n + 1, n) for n in range(last)]


def matters(v: Variables, kind: OpKind, item: int, boundary: int) -> bool:
    """Whether a send needs variables: it may exist and takes time or carries bytes."""
    cut = v.cut(boundary)
    if isinstance(cut, int) and not cut:
        return False
    layer = v.instance.items[boundary][1]
    backward = kind is SEND_B
    costs = v.instance.costs
    if costs.tensor_bytes(layer, backward=backward):
        return True
    pairs = ((p, q) for p in v.instance.gpus for q in v.instance.gpus if p != q)
    return any(v.instance.send_ticks(kind, item, p, q) for p, q in pairs)


def add_chain(v: Variables) -> None:
    """(R2) along the chain, through a send where there is a cut."""
    last = len(v.instance.items) - 1
    for copy in v.instance.copies:
        for n in range(last):
            _step(v, (F, n, copy), (F, n + 1, copy), (SEND_F, n, copy), n)
            _step(v, (B, n + 1, copy), (B, n, copy), (SEND_B, n + 1, copy), n)
        _follow(v, (F, last, copy), v.length((F, last, copy)), (B, last, copy))


def _step(v: Variables, one: Task, other: Task, send: Task, boundary: int) -> None:
    together, cut = v.same(boundary, boundary + 1), v.cut(boundary)
    if not matters(v, send[0], send[1], boundary):
        _follow(v, one, v.length(one), other)
        return
    v.add_task(send)
    _follow(v, one, v.length(one), other, together)
    _follow(v, one, v.length(one), send)
    _follow(v, send, send_length(v, send, boundary), other, cut)
    if not isinstance(together, int):
        v.model.add(v.time(other) >= v.time(one) + v.length(one))


def _follow(v: Variables, one: Task, length: Linear, other: Task, *literals: Literal) -> None:
    """`other` starts after `one` ends, and less than a period later: waiting longer never helps.

    Given the positions on every resource, the smallest shifts make every residence shortest.
    """
    if any(isinstance(each, int) and not each for each in literals):
        return
    wait = v.time(other) - v.time(one) - length
    slack = v.period - 1 if v.instance.tick == 1 else v.period + 1
    v.require(wait >= 0, *literals)
    v.require(wait <= slack, *literals)


def send_length(v: Variables, send: Task, boundary: int) -> Linear:
    """Ticks of a send between the GPUs that its two items sit on."""
    kind, item, _ = send
    if (kind, item) not in v.trips:
        v.trips[kind, item] = _new_send_length(v, kind, item, boundary)
    return v.trips[kind, item]


def _new_send_length(v: Variables, kind: OpKind, item: int, boundary: int) -> Linear:
    source = boundary if kind is SEND_F else boundary + 1
    target = boundary + 1 if kind is SEND_F else boundary
    instance = v.instance
    here, there = instance.home(source), instance.home(target)
    if here is not None and there is not None:
        return instance.send_ticks(kind, item, here, there)
    lengths = {
        (p, q): instance.send_ticks(kind, item, p, q)
        for p in instance.gpus
        for q in instance.gpus
        if p != q
    }
    if len(set(lengths.values())) == 1:
        return next(iter(lengths.values()))
    return sum(
        ticks * v.both(v.on[source][p], v.on[target][q]) for (p, q), ticks in lengths.items()
    )


def add_fifo(v: Variables) -> None:
    """(R5): copies in order, the first of the next period behind the last."""
    if v.instance.k == 1:
        return
    copies = list(v.instance.copies)
    for kind, n, copy in list(v.position):
        if copy:
            continue
        for one, other in pairwise(copies):
            v.model.add(v.time((kind, n, one)) <= v.time((kind, n, other)))
        last = v.time((kind, n, copies[-1]))
        v.model.add(last <= v.time((kind, n, 0)) + v.period)


def add_loads(v: Variables) -> None:
    """Redundant: work of each GPU within the period."""
    instance = v.instance
    for gpu in instance.gpus:
        work = sum(
            instance.ticks(kind, n, gpu, begins=n == 0) * v.on[n][gpu]
            for n in range(len(instance.items))
            for kind in (F, B)
        )
        if not isinstance(work, int) or work * instance.k > v.period:
            v.model.add(instance.k * work <= v.period)


def add_tied(v: Variables) -> None:
    """Layers that share a parameter sit on one GPU."""
    owner = {
        layer: n
        for n, (first, last) in enumerate(v.instance.items)
        for layer in range(first, last + 1)
    }
    for group in v.instance.costs.tied_groups:
        for layer in group[1:]:
            v.model.add(v.same(owner[group[0]], owner[layer]) == 1)
