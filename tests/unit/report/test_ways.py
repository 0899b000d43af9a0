"""A replay's trace and a plan's picture show what moves between GPUs and the host."""

from __future__ import annotations

import json

from pipeplan.lowering import lower
from pipeplan.report import gantt
from pipeplan.report.page.schedule import replayed
from pipeplan.report.trace import chrome_trace
from pipeplan.simulator import simulate
from tests import handmade_offload
from tests.samples import two_stages


def test_each_direction_of_a_way_to_the_host_is_a_thread_of_its_gpu() -> None:
    """Threads 1 and 2 beside the computes; transfers of 2 ns, one of each per micro-batch."""
    plan = handmade_offload.two_gpus()
    simulation = simulate(plan, lower(plan), microbatches=5)
    events = json.loads(chrome_trace(plan, replayed(simulation.spans()), {}))["traceEvents"]
    threads = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["name"] == "thread_name"
    }
    ways = {(gpu, thread) for gpu in (0, 1) for thread in (1, 2)}
    assert {key: threads[key] for key in ways} == {
        (gpu, thread): name
        for gpu in (0, 1)
        for thread, name in ((1, "to the host"), (2, "from the host"))
    }
    moved = [event for event in events if (event["pid"], event["tid"]) in ways]
    assert {event["cat"] for event in moved if event["ph"] == "X"} == {"transfer"}
    names = sorted(event["name"] for event in moved if event["ph"] == "X")
    kinds = ("OFFLOAD", "PREFETCH")
    assert names == sorted(f"PP:{s}{kind}{m}" for s in (0, 1) for kind in kinds for m in range(5))
    computes = [event for event in events if event.get("cat") == "compute"]
    assert {event["tid"] for event in computes} == {0}
    assert len(computes) == 2 * 2 * 5


def test_picture_shows_ways_to_the_host() -> None:
    """They are lanes of their own below the links, and the title says what O and P are."""
    axes = gantt.gantt_figure(handmade_offload.two_gpus()).axes[0]
    lanes = [tick.get_text() for tick in axes.get_yticklabels()]
    assert lanes == ["gpu0", "gpu1", "0>1", "1>0", "0>host", "host>0", "1>host", "host>1"]
    assert {"0O2", "0P1", "1O2", "1P1"} <= {text.get_text() for text in axes.texts}
    assert "O to the host, P back" in axes.get_title(loc="left")
    assert "host" not in gantt.gantt_figure(two_stages()).axes[0].get_title(loc="left")
