"""The result pages of one device: planned schedules, and modules in training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.markdown import bullets, table
from benchmarks.remat_offload import (
    BATCHES,
    BEST_GOAL,
    DYNPROG_GOAL,
    IMAGES,
    METHODS,
    NETWORKS,
    by_side,
    misses,
    row,
    summary,
)


def remat(found: dict[str, Any]) -> Iterator[str]:
    """Rematerialization and offloading on one device."""
    yield "# Rematerialization and offloading on one device"
    yield (
        "The command `python -m benchmarks.remat` makes all of this page, `--only PART --networks"
        " NAME` a part of it. No GPU is measured: the chains' bytes and times are computed from"
        " shapes for a V100-PCIE, and the judge replays every schedule."
        " [The rules](../reference/remat-rules.md) say what the chains are and what the goals"
        " mean. CPU seconds, and the limit of the exact search, are those of two shared cores."
    )
    yield "## Speed"
    speeds = found["speed"]["speed"]
    yield table(
        ("planner", "CPU s", "at most"), ((n, f"{s:.2f}", f"{most:.0f}") for n, s, most in speeds)
    )
    yield "## Joins"
    yield bullets(f"{name}: {_shown(value)}" for name, value in found["joins"]["join"].items())
    yield "![memory of joins](../img/remat-join-memory.png)"
    yield "![length of joins](../img/remat-join-length.png)"
    yield "## Rematerialization and offloading together"
    yield "![POFO beside its parts](../img/remat-pofo.png)"
    yield from _offloading(found["offloading"])
    yield from _batches(found["batches"])


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {number:.3f}" for key, number in value.items())
    return str(value)


def _offloading(found: dict[str, Any]) -> Iterator[str]:
    """Figures 5 to 19 of the offloading paper."""
    points = {
        f"{name}, {IMAGES[side]} x {side}": mine
        for side, networks in by_side(found).items()
        for name, mine in networks.items()
    }
    yield "## Offloading"
    yield bullets(summary([point for members in points.values() for point in members]))
    head = ("worst ratio to (B1)", *METHODS, "proven", "exact / proven", "beaten")
    yield "\n".join([table(head, ()), *(row(name, each) for name, each in points.items())])
    yield "## Budgets at which a goal is missed"
    goals = (f"dynprog, goal {DYNPROG_GOAL}", f"exact, goal {BEST_GOAL}", "proven")
    lines = [line for name, each in points.items() for line in misses(name, each)]
    yield "\n".join([table(("goal missed at", "memory", *goals), ()), *lines])
    yield "## Pictures"
    for side in IMAGES:
        yield f"![offloading at {side} pixels](../img/remat-offload-{side}.png)"


def _batches(found: dict[str, Any]) -> Iterator[str]:
    """Powers of two, as the offloading paper takes them."""
    yield "## Batches that are powers of two"
    large = [[found[f"{name} {b}"]["worst"] for b in BATCHES if b >= 32] for name in NETWORKS]
    yield (
        "Images of 224 pixels a side: images per second with all stored, and DYNPROG's worst ratio"
        " to (B1) over seven budgets. From batch 32 on a network's worst ratio changes by at most"
        f" {max(max(each) - min(each) for each in large):.3f}."
    )
    head = ("network", *(f"batch {batch}" for batch in BATCHES))
    yield table(
        head, ((name, *(_batch(found[f"{name} {b}"]) for b in BATCHES)) for name in NETWORKS)
    )


def _batch(found: dict[str, float]) -> str:
    return f"{found['images_per_s']:.0f}, {found['worst']:.3f}"


def rematerialized(found: dict[str, Any]) -> Iterator[str]:
    """`pipeplan.rematerialize` in training."""
    yield "# Rematerialized modules in training"
    machine = found["machine"]
    yield (
        "The command `python benchmarks/rematerialized.py` measures this, nothing offloaded, ten"
        " budgets from the least to all that is stored. Steps, a rehearsal and steps take turns in"
        " one process, five rounds, in processor time; ratios are medians over the rounds, least"
        " and largest of the budgets. `alone`: (X4) / measured. `told`: (X5) / measured. `drift`:"
        " steps before / steps behind, the same work twice. Two or three other processes shared"
        " the"
        f" machine: {machine['cores']} cores, {machine['cpu']}, torch {machine['torch']}."
    )

    def cells(name: str, rows: list[dict[str, Any]]) -> Iterator[str]:
        yield from (name, str(len(rows)))
        yield from (
            str(sum(each[what] for each in rows)) for what in ("bit_equal", "within_budget")
        )
        for what, digits in (("peak", 4), ("alone", 2), ("told", 2), ("drift", 2)):
            values = [each[what] for each in rows]
            yield f"{min(values):.{digits}f} to {max(values):.{digits}f}"

    head = ("task", "budgets", "bit-equal", "within budget", "peak, predicted / measured")
    rows = (list(cells(name, each["budgets"])) for name, each in sorted(found["tasks"].items()))
    yield table((*head, "alone", "told", "drift"), rows)
