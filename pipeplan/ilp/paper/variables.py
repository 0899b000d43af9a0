"""The variables of the paper's ILP, with the equalities that hold between them substituted.

z is symmetric and equal for F_l and B_l (4), so one variable per pair of layers stands for four
pairs of tasks; w_{q,r} + w_{r,q} = z_{q,r}, so one variable per unordered pair suffices; the same
for z~ and w~. sigma and b depend on a task through its GPU only: one row per layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import combinations
from typing import Any, TypeAlias

from ortools.math_opt.python import mathopt

from pipeplan.ilp.paper.instance import PaperInstance

Term: TypeAlias = Any
"""A MathOpt variable, linear expression or number (the library exports no common type)."""

Pair: TypeAlias = tuple[int, int]


@dataclass(frozen=True)
class PaperVariables:
    """All variables; tables are keyed by task, message or layer (from 1) or by a pair of them.

    Attributes:
        period: T.
        task_start: tau_q.
        message_start: tau~_q, for q = 1..2L-1.
        same_gpu: z for layers i < j.
        first_of_gpu: f_l.
        task_order: w_{q,r} for tasks q < r.
        same_link: z~ for messages q < r.
        message_order: w~ for messages q < r.
        late: (v_q, v'_q, v~_q, v~'_q).
        stored: sigma by (layer of the running task, layer stored).
        direct: o by (running task, message).
        buffer: b by (layer of the running task, boundary 1..L-1).
        second_slot: whether (sender, receiver) of message q need two slots; empty if not counted.
        second_slot_here: those of `second_slot` on the GPU of a layer, by (layer, message).
    """

    period: Term
    task_start: dict[int, Term]
    message_start: dict[int, Term]
    same_gpu: dict[Pair, Term]
    first_of_gpu: dict[int, Term]
    task_order: dict[Pair, Term]
    same_link: dict[Pair, Term]
    message_order: dict[Pair, Term]
    late: dict[int, tuple[Term, Term, Term, Term]]
    stored: dict[Pair, Term]
    direct: dict[Pair, Term]
    buffer: dict[Pair, Term]
    second_slot: dict[int, tuple[Term, Term]]
    second_slot_here: dict[Pair, tuple[Term, Term]]

    def together(self, instance: PaperInstance[float], task: int, other: int) -> Term:
        """z_{task,other}."""
        low, high = sorted((instance.layer(task), instance.layer(other)))
        return 1 if low == high else self.same_gpu[low, high]

    def before(self, instance: PaperInstance[float], task: int, other: int) -> Term:
        """w_{task,other}: both on one GPU, `task` first in its window; 0 for a task itself."""
        if task == other:
            return 0
        if task < other:
            return self.task_order[task, other]
        return self.together(instance, task, other) - self.task_order[other, task]

    def lateness(self, message: int) -> Term:
        """V + v' + v~ + v~': periods by which T_{message+1} runs behind T_message."""
        return mathopt.fast_sum(self.late[message])


def create(
    model: mathopt.Model, instance: PaperInstance[float], *, integer: bool, count_slots: bool
) -> PaperVariables:
    """Add the variables of (1)-(36) to `model`.

    Args:
        model: Receives them.
        instance: In the units of the model.
        integer: Make times and counts integer variables (for CP-SAT, exact).
        count_slots: Also those of the second message slots (P5).
    """
    L, horizon = instance.layers, instance.horizon
    layers = range(1, L + 1)
    senders = range(1, 2 * L)
    cuts = instance.messages

    def number(lower: float, upper: float) -> Term:
        return model.add_variable(lb=lower, ub=upper, is_integer=integer)

    def copies(layer: int) -> Term:
        size = instance.stored[layer]
        most = min(8 * L, int(instance.memory / size + 1e-6)) if size else 8 * L
        return model.add_integer_variable(lb=0, ub=most)

    flag = model.add_binary_variable
    slots = [q for q in cuts if instance.size[q]] if count_slots else []
    links = [
        (q, r) for q, r in combinations(cuts, 2) if instance.transfer[q] or instance.transfer[r]
    ]
    return PaperVariables(
        period=number(0, horizon),
        task_start={q: number(-instance.duration[q], horizon) for q in instance.tasks},
        message_start={q: number(-instance.transfer[q], horizon) for q in senders},
        same_gpu=_table(combinations(layers, 2), flag),
        first_of_gpu=_table(layers, flag),
        task_order=_table(combinations(instance.tasks, 2), flag),
        same_link=_table(links, flag),
        message_order=_table(links, flag),
        late={q: (flag(), flag(), flag(), flag()) for q in senders},
        stored={(i, j): copies(j) for i in layers for j in layers},
        direct=_table(((q, r) for q in instance.tasks for r in cuts if q not in (r, r + 1)), flag),
        buffer=_table(((i, j) for i in layers for j in range(1, L)), flag),
        second_slot={q: (flag(), flag()) for q in slots},
        second_slot_here={(i, q): (flag(), flag()) for i in layers for q in slots},
    )


def _table(keys: Iterable[Any], make: Callable[[], Term]) -> dict[Any, Term]:
    return {key: make() for key in keys}
