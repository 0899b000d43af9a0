"""Offloading added to a small plan written by hand: runs, ways to the host, times of the two ops.

How many bytes leave is stated by the test, as durations are in `tests.handmade`; the memory table
is the test's own too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal

from pipeplan.cluster import Host
from pipeplan.plan import LayerRanges, MemoryRow, Op, OpKind, Plan, Remat, Stage
from pipeplan.simulator import Simulation
from tests import handmade

HOST_BYTES = 2**40


def offloaded(
    plan: Plan,
    runs: Mapping[int, LayerRanges],
    sizes: Mapping[int, int],
    times: Mapping[str, int],
    *,
    duplex: Literal["full", "half"] = "full",
    host_bytes: int = HOST_BYTES,
    inputs: Collection[int] = (),
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
        inputs: stages whose saved input leaves.
        fields: other fields of the plan.
    """
    host = Host(memory_bytes=host_bytes, bandwidth_bytes_per_s=10**9, duplex=duplex)
    stages = tuple(
        stage.model_copy(update={"remat": _remat(stage, runs.get(stage.id, ()), inputs)})
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


LAYERS: list[dict[str, Any]] = [
    {"output_bytes": 5, "saved_bytes": 3, "saved_input_bytes": 1, "saved_output_bytes": 1},
    {"output_bytes": 5, "saved_bytes": 3, "saved_input_bytes": 2, "saved_output_bytes": 1},
]
TIMES = {"0OFFLOAD0": 4, "0PREFETCH0": 28}


def one_stage(
    times: dict[str, int] = TIMES, *, back: int = 36, period: int = 14, **fields: Any
) -> Plan:
    """One stage of two layers; F 4, B 6; 3 + 3 + max(1, 2) = 8 bytes leave, one per ns.

    Its bytes: (M2) 1 + 6 + 2 + 1 = 10; (M3) 17 forward (5 + 1 + 6 + 5), 20 backward
    (1 + 6 + 2 + 1 + 5 + 5).
    """
    of = handmade.chain([(2, 3), (2, 3)], LAYERS, input_bytes=4)
    plan = handmade.plan(of, [(0, 1, 0)], period, {"0F0": 0, "0B0": back}, step_ns=8 * period)
    return offloaded(plan, {0: ((0, 1),)}, {0: 8}, times, **fields)


def two_stages(times: dict[str, int], **fields: Any) -> Plan:
    """Two stages on one GPU, T = 10: 0F 0..2, 1F 2..4, 1B 14..17, 0B 17..20; 3 and 4 ns away."""
    layers = [{"output_bytes": 2, "saved_bytes": 3}, {"output_bytes": 2, "saved_bytes": 4}]
    of = handmade.chain([(2, 3), (2, 3)], layers)
    computes = {"0F0": 0, "1F0": 2, "1B0": 14, "0B0": 17}
    plan = handmade.plan(of, [(0, 0, 0), (1, 1, 0)], 10, computes)
    return offloaded(plan, {0: ((0, 0),), 1: ((1, 1),)}, {0: 3, 1: 4}, times, **fields)


SHARED = {"0OFFLOAD0": 2, "1OFFLOAD0": 5, "1PREFETCH0": 10, "0PREFETCH0": 14}


def spans(simulation: Simulation, microbatch: int) -> dict[str, tuple[int, int]]:
    """Start and end of every op of one micro-batch, by stage and kind."""
    return {
        f"{span.stage}{span.kind}": (span.start_ns, span.end_ns)
        for span in simulation.spans()
        if span.microbatch == microbatch
    }


def _remat(stage: Stage, runs: LayerRanges, inputs: Collection[int]) -> Remat | None:
    again, enters = stage.remat.recompute if stage.remat else (), stage.id in inputs
    if not (again or runs or enters):
        return None
    return Remat(recompute=again, offload=runs, offload_input=enters)


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


TABLE = (row(0, saved=22, working=10, host=24),)
"""The memory table of `one_stage`, by hand in tests/unit/simulator/test_offload.py."""
