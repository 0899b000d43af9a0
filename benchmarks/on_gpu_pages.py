"""The page of what one GPU did, from what `benchmarks.on_gpu` has kept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.markdown import table
from benchmarks.on_gpu import LIMIT_S, MICROBATCHES, ROUNDS, RUNS, SHARES, STEPS, TASKS, WAYS, Run

RUN_HEAD = (
    "task", "memory", "host", "peak", "tensors", "allocated", "reserved", "step, plan",
    "step, run", "loop",
)  # fmt: skip
MODULE_HEAD = ("task", "way", "budget", "bytes, plan", "bytes", "step, told", "step")


def page(found: dict[str, Any]) -> Iterator[str]:
    """Runs, then modules."""
    machine = found["machine"]["facts"]
    yield "# On one GPU"
    yield (
        "The command `python -m benchmarks.on_gpu` profiles each task on the GPU, plans it for"
        " several sizes of memory, and trains the plans in one process on one thread; then it"
        " calls modules of `rematerialize` beside torch's own `checkpoint` of every block. Times"
        f" of runs are medians of {ROUNDS} rounds of {STEPS} steps, those of modules the best of"
        " 12 calls, the GPU idle before and behind each. `CUBLAS_WORKSPACE_CONFIG` is :4096:8."
        f" {machine['gpu']}, torch {machine['torch']}, one measurement; copies to the host:"
        f" {machine['host_bytes_per_s'] / 1e9:.1f} GB/s. Rows that are missing have not been"
        " measured yet."
    )
    yield "## Plans"
    yield (
        f"{MICROBATCHES} micro-batches a step, `flush`, {LIMIT_S:g} s of planning. `memory`: what"
        " the plan may use beside states, of what one that keeps everything takes. `host`: tensors"
        " may wait there. `peak`: GiB that the plan says. `tensors`: bytes measured in the second"
        " step, storage by storage, less the plan's. `allocated` and `reserved`: the most that"
        " torch's allocator says, over the plan's peak. `step`: ms that the plan says, and that"
        " the run takes, in brackets the least and the largest round. `loop`: ms of a plain loop,"
        " which keeps everything and updates parameter by parameter."
    )
    yield table(RUN_HEAD, [_run_cells(found, case) for case in _known_runs(found)])
    yield "## Modules"
    yield (
        "A forward and its backward. `bytes`: GiB beside weights and gradients, planned and"
        " measured (what tensors and kernels asked torch's allocator for). `step`: ms that the"
        " plan's rehearsal told, and measured. Budgets: what `checkpoint` takes (0), and half of"
        " what the plain module takes more (0.5)."
    )
    yield table(MODULE_HEAD, list(_module_rows_of(found)))


def _known_runs(found: dict[str, Any]) -> Iterator[Run]:
    every = (Run(name, *each) for name in TASKS for each in RUNS)
    return (case for case in every if "peak" in found.get(case.key, {}).get("row", {}))


def _run_cells(found: dict[str, Any], case: Run) -> tuple[str, ...]:
    row, loop = found[case.key]["row"], found[f"{case.task} loop"]["row"]
    rounds = row["all_ns"]
    return (
        TASKS[case.task],
        f"{case.share:.0%}",
        "yes" if case.offload else "",
        f"{row['peak'] / 2**30:.2f}",
        f"{row['live'] - row['peak']:+d}",
        f"{row['allocated'] / row['peak']:.3f}",
        f"{row['reserved'] / row['peak']:.3f}",
        f"{row['step_ns'] / 1e6:.0f}",
        f"{row['measured_ns'] / 1e6:.0f} ({min(rounds) / 1e6:.0f} to {max(rounds) / 1e6:.0f})",
        f"{loop['measured_ns'] / 1e6:.0f}",
    )


def _module_rows_of(found: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for name in TASKS:
        ways = [(way, f"{share:g}") for share in SHARES for way in WAYS[name]]
        for way, share in (("plain", ""), ("checkpoint", ""), *ways):
            row = found.get(f"{name} module {way} {share}".strip(), {}).get("row", {})
            if "measured_ns" in row:
                yield (
                    TASKS[name],
                    f"`{way}`" if share else way,
                    share,
                    f"{row['planned_bytes'] / 2**30:.3f}" if share else "",
                    f"{row['bytes'] / 2**30:.3f}",
                    f"{row['planned_ns'] / 1e6:.0f}" if share else "",
                    f"{row['measured_ns'] / 1e6:.0f}",
                )
