"""A replay as a Chrome trace, which Perfetto and chrome://tracing open.

One process per GPU with a thread for its computes, and one for each direction of its way to the
host where that is used; one more process with a thread per link. Names are `PP:2F0`, as torch's
own pipelining names its ranges, so that traces of a run line up.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from pipeplan.plan import OpKind, Plan
from pipeplan.simulator import Simulation

Event = dict[str, object]
_THREADS = {OpKind.OFFLOAD: (1, "to the host"), OpKind.PREFETCH: (2, "from the host")}
"""Number and name of the threads beside a GPU's computes."""


def chrome_trace(plan: Plan, simulation: Simulation) -> str:
    """The trace file's text. Times are in microseconds, as the format wants."""
    events = [*_names(plan, simulation), *_spans(plan, simulation)]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ns"}) + "\n"


def _links(simulation: Simulation) -> list[tuple[int, int]]:
    return sorted({span.place for span in simulation.spans() if isinstance(span.place, tuple)})


def _names(plan: Plan, simulation: Simulation) -> Iterator[Event]:
    """What the viewer calls each process and thread."""
    gpus = len(plan.cluster.gpus)
    ways = sorted({(op.gpu, *_THREADS[op.kind]) for op in plan.ops if op.kind.is_host})
    for index, gpu in enumerate(plan.cluster.gpus):
        yield _meta("process_name", index, 0, gpu.name)
        yield _meta("thread_name", index, 0, "compute")
        for _, thread, name in (way for way in ways if way[0] == index):
            yield _meta("thread_name", index, thread, name)
    yield _meta("process_name", gpus, 0, "links")
    for index, (source, target) in enumerate(_links(simulation)):
        yield _meta("thread_name", gpus, index, f"{source}>{target}")


def _meta(kind: str, process: int, thread: int, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}


def _spans(plan: Plan, simulation: Simulation) -> Iterator[Event]:
    gpus, links = len(plan.cluster.gpus), _links(simulation)
    for span in simulation.spans():
        if isinstance(span.place, tuple):
            process, thread = gpus, links.index(span.place)
        else:
            process, (thread, _) = span.place, _THREADS.get(span.kind, (0, "compute"))
        yield {
            "ph": "X",
            "name": f"PP:{span.stage}{span.kind}{span.microbatch}",
            "cat": "compute" if span.kind.is_compute else "transfer",
            "pid": process,
            "tid": thread,
            "ts": span.start_ns / 1000,
            "dur": (span.end_ns - span.start_ns) / 1000,
            "args": {"stage": span.stage, "microbatch": span.microbatch},
        }
