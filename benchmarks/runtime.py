"""Our executor on sleeping ops: beside an ideal one, and beside torch.distributed.pipelining.

    python -m benchmarks.runtime [--quick]

prints a table and writes benchmarks/results/runtime.json. All runtimes run in the same processes,
in turns, the best of three rounds counts: on a shared machine a mean says little. `quick` does one
round of the shortest ops.

replay: measured makespan / ideal makespan of the same sleeps (flush, steps of 16 micro-batches).
steady: torch's mean time per micro-batch in 1F1B's steady part / ours, same flush plan.
step:   torch's makespan of one flush step / ours.
2bw:    micro-batches per second of our 2bw plan / of torch's flush steps on end.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import tempfile
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from torch.distributed import FileStore

from benchmarks import dispatch, sleeping
from benchmarks.sleeping_runs import flush_plan, ours, torchs, twobw_plan
from pipeplan.runtime.transport.gloo import GlooTransport
from pipeplan.runtime.transport.rank_grid import RankGrid

MICROBATCHES, STEPS, ROUNDS = 16, 2, 3
RESULT = Path(__file__).parent / "results" / "runtime.json"
LIMITS = {20: 1.03, 5: 1.08, 2: 1.15}
"""Op length in ms -> largest replay ratio we promise."""
CASES = [(4, 1, 20), (4, 1, 5), (4, 1, 2), (8, 1, 20), (8, 1, 5), (8, 1, 2), (4, 2, 10), (4, 2, 5)]
"""(ranks, stages per rank, F in ms)."""
COLUMNS = ("replay", "torch_replay", "steady", "step", "2bw")


def case(
    ranks: int, chunks: int, forward_ms: int, rounds: int, transport: GlooTransport
) -> dict[str, Any]:
    """All rounds of one case; every rank knows the result."""
    forward, m = forward_ms * 10**6, MICROBATCHES
    flush = flush_plan(ranks, chunks, forward, m)
    twobw = twobw_plan(ranks, forward, m) if chunks == 1 else None
    stages, rival = ranks * chunks, "1F1B" if chunks == 1 else "interleaved"

    def best(values: Iterator[float]) -> float:
        return min(values)

    seen: dict[str, list[float]] = {name: [] for name in (*COLUMNS, "t_period", "period")}
    spans: list[tuple[float, float, float]] = []
    for _ in range(rounds):
        mine = transport.gather(ours(flush, STEPS, forward, transport))
        theirs = transport.gather(torchs(rival, ranks, STEPS, forward, m, transport))
        our_steps, their_steps = (sleeping.steps_of(each, m) for each in (mine, theirs))
        seen["replay"].append(best(sleeping.replay_ratio(s, stages) for s in our_steps))
        seen["torch_replay"].append(best(sleeping.replay_ratio(s, stages) for s in their_steps))
        seen["period"].append(best(sleeping.period_ns(s, ranks) for s in our_steps))
        seen["t_period"].append(best(sleeping.period_ns(s, ranks) for s in their_steps))
        flow = 0.0
        if twobw is not None:
            long = transport.gather(ours(twobw, 2 * STEPS, forward, transport))
            flow = sleeping.period_ns(long, m)
        spans.append(
            (
                best(float(sleeping.span_ns(s)) for s in our_steps),
                best(float(sleeping.span_ns(s)) for s in their_steps),
                flow,
            )
        )
    ours_ns, theirs_ns, flow_ns = (min(each) for each in zip(*spans, strict=True))
    return {
        "ranks": ranks,
        "stages_per_rank": chunks,
        "forward_ms": forward_ms,
        "replay": min(seen["replay"]),
        "replay_limit": LIMITS.get(forward_ms) if chunks == 1 else None,
        "torch_replay": min(seen["torch_replay"]),
        "steady": min(seen["t_period"]) / min(seen["period"]),
        "step": theirs_ns / ours_ns,
        "2bw": theirs_ns / m / flow_ns if flow_ns else None,
    }


def world(ranks: int, work: Callable[[GlooTransport], Any]) -> Any:
    """What rank 0 of `ranks` forked processes makes of `work`."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def body(rank: int, store: str) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        torch.set_num_threads(1)
        patience = timedelta(seconds=120)
        transport = GlooTransport(RankGrid.started(FileStore(store, ranks), rank, ranks, patience))
        result = work(transport)
        if rank == 0:
            sender.send(result)
        transport.close()

    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=body, args=(rank, f"{folder}/store")) for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        while not receiver.poll(0.5):
            if any(process.exitcode for process in processes):
                raise SystemExit("a rank failed")
        result = receiver.recv()
        for process in processes:
            process.join()
    return result


def row(values: dict[str, Any]) -> str:
    """One line of the table."""
    shown = [f"{values[n]:>12.3f}" if values[n] else f"{'-':>12}" for n in COLUMNS]
    limit = f"{values['replay_limit']:>7}" if values["replay_limit"] else f"{'-':>7}"
    head = f"{values['ranks']:>5} {values['stages_per_rank']:>6} {values['forward_ms']:>6} ms"
    return f"{head} {limit} " + " ".join(shown)


def main() -> None:
    """All cases, the table and the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="one round of the shortest ops")
    quick = parser.parse_args().quick
    cost = {ranks: min(dispatch.measure(ranks) for _ in range(3)) for ranks in (1, 4, 8)}
    print("dispatch, in-process: " + ", ".join(f"P={r} {c:.1f} us" for r, c in cost.items()))
    print(
        f"{'ranks':>5} {'stages':>6} {'F':>9} {'limit':>7} "
        + " ".join(f"{c:>12}" for c in COLUMNS)
    )
    rows = []
    for ranks, chunks, forward_ms in CASES:
        if quick and forward_ms > 2:
            continue
        rounds = 1 if quick else ROUNDS

        def work(
            transport: GlooTransport,
            shape: tuple[int, int, int] = (ranks, chunks, forward_ms),
            rounds: int = rounds,
        ) -> dict[str, Any]:
            return case(*shape, rounds, transport)

        rows.append(world(ranks, work))
        print(row(rows[-1]), flush=True)
    if quick:
        return
    host = {
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
        "torch": str(torch.__version__),
    }
    content = {"dispatch_us": cost, "cases": rows, "host": host}
    RESULT.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
