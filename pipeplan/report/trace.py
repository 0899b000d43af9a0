"""A replay or a run as a Chrome trace, which Perfetto and chrome://tracing open.

One process per GPU with a thread for its computes, and one for each direction of its way to the
host where that is used; one more process with a thread per link. Names are `PP:2F0`, as torch's
own pipelining names its ranges. Plan, replay and run have the same tracks and names, so that their
traces line up. An arrow leads from each compute that makes an input to the compute on another GPU
that takes it, through the transfer where that is known. A counter per GPU has its bytes.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping

from pipeplan.plan import OpKind, Plan
from pipeplan.report.page.schedule import Activity

Event = dict[str, object]
_THREADS = {OpKind.OFFLOAD: (1, "to the host"), OpKind.PREFETCH: (2, "from the host")}
"""Number and name of the threads beside a GPU's computes."""
Levels = Mapping[int, Iterable[tuple[int, int]]]
"""By GPU: (ns, bytes that it holds from then on)."""


def chrome_trace(plan: Plan, activities: Iterable[Activity], levels: Levels) -> str:
    """The trace file's text. Times are in microseconds, as the format wants.

    Args:
        plan: whose activities they are.
        activities: what happened, in any order.
        levels: bytes over time of the GPUs that are known of; none is needed.
    """
    done = list(activities)
    links = sorted({each.place for each in done if isinstance(each.place, tuple)})
    spans = [_span(plan, links, each) for each in done]
    arrows = _arrows(plan, done, spans)
    events = [*_names(plan, links), *spans, *arrows, *_counters(levels)]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ns"}) + "\n"


def _names(plan: Plan, links: list[tuple[int, int]]) -> Iterator[Event]:
    """What the viewer calls each process and thread."""
    gpus = len(plan.cluster.gpus)
    ways = sorted({(op.gpu, *_THREADS[op.kind]) for op in plan.ops if op.kind.is_host})
    for index, label in enumerate(plan.cluster.labels):
        yield _meta("process_name", index, 0, label)
        yield _meta("thread_name", index, 0, "compute")
        for _, thread, name in (way for way in ways if way[0] == index):
            yield _meta("thread_name", index, thread, name)
    yield _meta("process_name", gpus, 0, "links")
    for index, (source, target) in enumerate(links):
        yield _meta("thread_name", gpus, index, f"{source}>{target}")


def _meta(kind: str, process: int, thread: int, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}


def _span(plan: Plan, links: list[tuple[int, int]], each: Activity) -> Event:
    computes = each.kind == "OPT" or each.kind.is_compute
    if isinstance(each.place, tuple):
        process, thread = len(plan.cluster.gpus), links.index(each.place)
    elif computes:
        process, thread = each.place, 0
    else:
        process, thread = each.place, 1 if each.kind is OpKind.OFFLOAD else 2
    waited = {"waited_us": each.waited_ns / 1000} if each.waited_ns else {}
    return {
        "ph": "X",
        "name": f"PP:{each.stage}{each.kind}{'' if each.kind == 'OPT' else each.microbatch}",
        "cat": "compute" if computes else "transfer",
        "pid": process,
        "tid": thread,
        "ts": each.start_ns / 1000,
        "dur": each.length_ns / 1000,
        "args": {"stage": each.stage, "microbatch": each.microbatch, **waited},
    }


def _arrows(plan: Plan, done: list[Activity], spans: list[Event]) -> Iterator[Event]:
    """From producer through transfer to consumer, where these are on two GPUs."""
    known = {
        (each.kind, each.stage, each.microbatch): span
        for each, span in zip(done, spans, strict=True)
    }
    identity = itertools.count(1)
    last = len(plan.stages) - 1
    for kind, stage, number in list(known):
        source = plan.stages[stage]
        if kind is OpKind.F and stage < last:
            carrier, taker, other = OpKind.SEND_F, OpKind.F, stage + 1
        elif kind is source.backward and stage:
            carrier, other = OpKind.SEND_B, stage - 1
            taker = plan.stages[other].backward
        else:
            continue
        taken = known.get((taker, other, number))
        if taken is None or plan.stages[other].gpu == source.gpu:
            continue
        carried = known.get((carrier, stage, number))
        parts = [known[kind, stage, number], carried, taken]
        mark = {"name": f"{stage}{carrier}{number}", "id": next(identity)}
        yield from _arrow(mark, [part for part in parts if part])


def _arrow(mark: Event, spans: list[Event]) -> Iterator[Event]:
    """One arrow through `spans`; it is bound to the span that is there when it passes.

    Perfetto drops arrows whose identity is no number.
    """
    for index, span in enumerate(spans):
        phase = "s" if not index else "f" if index == len(spans) - 1 else "t"
        more = {"bp": "e"} if phase == "f" else {}
        place = {key: span[key] for key in ("pid", "tid", "ts")}
        yield {"ph": phase, "cat": "transfer", **mark, **place, **more}


def _counters(levels: Levels) -> Iterator[Event]:
    for gpu, points in levels.items():
        for time, size in points:
            yield {
                "ph": "C",
                "name": "memory",
                "pid": gpu,
                "tid": 0,
                "ts": time / 1000,
                "args": {"bytes": size},
            }
