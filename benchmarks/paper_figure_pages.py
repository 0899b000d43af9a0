"""What docs/results/paper-figures.md says of the kept rows, and its pictures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from statistics import geometric_mean
from typing import Any

from benchmarks.markdown import bullets, table
from pipeplan.report.cloud import Picture
from pipeplan.units import format_bytes

Row = Mapping[str, Any]
"""One network on one number of GPUs, part by part: see `benchmarks.paper_figures.jobs`."""

PARTS = ("paper", "any", "alone", "exact")
"""What is measured at each memory."""

TIE = 1e-9
"""Periods are kept as decimals: what differs by less is equal."""

HEAD = (
    "memory",
    "PipeDream",
    "ILP",
    "its status, gap",
    "alone",
    "ours, k = 1",
    "ours",
    "bound",
    "gap",
    "exact: PipeDream",
    "exact: ours",
    "recomputing",
)


@dataclass(frozen=True, slots=True)
class Point:
    """Everything at one memory; times in ns per micro-batch, None where there is no plan.

    Attributes:
        memory: Bytes of a GPU.
        pipedream: The best of the exhaustive search, by the paper's count of bytes.
        ilp: What the literal ILP has, from our plan with k = 1 of this memory.
        status: Of the ILP.
        ilp_bound: Proven by it.
        alone: (what the ILP has without a start,); empty where it was not asked.
        ours_k1: Our best with k = 1, found for this memory or less.
        ours: The same for any k.
        bound: Proven for any k, for this memory or more.
        has_exact: Whether exact memory was measured.
        exact_pipedream: As `pipedream`, under exact memory.
        exact: As `ours`, under exact memory.
        recompute: The same with recomputation.
    """

    memory: int
    pipedream: float | None
    ilp: float | None
    status: str
    ilp_bound: float | None
    alone: tuple[float | None, ...]
    ours_k1: float | None
    ours: float | None
    bound: float | None
    has_exact: bool
    exact_pipedream: float | None
    exact: float | None
    recompute: float | None


def points(row: Row) -> list[Point]:
    """Of a row, by memory, as far as it is measured."""
    shares = [name.split()[1] for name in row if name.startswith("paper ")]
    parts = {what: [row.get(f"{what} {share}") for share in shares] for what in PARTS}
    sizes = row["memory"]["bytes"][: len(shares)]
    k1 = _plans(parts, ("paper", "ours"))
    free = _plans(parts, ("any", "ours"))
    keeping = _plans(parts, ("exact", "ours"))
    found = []
    for index, memory in enumerate(sizes):
        ilp, alone = parts["paper"][index]["ilp"], parts["alone"][index]
        bounds = [each["bound_ns"] for each in _plans(parts, ("any", "ours"), index)]
        found.append(
            Point(
                memory=memory,
                pipedream=row["pipedream paper"]["best_ns"][index],
                ilp=ilp.get("period_ns"),
                status=ilp.get("status", "none"),
                ilp_bound=ilp.get("bound_ns"),
                alone=() if alone is None else (alone["ilp"].get("period_ns"),),
                ours_k1=_best(k1, memory),
                ours=_best([*k1, *free], memory),
                bound=max(bounds, default=None),
                has_exact=parts["exact"][index] is not None,
                exact_pipedream=row["pipedream exact"]["best_ns"][index],
                exact=_best(keeping, memory),
                recompute=_best([*keeping, *_plans(parts, ("exact", "recompute"))], memory),
            )
        )
    return found


def _plans(
    parts: Mapping[str, list[Any]], which: tuple[str, str], first: int = 0
) -> list[Mapping[str, Any]]:
    """The plans of one kind for the memories from `first` on, as far as there are any."""
    part, who = which
    return [each[who] for each in parts[part][first:] if each and each[who]]


def _best(plans: Iterable[Mapping[str, Any]], memory: int) -> float | None:
    """The shortest period of the plans that fit."""
    fitting = (plan["period_ns"] for plan in plans if plan["peak_bytes"] <= memory)
    return min(fitting, default=None)


def below(point: Point) -> list[str]:
    """Who has a point below ours at the same memory under the same model."""
    rivals = {
        "PipeDream": (point.pipedream, point.ours),
        "the ILP": (point.ilp, point.ours),
        "the ILP alone": (next(iter(point.alone), None), point.ours),
        "PipeDream, exact": (point.exact_pipedream if point.has_exact else None, point.exact),
    }
    return [
        name
        for name, (theirs, ours) in rivals.items()
        if theirs is not None and (ours is None or theirs < ours * (1 - TIE))
    ]


def image(key: str) -> str:
    """Where the picture of a row is, from docs/."""
    return f"img/paper-{key.replace(' ', '-')}gpus.png"


def picture(key: str, row: Row) -> Picture:
    """Memory and period by the paper's count of bytes: the form of its figures."""
    found = points(row)
    name, gpus = key.split()
    return Picture(
        title=f"{name}, {gpus} GPUs",
        cloud=row["pipedream paper"]["points"],
        ours=_series((each.memory, each.ours) for each in found),
        contiguous=(),
        bound=_series((each.memory, each.bound) for each in found),
        ilp=_series((each.memory, each.ilp) for each in found),
    )


def _series(values: Iterable[tuple[int, float | None]]) -> list[tuple[int, float]]:
    return [(memory, value) for memory, value in values if value is not None]


def page(rows: Mapping[str, Row]) -> Iterator[str]:
    """Figures 11 to 16 and the two networks that the paper only mentions."""
    yield "# Figures 11 to 16 of the paper, drawn anew"
    yield (
        "The command `python -m benchmarks.paper_figures` measures these points. The setting is"
        " that of Beaumont, Eyraud-Dubois and Shilova (2020), section 7: groups of layers that no"
        " edge passes by, one half-duplex link of 12 GB/s between each two GPUs, bytes counted as"
        " equation (36) does (`--memory-model paper`). Profiles are computed from shapes"
        " (`pipeplan/testing/networks.py`), not measured on the paper's GPUs: the form of a figure"
        " can be compared with the paper's, a single number cannot. Memory is a share of a range:"
        " 0 % is the least with which a contiguous 1F1B plan exists, 100 % what the best such plan"
        " needs when memory is no limit; the rows have 10, 25, 50, 75 and 100 %."
    )
    yield (
        "`PipeDream` (blue) is the best point of its exhaustive search. `ILP` (green) is the"
        " [paper's integer program](../reference/paper-ilp.md), which starts from our plan of this"
        " memory with k = 1; its gap is to the bound that it proves itself. `alone` is the ILP"
        " without a start, within the same limit. `ours` (red) is the planner's best plan of any"
        " k, found for this memory or less; `bound` holds for all of them. The last three columns"
        " are the same GPUs under exact memory; - was not measured. Times are ms per micro-batch."
        f" Limits count work, not time: {_limits(rows)}; the paper's ILP had an hour. Finer"
        " chains, more memories and other schedules under exact memory are in [the"
        " comparison](compare.md)."
    )
    yield "## Summary"
    yield bullets(summary(rows))
    for key, row in rows.items():
        name, gpus = key.split()
        yield f"## {name}, {gpus} GPUs"
        yield f"![memory and period of {name}, {gpus} GPUs](../{image(key)})"
        yield table(HEAD, map(_cells, points(row)))
        search = row["pipedream paper"]
        yield (
            f"{row['memory']['layers']} layers; {len(search['points'])} points of PipeDream's"
            f" search, {search['left_out']} partitions left out."
        )


def _cells(point: Point) -> tuple[str, ...]:
    return (
        format_bytes(point.memory),
        _ms(point.pipedream),
        _ms(point.ilp),
        f"{point.status}, {_gap(point.ilp, point.ilp_bound)}",
        _ms(point.alone[0]) if point.alone else "-",
        _ms(point.ours_k1),
        _ms(point.ours),
        _ms(point.bound),
        _gap(point.ours, point.bound),
        _ms(point.exact_pipedream),
        *([_ms(point.exact), _ms(point.recompute)] if point.has_exact else ["-", "-"]),
    )


def _ms(value: float | None) -> str:
    return "none" if value is None else f"{value / 1e6:.2f}"


def _gap(period: float | None, bound: float | None) -> str:
    return "-" if period is None or not bound else f"{period / bound - 1:.1%}"


def _limits(rows: Mapping[str, Row]) -> str:
    """The work that each plan and each ILP had."""
    named = [(name.split()[0], part) for row in rows.values() for name, part in row.items()]
    told = []
    for what, key, who in (
        ("paper", "ours_s", "the plan with k = 1"),
        ("any", "ours_s", "that with any k"),
        ("exact", "ours_s", "each under exact memory"),
        ("paper", "ilp_s", "the ILP"),
    ):
        limits = sorted({part[key] for name, part in named if name == what})
        told.append(f"{who} has {' or '.join(f'{limit:g}' for limit in limits)} s")
    return ", ".join(told)


def summary(rows: Mapping[str, Row]) -> Iterator[str]:
    """Who is below whom, and what the start is worth to the ILP."""
    named = [(key, point) for key, row in rows.items() for point in points(row)]
    every = [point for _, point in named]
    lost = [
        f"{name} on {key} GPUs of {format_bytes(point.memory)}"
        for key, point in named
        for name in below(point)
    ]
    yield (
        f"{len(every)} points of {len(rows)} figures; below ours at the same memory:"
        f" {', '.join(lost) or 'nobody'}."
    )
    states = Counter(point.status for point in every)
    yield "The ILP from our plan: " + ", ".join(f"{n} {name}" for name, n in states.items()) + "."
    optimal = [point for point in every if point.status == "optimal"]
    equal = sum(point.ilp == point.ours_k1 for point in optimal)
    yield (
        "Where the ILP proves its optimum, ours with k = 1 equals it at"
        f" {equal} of {len(optimal)}."
    )
    yield _start(point for point in every if point.alone)
    beside = [point.ours / point.pipedream for point in every if point.ours and point.pipedream]
    yield (
        f"Ours / PipeDream, geometric mean over {len(beside)} points:"
        f" {geometric_mean(beside):.3f}, least {min(beside):.3f}."
    )
    apart = [point.ours / point.bound for point in every if point.ours and point.bound]
    yield f"Ours above the bound, geometric mean: {geometric_mean(apart) - 1:.1%}."


def _start(asked: Iterable[Point]) -> str:
    """The ILP with a start beside the ILP without one."""
    both = [(point.alone[0], point.ilp) for point in asked]
    known = [(alone, ilp) for alone, ilp in both if alone is not None and ilp is not None]
    longer = [alone / ilp for alone, ilp in known]
    return (
        f"Without a start the ILP finds a plan at {len(known)} of {len(both)} points within the"
        f" same limit; there its period is {geometric_mean(longer) - 1:.1%} longer in the"
        f" geometric mean, at most {max(longer) - 1:.1%}."
    )
