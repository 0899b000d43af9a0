"""Constraints (1)-(21): who runs where, in which order, within one period.

Each K of the paper is replaced by the smallest constant that is safe in its row; H is the horizon,
an upper bound of T. Starts lie in [-d, T - d] by (17) and (18), which gives the constants.
"""

from __future__ import annotations

from itertools import combinations, permutations

from ortools.math_opt.python import mathopt

from pipeplan.ilp.paper.instance import PaperInstance
from pipeplan.ilp.paper.variables import PaperVariables, Term


def add(model: mathopt.Model, instance: PaperInstance[float], x: PaperVariables) -> None:
    """Add (1)-(21), tied layers, and the trivial bound on T."""
    _allocation(model, instance, x)
    _tasks(model, instance, x)
    _same_link(model, instance, x)
    _messages(model, instance, x)
    _period(model, instance, x)


def cut(instance: PaperInstance[float], x: PaperVariables, message: int) -> Term:
    """1 if T_message and T_{message+1} are on two GPUs."""
    return 1 - x.together(instance, message, message + 1)


def message_length(instance: PaperInstance[float], x: PaperVariables, message: int) -> Term:
    """d~ of a message, 0 where it stays on one GPU (missing in the paper)."""
    return instance.transfer[message] * cut(instance, x, message)


def _allocation(model: mathopt.Model, instance: PaperInstance[float], x: PaperVariables) -> None:
    """(1) in all three directions, (2), (3), layers that share a parameter."""
    z = x.same_gpu
    for i, j, k in combinations(range(1, instance.layers + 1), 3):
        model.add_linear_constraint(z[j, k] >= z[i, j] + z[i, k] - 1)
        model.add_linear_constraint(z[i, k] >= z[i, j] + z[j, k] - 1)
        model.add_linear_constraint(z[i, j] >= z[i, k] + z[j, k] - 1)
    for layer, first in x.first_of_gpu.items():
        earlier = mathopt.fast_sum(z[i, layer] for i in range(1, layer))
        model.add_linear_constraint(first >= 1 - earlier)
    model.add_linear_constraint(mathopt.fast_sum(x.first_of_gpu.values()) <= instance.gpus)
    for group in instance.tied:
        for i, j in combinations(group, 2):
            model.add_linear_constraint(z[i, j] == 1)


def _tasks(model: mathopt.Model, instance: PaperInstance[float], x: PaperVariables) -> None:
    """(5)-(7) for unordered pairs: both orders give the same rows."""
    d = instance.duration
    for (q, r), w in x.task_order.items():
        z = x.together(instance, q, r)
        gap = x.task_start[r] - x.task_start[q]
        model.add_linear_constraint(-gap + (instance.horizon + d[q]) * (1 - z + w) >= d[r])
        model.add_linear_constraint(gap + (instance.horizon + d[r]) * (2 - z - w) >= d[q])
        model.add_linear_constraint(w <= z)


def _same_link(model: mathopt.Model, instance: PaperInstance[float], x: PaperVariables) -> None:
    """(8)-(13), for both orders of each pair of messages."""

    def z(task: int, other: int) -> Term:
        return x.together(instance, task, other)

    for pair, shared in x.same_link.items():
        for q, r in (pair, pair[::-1]):
            uncut = z(q, q + 1)
            model.add_linear_constraint(shared >= z(q, r) + z(q + 1, r + 1) - uncut - 1)
            model.add_linear_constraint(shared >= z(q, r + 1) + z(q + 1, r) - uncut - 1)
            model.add_linear_constraint(shared <= 1 - uncut)
            model.add_linear_constraint(shared <= z(q, r) + z(q + 1, r))
            model.add_linear_constraint(shared <= z(q, r + 1) + z(q + 1, r + 1))


def _messages(model: mathopt.Model, instance: PaperInstance[float], x: PaperVariables) -> None:
    """(14)-(16)."""
    d = instance.transfer
    for (q, r), w in x.message_order.items():
        z = x.same_link[q, r]
        gap = x.message_start[r] - x.message_start[q]
        safe = instance.horizon + d[q] + d[r]
        model.add_linear_constraint(-gap + safe * (1 - z + w) >= d[r])
        model.add_linear_constraint(gap + safe * (2 - z - w) >= d[q])
        model.add_linear_constraint(w <= z)


def _period(model: mathopt.Model, instance: PaperInstance[float], x: PaperVariables) -> None:
    """(17)-(21); T is at least the average load and the longest layer (ours, implied)."""
    loads = [instance.load(layer) for layer in range(1, instance.layers + 1)]
    model.add_linear_constraint(instance.gpus * x.period >= sum(loads))
    model.add_linear_constraint(x.period >= max(loads))
    model.add_linear_constraint(x.task_start[1] == 0)
    ends = {q: start + instance.duration[q] for q, start in x.task_start.items()}
    arrivals = {q: t + message_length(instance, x, q) for q, t in x.message_start.items()}
    for end in (*ends.values(), *arrivals.values()):
        model.add_linear_constraint(end >= 0)
        model.add_linear_constraint(end <= x.period)
    for q, r in permutations(instance.tasks, 2):
        other_gpu = instance.duration[r] * (1 - x.together(instance, q, r))
        model.add_linear_constraint(x.period >= ends[q] - x.task_start[r] - other_gpu)
    for pair, shared in x.same_link.items():
        for q, r in (pair, pair[::-1]):
            other_link = instance.transfer[r] * (1 - shared)
            model.add_linear_constraint(x.period >= arrivals[q] - x.message_start[r] - other_link)
