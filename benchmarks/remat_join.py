"""Figures 8 to 10 of Beaumont, Herrmann, Pallez, Shilova (2019): joins, memory against time."""

from __future__ import annotations

from dataclasses import dataclass

from pipeplan.remat.checkpointing.join_network import JoinProgram, JoinTimes, least_slots
from pipeplan.report.budget import Curves

MODELS = {"RNN": (6,), "CM": (5, 1), "SNN": (2, 2, 2)}
"""Branch lengths in units of L."""
LENGTHS = {"RNN": (5, 10, 15), "CM": (5, 10, 15), "SNN": (5, 10, 15)}
SLOTS = (7, 9, 11, 13)
EQUIVALENT = (9, 12, 15)


@dataclass(frozen=True)
class Joins:
    """Solved once per model: each table holds all shorter joins and fewer slots."""

    tables: dict[str, JoinProgram]

    def time(self, model: str, size: int, slots: int) -> float:
        """Least time of the model of length `size`."""
        return self.tables[model].time_of(lengths(model, size), slots)


def lengths(model: str, size: int) -> tuple[int, ...]:
    """Branch lengths of the model of length `size`."""
    return tuple(part * size for part in MODELS[model])


def solve() -> Joins:
    """All tables."""
    tables = {}
    for model, sizes in LENGTHS.items():
        longest = lengths(model, max(sizes))
        tables[model] = JoinProgram(longest, sum(longest) + len(longest))
    return Joins(tables)


def span(size: int) -> int:
    """Time of every step once, whatever the model."""
    return 12 * size + 1


def memory_curves(joins: Joins) -> list[Curves]:
    """Figure 8: the share of the memory that no rerun needs, and the time for it."""
    found = []
    for size in (5, 10, 15):
        lines = {}
        for model, sizes in LENGTHS.items():
            if size in sizes:
                full = 6 * size + len(MODELS[model])
                slots = range(least_slots(lengths(model, size)), full + 1)
                lines[model] = [(c / full, joins.time(model, size, c) / span(size)) for c in slots]
        found.append(Curves(f"L = {size}", "slots / slots without reruns", "time / span", lines))
    return found


def length_curves(joins: Joins) -> list[Curves]:
    """Figure 9: the time of longer and longer models with few slots."""
    found = []
    for slots in SLOTS:
        lines = {
            model: [
                (size, joins.time(model, size, slots) / span(size))
                for size in range(1, max(sizes) + 1)
            ]
            for model, sizes in LENGTHS.items()
        }
        found.append(Curves(f"c = {slots}", "L", "time / span", lines))
    return found


def chain_curves(joins: Joins) -> list[Curves]:
    """Figure 10: the join as one chain of grouped steps (EQUIV-CHAIN), against the optimum."""
    longest = max(LENGTHS["SNN"])
    grouped = JoinProgram((2 * longest,), max(EQUIVALENT) // 3, JoinTimes(3, 3, 1))
    lines = {
        f"c = {slots}": [
            (
                2 * size + 1,
                grouped.time_of((2 * size,), slots // 3) / joins.time("SNN", size, slots),
            )
            for size in range(1, longest + 1)
        ]
        for slots in EQUIVALENT
    }
    return [Curves("EQUIV-CHAIN, three branches", "length 2 L + 1", "time / optimum", lines)]


def figures(joins: Joins) -> dict[str, object]:
    """The numbers that the text quotes."""
    half = {
        f"{model} L={size}": joins.time(model, size, -(-(6 * size + len(MODELS[model])) // 2))
        / span(size)
        for model, sizes in LENGTHS.items()
        for size in sizes
    }
    few = {
        f"{model} L={size}": joins.time(model, size, least_slots(lengths(model, size)) + 2)
        / span(size)
        for model, sizes in LENGTHS.items()
        for size in sizes
    }
    return {
        "c_min of two and three long branches": [least_slots((9, 9)), least_slots((9, 9, 9))],
        "toy (4, 10, 12), c = 9": JoinProgram((4, 10, 12), 9).time,
        "time / span with half the slots": half,
        "time / span with c_min + 2 slots": few,
    }
