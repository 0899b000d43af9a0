"""The planner's benchmark as a table, and what it says about each line that is asked for."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import geometric_mean
from typing import Any

from rich.table import Table

from benchmarks.planner_cases import GROUPS, TINY, Group
from benchmarks.planner_rows import is_shortest

Row = dict[str, Any]
"""One instance: its parts by name, see `planner_rows`."""

BETTER = 0.05
"""The share by which scarce memory should beat the best contiguous plan on a quarter."""
REFUSED = "REFUSED"
INFEASIBLE = "InfeasibleError"
_TOLERANCE = 1e-9

COLUMNS = (
    "chain", "L", "P", "f", "period", "k", "S", "bound", "bound k=1", "gap", "s", "contiguous",
    "any k", "PipeDream", "ILP", "load", "judged", "machine",
)  # fmt: skip


_ABSENT = {INFEASIBLE: "infeasible", "TimeLimitError": "none found"}


def table(rows: Sequence[Row]) -> Table:
    """One line per instance; times in ms per micro-batch, `machine` its load average."""
    made = Table(box=None, pad_edge=False, title="ms per micro-batch", title_justify="left")
    for name in COLUMNS:
        made.add_column(name, justify="left" if name in ("chain", "judged") else "right")
    for row in rows:
        made.add_row(*cells(row))
    return made


def cells(row: Row) -> list[str]:
    """The line of one instance."""
    facts, ours = row["facts"], row["planner"]
    gap = ours.get("gap")
    return [
        facts["name"],
        str(facts["layers"]),
        str(facts["gpus"]),
        f"{facts['fraction']:g}",
        _ms(ours["period_ns"]) if "period_ns" in ours else _ABSENT[ours["status"]],
        str(ours.get("k", "-")),
        str(ours.get("stages", "-")),
        _ms(ours.get("bound_any_ns")),
        _ms(ours.get("bound_k1_ns")),
        "-" if gap is None else f"{gap:.2%}",
        f"{ours['seconds']:.1f}",
        _ms(row["contiguous"].get("period_ns")),
        _ms(ours.get("contiguous_any_k_ns")),
        _ms(row.get("pipedream", {}).get("period_ns")),
        _ilp(row.get("ilp")),
        _ms(facts["load_ns"]),
        judged(ours),
        f"{ours['load_average']:.1f}",
    ]


def judged(part: Row) -> str:
    """What verifier and replay said."""
    if "period_ns" not in part:
        return "-"
    return "yes" if part["verified"] and part["replayed"] else REFUSED


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value / 1e6:.3f}"


def _ilp(part: Row | None) -> str:
    if part is None:
        return ""
    return _ms(part["period_ns"]) if "period_ns" in part else "none"


def group_name(row: Row) -> str:
    """The group of instances that a row belongs to."""
    name: str = row["facts"]["group"]
    return name


def summary(rows: Sequence[Row]) -> Iterator[str]:
    """One line per target, with the instances that miss it."""
    for group in GROUPS:
        members = [row for row in rows if row["facts"]["group"] == group.name]
        if members:
            yield _group(group, members)
    scarce = [row for row in rows if row["facts"]["fraction"] <= 0.6]
    yield _never_worse(rows)
    yield from _better(scarce)
    yield from _against(rows)
    failed = [_name(row) for row in rows if judged(row["planner"]) == REFUSED]
    plans = sum("period_ns" in row["planner"] for row in rows)
    yield f"verifier and replay accept {plans - len(failed)} of {plans} plans{_list(failed)}"
    yield _first(rows)
    ilp = [row for row in rows if row["facts"]["group"] == TINY.name and "ilp" in row]
    if ilp:
        yield _literal(ilp)


def _group(group: Group, members: Sequence[Row]) -> str:
    gaps = [(_proven_gap(row["planner"]), row) for row in members]
    known = sorted(gap for gap, _ in gaps if gap is not None)
    middle = f", median gap {known[len(known) // 2]:.2%}, largest {known[-1]:.2%}" if known else ""
    head = f"{group.name}: {len(members)} instances{middle}"
    if group.gap is None:
        return head
    missed = [
        f"{_name(row)} {'no plan' if gap is None else f'{gap:.2%}'}"
        for gap, row in gaps
        if gap is None or gap > group.gap + _TOLERANCE
    ]
    reached = len(members) - len(missed)
    return f"{head}; gap <= {group.gap:.1%} on {reached} of {len(members)}{_list(missed)}"


def _proven_gap(part: Row) -> float | None:
    """The gap; none is left where it is proven that no plan exists."""
    gap: float | None = 0.0 if part["status"] == INFEASIBLE else part.get("gap")
    return gap


def _never_worse(rows: Sequence[Row]) -> str:
    """Against every contiguous plan and every point of PipeDream's exhaustive search."""
    worse, held, whole = [], 0, 0
    for row in rows:
        ours = row["planner"].get("period_ns")
        rivals = [_contiguous(row), row.get("pipedream", {}).get("period_ns"), _rival(row)]
        known = [rival for rival in rivals if rival is not None]
        held += len(known)
        whole += _all_searched(row)
        if any(ours is None or ours > rival * (1 + _TOLERANCE) for rival in known):
            worse.append(_name(row))
    return (
        f"never worse than contiguous or PipeDream: {held} comparisons, on {whole} of {len(rows)}"
        f" instances with every point of PipeDream's search{_list(worse)}"
    )


def _rival(row: Row) -> float | None:
    """A point of PipeDream's search that is faster than our plan, if one was found."""
    found: float | None = row.get("rival", {}).get("period_ns")
    return found


def _all_searched(row: Row) -> bool:
    """Whether it is sure that no point of PipeDream's search is faster than our plan."""
    part, ours = row.get("rival"), row["planner"].get("period_ns")
    if is_shortest(row["planner"]):
        return True
    if part is None:
        return row.get("pipedream", {}).get("left_out") == 0
    return part["left_out"] == 0 and part["asked"]["than_ns"] == ours


def _first(rows: Sequence[Row]) -> str:
    """How soon there is any plan, where there is one; the wall's seconds."""
    known = [(row["planner"].get("first_plan_s"), row) for row in rows]
    timed = [(seconds, row) for seconds, row in known if seconds is not None]
    late = [f"{_name(row)} {seconds:.1f} s" for seconds, row in timed if seconds > 1]
    return f"first plan within 1 s on {len(timed) - len(late)} of {len(timed)}{_list(late)}"


def _better(scarce: Sequence[Row]) -> Iterator[str]:
    """How often scarce memory makes a free allocation pay."""
    for what, rival in (("1F1B", _one), ("of any k found", _contiguous)):
        gains = [
            (base / row["planner"]["period_ns"] - 1, row)
            for row in scarce
            if (base := rival(row)) is not None and "period_ns" in row["planner"]
        ]
        enough = [_name(row) for gain, row in gains if gain >= BETTER]
        if gains:
            share = len(enough) / len(gains)
            yield (
                f"f <= 0.6: at least {BETTER:.0%} better than the best contiguous plan {what} on"
                f" {len(enough)} of {len(gains)} ({share:.0%}){_list(enough)}"
            )


def _against(rows: Sequence[Row]) -> Iterator[str]:
    """By memory, how our periods compare where both have a plan and layers are many."""
    many = [row for row in rows if row["facts"]["group"] != TINY.name]
    for fraction in sorted({row["facts"]["fraction"] for row in many}, reverse=True):
        here = [row for row in many if row["facts"]["fraction"] == fraction]
        exhaustive = [row.get("pipedream", {}).get("period_ns") for row in here]
        against = [
            text
            for name, rivals in (
                ("PipeDream's exhaustive search", exhaustive),
                ("the best contiguous 1F1B plan", [_one(row) for row in here]),
            )
            if (text := _mean(here, rivals, name))
        ]
        if against:
            yield f"f = {fraction:g}: ours is {', '.join(against)}"


def means(rows: Sequence[Row]) -> Iterator[list[str]]:
    """By memory: instances, then mean and least ratio to PipeDream and to contiguous 1F1B."""
    many = [row for row in rows if row["facts"]["group"] != TINY.name]
    for fraction in sorted({row["facts"]["fraction"] for row in many}, reverse=True):
        here = [row for row in many if row["facts"]["fraction"] == fraction]
        exhaustive = [row.get("pipedream", {}).get("period_ns") for row in here]
        columns = [_ratios(here, rivals) for rivals in (exhaustive, [_one(row) for row in here])]
        shown = [
            f"{value:.3f}" for ratios in columns for value in (geometric_mean(ratios), min(ratios))
        ]
        yield [f"{fraction:g}", str(len(columns[0])), *shown]


def _mean(rows: Sequence[Row], rivals: Sequence[float | None], name: str) -> str:
    """Geometric mean of our period divided by that of rivals; nothing without any."""
    ratios = _ratios(rows, rivals)
    if not ratios:
        return ""
    mean = geometric_mean(ratios)
    return f"{mean:.3f} of {name} (least {min(ratios):.3f}, {len(ratios)} instances)"


def _ratios(rows: Sequence[Row], rivals: Sequence[float | None]) -> list[float]:
    """Our period over that of each rival, where both have a plan."""
    return [
        ours / rival
        for row, rival in zip(rows, rivals, strict=True)
        if rival is not None and (ours := row["planner"].get("period_ns")) is not None
    ]


def _one(row: Row) -> float | None:
    found: float | None = row["contiguous"].get("period_ns")
    return found


def _contiguous(row: Row) -> float | None:
    """The best contiguous plan known, whatever its k."""
    periods = (_one(row), row["planner"].get("contiguous_any_k_ns"))
    return min((period for period in periods if period is not None), default=None)


def _literal(rows: Sequence[Row]) -> str:
    """Where the literal ILP (k = 1) ends with a proof, ours may be shorter only by a larger k."""
    ended = [row for row in rows if row["ilp"]["status"] == "optimal"]
    worse = [
        _name(row)
        for row in ended
        if row["planner"].get("period_ns", math.inf) > row["ilp"]["period_ns"]
    ]
    return (
        f"literal ILP proved {len(ended)} of {len(rows)}; ours longer: {len(worse)}{_list(worse)}"
    )


def _name(row: Row) -> str:
    facts = row["facts"]
    return f"{facts['name']}/P{facts['gpus']}/f{facts['fraction']:g}"


def _list(names: Sequence[str]) -> str:
    return f": {', '.join(names)}" if names else ""
