"""What an action costs the executor itself: stages that do nothing, messages inside one process.

CPU time of all ranks over all actions (F, B, SEND, RECV, FREE, OPT), so a busy machine does not
show in it; it should stay below 50 us.

    python -m benchmarks.dispatch
"""

from __future__ import annotations

import time

from pipeplan.calibrate.overhead import one_f_one_b_plan
from pipeplan.chain import Chain, Layer
from pipeplan.cluster import uniform
from pipeplan.plan import OpKind, Plan, Stage
from pipeplan.runtime.dry_run.clock import VirtualClock
from pipeplan.runtime.dry_run.run import PlannedTimes
from pipeplan.runtime.transport.base import Transport
from pipeplan.testing.in_process import run_ranks
from pipeplan.testing.plain_links import on_plain_links

STEPS = 20


def measure(ranks: int) -> float:
    """CPU us per action of a 1F1B pipeline of `ranks` ranks, contiguous, with flush."""
    plan, pattern = _plan(ranks), one_f_one_b_plan(ranks)
    computes = {(kind, stage): 0 for kind in (OpKind.F, OpKind.B) for stage in range(ranks)}
    idle = (0,) * ranks
    times = PlannedTimes(computes, idle, idle, plan.microbatches)

    def work(transport: Transport) -> int:
        executor = on_plain_links(plan, pattern, transport, VirtualClock(), times)
        begin = time.thread_time_ns()
        executor.run(0, STEPS)
        return time.thread_time_ns() - begin

    spent = sum(run_ranks(ranks, work))
    microbatches = STEPS * pattern.microbatches
    actions = sum(1 for r in range(ranks) for _ in pattern.actions(r, microbatches))
    return spent / actions / 1e3


def _plan(ranks: int) -> Plan:
    """Only stages and step size matter to an executor."""
    layers = tuple(
        Layer(name=f"l{i}", forward_ns=1, backward_ns=1, output_bytes=1) for i in range(ranks)
    )
    chain = Chain(name="nothing", layers=layers)
    return Plan(
        chain=chain,
        chain_digest=chain.digest(),
        cluster=uniform(ranks, 1),
        semantics="flush",
        period_ns=1,
        step_ns=1,
        stages=tuple(Stage(id=i, layers=(i, i), gpu=i) for i in range(ranks)),
        ops=(),
        memory=(),
    )


if __name__ == "__main__":
    for ranks in (1, 2, 4, 8):
        print(f"{ranks} ranks: {min(measure(ranks) for _ in range(3)):.1f} us per action")
