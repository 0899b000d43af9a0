"""The result page of plans of operator graphs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.markdown import table

AIMS = {
    "toy 2, roofline": 0.07,
    "toy 4, roofline": 0.075,
    "toy 12, roofline": 0.10,
    "toy 2, measured": 0.07,
    "toy 4, measured": 0.075,
    "toy 12, measured": 0.10,
}
"""Overheads at half of the bytes that the project aims at."""

TOY_HEAD = (
    "layers, times",
    "aim",
    "ours",
    "bound",
    "Rockmate",
    "Rotor",
    "full recompute at share",
    "ours at Rockmate's bytes",
    "CPU s, capture",
    "CPU s, plan",
)


def page(found: dict[str, Any]) -> Iterator[str]:
    """Overhead over bytes, option sets, planning times."""
    yield "# Plans of operator graphs"
    yield (
        "The command `python -m benchmarks.operator_graphs` measures all of this page;"
        " [the solvers](../reference/operator-solvers.md) say what the methods are. Overhead is"
        " the time of all runs over that of every operation once, by one cost model for all"
        " methods; every program is judged. CPU seconds are those of one thread on a machine that"
        " others use. A cell is empty where a method found no program."
    )
    yield "## Toy GPTs at half of the bytes of an eager step"
    yield (
        "d 256, 4 heads, T 128, batch 4, explicit attention, dropout 0.1, with their loss. Shares"
        " are of what comes and goes in an eager step, gradients of parameters being there before."
        " `auto` tries more than Rockmate up to 130 operations alone. The aims come from"
        " measurements of Rockmate's own code (12.7, 17.3 and 17.4 %) with a GPT of the same"
        " shapes whose eager step holds more: 35.3, 59.3 and 155.4 MiB. Half of those bytes is"
        " the budget of the column `ours at Rockmate's bytes`, with its share of an eager step"
        " here."
    )
    yield table(
        TOY_HEAD,
        (_toy(name, found[name]) for name in AIMS if name in found),
    )
    missed = [name for name in AIMS if name in found and _ours(found[name]) > AIMS[name]]
    if missed:
        yield f"The aim is missed by: {'; '.join(each.removeprefix('toy ') for each in missed)}."
    yield from _torch(found)
    yield "## 36 layers of GPT2-large"
    yield (
        "8 rows of 1024 tokens in bfloat16, roofline of an A100, captured without memory. Shares"
        " are of what comes and goes with every operation once. The aims: at most 8 % at 50 % and"
        " 5 % at 60 % with explicit attention."
    )
    for name in ("large 36", "large 36, fused"):
        if name in found:
            yield f"### {'Fused' if 'fused' in name else 'Explicit'} attention"
            yield _large(found[name])
    yield from _planning(found)


def _torch(found: dict[str, Any]) -> Iterator[str]:
    rows = {name: found[name]["torch"] for name in AIMS if "torch" in found.get(name, {})}
    if not rows:
        return
    yield "## Beside PyTorch's activation_memory_budget"
    yield (
        "Torch's partitioner decides for a share of the bytes that are saved, not for a peak. Its"
        " forward and backward are run as they are emitted, by the same times and sizes; `peak` is"
        " the share of an eager step's bytes that they really hold, `ours` the overhead of our"
        " plan (method `rockmate`) within that peak."
    )
    for name, each in rows.items():
        yield f"### Toy GPT, {name.removeprefix('toy ').replace(',', ' layers,')} times"
        yield table(
            ("torch's budget", "peak", "overhead", "ours at that peak"),
            (
                (
                    str(at["budget"]),
                    _share(at["peak"]),
                    _share(at["overhead"]),
                    "" if at["ours"] is None else _share(at["ours"]),
                )
                for at in each
            ),
        )


def _share(value: float) -> str:
    return f"{100 * value:.1f} %"


def _cell(row: dict[str, Any], method: str, index: int = 0, key: str = "overhead") -> str:
    at = row.get(method, {}).get("at", [None] * (index + 1))[index]
    return "" if at is None else _share(at[key])


def _ours(row: dict[str, Any]) -> float:
    at = row["auto" if "auto" in row else "rockmate"]["at"][0]
    return float("inf") if at is None else float(at["overhead"])


def _toy(name: str, row: dict[str, Any]) -> tuple[str, ...]:
    ours = "auto" if "auto" in row else "rockmate"
    full = row["full recompute"]
    return (
        name.removeprefix("toy "),
        _share(AIMS[name]),
        _cell(row, ours),
        _cell(row, ours, key="bound"),
        _cell(row, "rockmate"),
        _cell(row, "rotor"),
        f"{_share(full['overhead'])} at {_share(full['peak'])}",
        f"{_cell(row, ours, 1)} at {_share(row['shares'][1])}" if len(row["shares"]) > 1 else "",
        str(row["capture_cpu_s"]),
        str(row[ours]["cpu_s"]),
    )


def _large(row: dict[str, Any]) -> str:
    shares = row["shares"]
    lines = [
        (method, *(_cell(row, method, index) for index in range(len(shares))), str(spent))
        for method, spent in ((m, row[m]["cpu_s"]) for m in ("rockmate", "rotor"))
    ]
    head = ("method", *(_share(share) for share in shares), "CPU s")
    full = row["full recompute"]
    last = f"full recompute: {_share(full['overhead'])} at {_share(full['peak'])}"
    return f"{table(head, lines)}\n\n{row['operations']} operations; {last}."


def _planning(found: dict[str, Any]) -> Iterator[str]:
    yield "## Options of a block"
    yield (
        "36 pairs of peak and saved bytes of layers of GPT2-large as one block. The aims: at most"
        " 10 CPU s at 50 operations and 120 at 100, all proven."
    )
    yield table(
        ("block", "operations", "options", "all proven", "CPU s"),
        (
            (
                name.removeprefix("options, "),
                str(row["operations"]),
                str(row["options"]),
                "yes" if row["proven"] else "no",
                str(row["cpu_s"]),
            )
            for name, row in found.items()
            if name.startswith("options")
        ),
    )
    if "identical layers" in found:
        yield "## CPU seconds over the number of identical layers"
        seconds = found["identical layers"]["cpu_s"]
        yield table(("layers", "CPU s, plan"), ((key, str(s)) for key, s in seconds.items()))
    for name, row in found.items():
        if name.startswith("sweep"):
            said = "never slower" if row["monotone"] else "slower at times"
            kept = "all peaks are" if row["within"] else "not all peaks are"
            yield (
                f"20 budgets of {name.removeprefix('sweep, ')} layers: {row['answered']} have a"
                f" program; a larger budget is {said}, and {kept} within what was asked."
            )
