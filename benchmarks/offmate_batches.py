"""OffMate's batch sizes and a faster device: Figures 4.8 and 4.9 of X. Zhao's thesis.

`python -m benchmarks.offmate` measures these, too.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from benchmarks.markdown import table
from benchmarks.offmate_models import BATCH, RTX_3060, RTX_4080, Llama
from pipeplan.errors import InfeasibleError, TimeLimitError
from pipeplan.remat.states.problem import DeviceAndHost
from pipeplan.remat.states.solve import plan_states, relax

SECONDS = 60.0
"""Of the solver, for each of its runs."""
DEPTHS = (8, 16, 24, 32)
RANGE = (1, 16)
"""Batches that O-ILP chooses from, in sequences."""
FIXED = (1, 2, 3, 4, 5, 6, 8)
"""Batches of the right side of Figure 4.8."""
FASTER = {"products": 8.0, "moves": 2.0}
"""An RTX 4080 beside an RTX 3060: the thesis's eight times; memory at 717 and 360 GB/s."""
FASTER_BATCH = 10
"""What the thesis's O-ILP chooses there."""
Row = dict[str, Any]


def chosen() -> dict[str, Row]:
    """Left side of Figure 4.8: batches that O-ILP chooses, by depth."""
    return {str(layers): _chosen(Llama(layers=layers), RTX_3060) for layers in DEPTHS}


def fixed() -> dict[str, Row]:
    """Right side of Figure 4.8: what batches give at full depth."""
    return {str(batch): _planned(Llama(batch=batch), RTX_3060) for batch in FIXED}


def devices() -> dict[str, Row]:
    """Figure 4.9: an RTX 4080 with 16 GB."""
    rows = {
        str(layers): _planned(Llama(FASTER_BATCH, layers, **FASTER), RTX_4080) for layers in DEPTHS
    }
    return rows | {"chosen": _chosen(Llama(**FASTER), RTX_4080)}


def _chosen(llama: Llama, machine: DeviceAndHost) -> Row:
    """O-ILP's own batch, in sequences, and its sequences a second."""
    start = time.process_time()
    least, most = (each / BATCH for each in RANGE)
    found = relax(llama.problem(machine), SECONDS, batches=(least, most))
    return {
        "batch": found.batch * BATCH,
        "a_second": BATCH * 1e9 / found.step_ns,
        "cpu_s": time.process_time() - start,
    }


def _planned(llama: Llama, machine: DeviceAndHost) -> Row:
    """Sequences a second without limits, of O-ILP's parts, and of whole tensors by the judge."""
    problem = llama.problem(machine)
    start = time.process_time()
    found: Row = {"without_limits": llama.batch * 1e9 / problem.compute_ns}
    try:
        plan = plan_states(problem, SECONDS)
    except (InfeasibleError, TimeLimitError):
        return found | {"plan": None}
    names = plan.option_names
    return found | {
        "parts": llama.batch * 1e9 / plan.relaxation.step_ns,
        "plan": llama.batch * 1e9 / plan.outcome.makespan_ns,
        "host": plan.host_bytes / 1e9,
        "options": {name: names.count(name) for name in dict.fromkeys(names)},
        "host_updates": sum(g.trained_bytes for g in plan.problem.groups if g.on_host) / 1e9,
        "cpu_s": time.process_time() - start,
    }


def figure_4_8(left: dict[str, Row], right: dict[str, Row]) -> Iterator[str]:
    """Both sides of it."""
    yield "## Figure 4.8: the batch"
    yield (
        f"Left: the batch that O-ILP chooses between {RANGE[0]} and {RANGE[1]} sequences (section"
        " 4.5.3), for most sequences a second. It is no whole number."
    )
    yield table(
        ("layers", "batch", "sequences a second", "CPU s"),
        (
            (layers, f"{row['batch']:.2f}", f"{row['a_second']:.3f}", f"{row['cpu_s']:.0f}")
            for layers, row in left.items()
        ),
    )
    planned = {batch: row for batch, row in right.items() if row["plan"]}
    best = max(planned, key=lambda batch: float(planned[batch]["plan"]))
    yield (
        "Right: 32 layers at given batches, in sequences a second: without limits, O-ILP's parts,"
        " and the judge's time of whole tensors (none: the solver found nothing in"
        f" {SECONDS:.0f} s, or nothing of whole tensors). Most has a batch of {best}; O-ILP's own"
        f" choice is {left['32']['batch']:.2f} (the thesis's: 4, and 5 where it measured)."
    )
    yield table(
        ("batch", "without limits", "O-ILP", "planned", "options of blocks", "host, 10^9 bytes"),
        ((batch, *_cells(row)) for batch, row in right.items()),
    )


def figure_4_9(found: dict[str, Any]) -> Iterator[str]:
    """The faster device."""
    yield "## Figure 4.9: a faster device"
    rows = {layers: row for layers, row in found.items() if layers != "chosen"}
    over = [row["without_limits"] / row["plan"] - 1 for row in rows.values() if row["plan"]]
    yield (
        f"An RTX 4080: 16 GB less 2, {FASTER['products']:.0f} times the products of an RTX 3060,"
        f" twice the bandwidth. Batch {FASTER_BATCH}, as in the thesis; O-ILP of ours chooses"
        f" {found['chosen']['batch']:.2f} of {RANGE[0]} to {RANGE[1]} at full depth. No product is"
        " dear there (section 4.4): a copy out and back takes longer than making it again, so that"
        " blocks recompute, as the thesis has it. Its overhead is 30 to 50 %, ours"
        f" {min(over):.0%} to {max(over):.0%}. Sequences a second; speeds of updates there are"
        " assumed (the thesis tells none)."
    )
    yield table(
        ("layers", "without limits", "O-ILP", "planned", "options of blocks", "host, 10^9 bytes"),
        ((layers, *_cells(row)) for layers, row in rows.items()),
    )


def _cells(row: Row) -> tuple[str, ...]:
    if not row["plan"]:
        return (f"{row['without_limits']:.3f}", "", "none", "", "")
    options = ", ".join(f"{count} {option}" for option, count in row["options"].items())
    speeds = (f"{row[name]:.3f}" for name in ("without_limits", "parts", "plan"))
    return (*speeds, options, f"{row['host']:.1f}")
