"""Redundant: how many periods later an op runs than one before it in the chain, from their order.

With a wait of less than a period and all ends in one window, an op's place in the window decides
its shift. Said in Booleans, it lets the solver reason about counts without the arithmetic of
times; finding and refuting periods then takes a hundredth of the time.
"""

from __future__ import annotations

from itertools import combinations

from pipeplan.ilp.cpsat.precedence import SEND_B, SEND_F, B, F, send_length
from pipeplan.ilp.cpsat.variables import Instance, Linear, Literal, Task, Variables


def add_shifts(v: Variables) -> None:
    """Shifts on one GPU from orders, shifts across a cut from whether an op starts too early."""
    for copy in v.instance.copies:
        _on_one_gpu(v, copy)
        for n in range(len(v.instance.items) - 1):
            _across(v, (F, n, copy), (SEND_F, n, copy), (F, n + 1, copy), n)
            _across(v, (B, n + 1, copy), (SEND_B, n + 1, copy), (B, n, copy), n)


def _on_one_gpu(v: Variables, copy: int) -> None:
    """An op is one shift behind its neighbour before it in the chain where it stands first.

    Behind one farther ahead it is at least one. Two ops without length may stand either way.
    """
    items = range(len(v.instance.items))
    chain = [(F, n, copy) for n in items] + [(B, n, copy) for n in reversed(items)]
    for (place, one), (following, other) in combinations(enumerate(chain), 2):
        if (one, other) not in v.before or not (takes_time(v, one) or takes_time(v, other)):
            continue
        behind = v.shift[other] - v.shift[one]
        reversed_order = v.before[other, one]
        if following == place + 1:
            v.require(behind == reversed_order, v.same(one[1], other[1]))
        else:
            v.require(behind >= reversed_order, v.same(one[1], other[1]))


def takes_time(v: Variables, task: Task) -> bool:
    """Whether a compute op lasts longer than 0 ns, whatever the tick."""
    kind, item, _ = task
    first, last = v.instance.items[item]
    layers = v.instance.costs.chain.layers[first : last + 1]
    return any(layer.forward_ns if kind is F else layer.backward_ns for layer in layers)


def _across(v: Variables, one: Task, send: Task, other: Task, boundary: int) -> None:
    """The shifts of a transfer and of its consumer behind what each waits for."""
    cut = v.cut(boundary)
    if send not in v.position or (isinstance(cut, int) and not cut):
        return
    _early(v, one, v.length(one), send, cut)
    _early(v, send, send_length(v, send, boundary), other, cut)


def _early(v: Variables, one: Task, length: Linear, other: Task, cut: Literal) -> None:
    """A shift for a start before the end of `one`, another for a start a period before it."""
    gap = v.position[other] - v.position[one] - length
    rounding = _rounding(v.instance)
    once, twice = (v.model.new_bool_var(f"early_{one}_{other}_{shift}") for shift in (1, 2))
    v.model.add_implication(twice, once)
    for literal, periods in ((once, 0), (twice, 1)):
        v.require(gap >= -periods * v.period, literal.negated(), cut)
        v.require(gap <= -periods * v.period - 1 + rounding, literal, cut)
    v.require(v.shift[other] - v.shift[one] == once + twice, cut)


def _rounding(instance: Instance) -> int:
    """Ticks by which rounded starts and a rounded length may miss what holds for exact times."""
    return 0 if instance.tick == 1 else 2
