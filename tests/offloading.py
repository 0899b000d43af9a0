"""Offloading added to a small plan written by hand: runs, ways to the host, times of the two ops.

How many bytes leave is stated by the test, as durations are in `tests.handmade`; the memory table
is the test's own too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pipeplan.cluster import Host
from pipeplan.plan import MemoryRow, Op, OpKind, Plan, Remat, Runs

HOST_BYTES = 2**40


def offloaded(
    plan: Plan,
    runs: Mapping[int, Runs],
    sizes: Mapping[int, int],
    times: Mapping[str, int],
    *,
    duplex: Literal["full", "half"] = "full",
    host_bytes: int = HOST_BYTES,
    **fields: Any,
) -> Plan:
    """`plan` with stages that offload over ways of one byte per ns.

    Args:
        plan: any plan without offloading; its memory table is dropped.
        runs: by stage.
        sizes: by stage the bytes that leave: as many ns.
        times: absolute start of each op by label, `0OFFLOAD0` and `0PREFETCH0`.
        duplex: of the ways.
        host_bytes: the host's memory.
        fields: other fields of the plan.
    """
    host = Host(memory_bytes=host_bytes, bandwidth_bytes_per_s=10**9, duplex=duplex)
    stages = tuple(
        stage.model_copy(update={"remat": _remat(stage.remat, runs.get(stage.id, ()))})
        for stage in plan.stages
    )
    ops = tuple(_op(plan, label, time, sizes) for label, time in times.items())
    changes = {
        "cluster": plan.cluster.model_copy(update={"host": host}),
        "stages": stages,
        "ops": (*plan.ops, *ops),
        "memory": (),
    }
    return Plan.from_json(plan.model_copy(update=changes | fields).to_json())


def row(
    gpu: int, *, states: int = 0, host: int = 0, budget: int = 2**40, **terms: int
) -> MemoryRow:
    """A memory row by its terms saved, working, direct, message; the peak is their sum."""
    parts = {name: terms.get(name, 0) for name in ("saved", "working", "direct", "message")}
    return MemoryRow(
        gpu=gpu,
        states_bytes=states,
        peak_bytes=states + sum(parts.values()),
        budget_bytes=budget,
        host_bytes=host,
        **{f"{name}_bytes": size for name, size in parts.items()},
    )


def _remat(before: Remat | None, runs: Runs) -> Remat | None:
    again = before.recompute if before else ()
    return Remat(recompute=again, offload=runs) if again or runs else None


def _op(plan: Plan, label: str, time: int, sizes: Mapping[int, int]) -> Op:
    kind = OpKind.OFFLOAD if "OFFLOAD" in label else OpKind.PREFETCH
    stage, copy = map(int, label.split(kind))
    shift, start = divmod(time, plan.period_ns)
    return Op(
        kind=kind,
        stage=stage,
        copy_=copy,
        gpu=plan.stages[stage].gpu,
        start_ns=start,
        duration_ns=sizes[stage],
        shift=shift,
    )
