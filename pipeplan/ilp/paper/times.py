"""Exact integer times for a decision: the shortest period its orders, shifts and slots allow.

Every rule is a difference constraint x_v >= x_u + length + periods * T between starts x in the
window, so T is feasible unless some cycle has positive weight. A cycle with periods < 0 asks
for T >= length / -periods; raising T to that, cycle after cycle, ends at the smallest feasible
integer.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from pipeplan.ilp.paper.decision import PaperDecision
from pipeplan.ilp.paper.instance import PaperInstance
from pipeplan.units import ceil_div

Node: TypeAlias = tuple[bool, int]
"""(is a message, its number)."""


class DifferenceConstraint(NamedTuple):
    """x_later >= x_earlier + length + periods * T."""

    earlier: Node
    later: Node
    length: int
    periods: int


def shortest(
    instance: PaperInstance[int], decision: PaperDecision, lowest: int
) -> tuple[int, dict[Node, int]] | None:
    """The smallest period >= `lowest` and the absolute start of every op of micro-batch 0, in ns.

    Returns:
        None if no period keeps the orders and slots of `decision`.
    """
    rules = _rules(instance, decision)
    shift = {(False, q): count for q, count in decision.task_shift.items()}
    shift |= {(True, q): count for q, count in decision.message_shift.items()}
    period = lowest
    while True:
        found = _longest_paths(rules, list(shift), period)
        if isinstance(found, dict):
            return period, {node: x + shift[node] * period for node, x in found.items()}
        length, periods = sum(r.length for r in found), sum(r.periods for r in found)
        if periods >= 0:
            return None
        period = ceil_div(length, -periods)


def _rules(instance: PaperInstance[int], decision: PaperDecision) -> list[DifferenceConstraint]:
    """Precedence (R2), exclusive use (R3), (R4) in a window of T, and the slots of (P5)."""
    shift, sent = decision.task_shift, decision.message_shift
    d, transfer = instance.duration, instance.transfer
    rules = []
    for q in range(1, 2 * instance.layers):
        task, message, following = (False, q), (True, q), (False, q + 1)
        if q not in sent:
            rules.append(DifferenceConstraint(task, following, d[q], shift[q] - shift[q + 1]))
            continue
        ahead, behind = sent[q] - shift[q], shift[q + 1] - sent[q]
        rules.append(DifferenceConstraint(task, message, d[q], -ahead))
        rules.append(DifferenceConstraint(message, following, transfer[q], -behind))
        if q in decision.slots:
            sender, receiver = decision.slots[q]
            rules.append(DifferenceConstraint(message, task, transfer[q] - d[q], ahead - sender))
            rules.append(DifferenceConstraint(following, message, 0, behind - receiver))
    pairs = ((False, d, decision.task_pairs), (True, transfer, decision.message_pairs))
    for kind, lengths, ordered in pairs:
        for q, r in ordered:
            rules.append(DifferenceConstraint((kind, q), (kind, r), lengths[q], 0))
            rules.append(DifferenceConstraint((kind, r), (kind, q), lengths[r], -1))
    return rules


def _longest_paths(
    rules: list[DifferenceConstraint], nodes: list[Node], period: int
) -> dict[Node, int] | list[DifferenceConstraint]:
    """Smallest non-negative starts that keep all rules, or the rules of a positive cycle."""
    start = dict.fromkeys(nodes, 0)
    reason: dict[Node, DifferenceConstraint] = {}
    while True:
        moved = False
        for rule in rules:
            time = start[rule.earlier] + rule.length + rule.periods * period
            if time > start[rule.later]:
                start[rule.later], reason[rule.later] = time, rule
                moved = True
        if not moved:
            return start
        cycle = _cycle(reason)
        if cycle:
            return cycle


def _cycle(reason: dict[Node, DifferenceConstraint]) -> list[DifferenceConstraint]:
    """A cycle of the rules that moved each node last; such a cycle has positive weight."""
    done: set[Node] = set()
    for origin in reason:
        path: dict[Node, int] = {}
        rules: list[DifferenceConstraint] = []
        node = origin
        while node in reason and node not in done and node not in path:
            path[node] = len(rules)
            rules.append(reason[node])
            node = reason[node].earlier
        if node in path:
            return rules[path[node] :]
        done.update(path)
    return []
