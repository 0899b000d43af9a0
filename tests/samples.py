"""Small plans made by hand, for tests that need a plan and no planner."""

from __future__ import annotations

from functools import partial
from typing import Literal

from pipeplan.chain import Chain, Layer
from pipeplan.cluster import uniform
from pipeplan.plan import MemoryRow, Op, OpKind, Plan, Semantics, Stage


def two_stages(
    *,
    duplex: Literal["full", "half"] = "full",
    semantics: Semantics = "2bw",
    unit_ns: int = 1,
) -> Plan:
    """One stage on each of two GPUs: F lasts 2, B 4, transfers 2, the period 8, in `unit_ns`.

    B of stage 1 crosses the period's end. The memory table is made up.
    """
    layers = tuple(
        Layer(name=name, forward_ns=2 * unit_ns, backward_ns=4 * unit_ns, output_bytes=8)
        for name in ("a", "b")
    )
    chain = Chain(name="two", input_bytes=8, layers=layers)
    cluster = uniform(2, 1000, bandwidth_bytes_per_s=4 * 10**9 // unit_ns, duplex=duplex)
    op = partial(_op, unit_ns)
    return Plan(
        chain=chain,
        chain_digest=chain.digest(),
        cluster=cluster,
        semantics=semantics,
        period_ns=8 * unit_ns,
        step_ns=64 * unit_ns,
        stages=(Stage(id=0, layers=(0, 0), gpu=0), Stage(id=1, layers=(1, 1), gpu=1)),
        ops=(
            op("F", 0, gpu=0, start=0, last=2),
            op("SEND_F", 0, link=(0, 1), start=2, last=2),
            op("F", 1, gpu=1, start=4, last=2),
            op("B", 1, gpu=1, start=6, last=4),
            op("SEND_B", 1, link=(1, 0), start=2, last=2, shift=1),
            op("B", 0, gpu=0, start=4, last=4, shift=1),
        ),
        memory=(_row(0, budget=1000), _row(1, budget=20)),
    )


def _op(
    unit_ns: int,
    kind: str,
    stage: int,
    *,
    start: int,
    last: int,
    shift: int = 0,
    gpu: int | None = None,
    link: tuple[int, int] | None = None,
) -> Op:
    return Op(
        kind=OpKind(kind),
        stage=stage,
        copy_=0,
        gpu=gpu,
        link=link,
        start_ns=start * unit_ns,
        duration_ns=last * unit_ns,
        shift=shift,
    )


def _row(gpu: int, budget: int) -> MemoryRow:
    return MemoryRow(
        gpu=gpu,
        states_bytes=0,
        saved_bytes=16,
        working_bytes=8,
        direct_bytes=0,
        message_bytes=8,
        peak_bytes=32,
        budget_bytes=budget,
    )
