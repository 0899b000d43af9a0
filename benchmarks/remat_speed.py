"""How long the planners take: CPU seconds on seeded chains of the accepted sizes."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from pipeplan.remat.checkpointing.join_network import JoinProgram
from pipeplan.remat.checkpointing.periodic import keep_all
from pipeplan.remat.checkpointing.rotor import rotor
from pipeplan.remat.combined.pofo import pofo
from pipeplan.remat.methods import rematerialize_chain
from pipeplan.remat.min_memory import least_memory
from pipeplan.remat.offloading.compute_order import compute_order
from pipeplan.remat.schedules.costs import Costs
from pipeplan.remat.schedules.host_link import HostLink
from pipeplan.remat.schedules.replay import judge


def chain(layers: int, seed: int = 0) -> Costs:
    """A chain whose layers differ, sizes of MB and times of ms."""
    rng = random.Random(seed)

    def some(low: int, high: int) -> tuple[int, ...]:
        return tuple(rng.randint(low, high) for _ in range(layers))

    outputs = some(4_000_000, 40_000_000)
    forward = some(300_000, 3_000_000)
    return Costs(
        names=tuple(f"layer{index}" for index in range(layers)),
        forward=forward,
        light=forward,
        backward=some(600_000, 6_000_000),
        boundary=(6_000_000, *outputs),
        gradient=outputs,
        saved_input=(6_000_000, *outputs[:-1]),
        saved=some(4_000_000, 60_000_000),
        saved_output=(0,) * layers,
        forward_work=some(0, 1_000_000),
        light_work=some(4_000_000, 60_000_000),
        backward_work=some(0, 1_000_000),
    )


def seconds() -> list[tuple[str, float, float]]:
    """(what, CPU seconds, seconds allowed)."""
    channel = HostLink(12 * 10**9)

    def half(costs: Costs) -> int:
        low = judge(costs, least_memory(costs)).peak_bytes
        return (low + judge(costs, keep_all(costs)).peak_bytes) // 2

    small, long, wide, middle = chain(50), chain(200), chain(150), chain(100)
    line = compute_order(wide, keep_all(wide))
    room = (line.least + line.peak) // 2
    tight, few, many = half(middle) * 2 // 3, half(small), half(long)
    runs: list[tuple[str, Callable[[], object], float]] = [
        ("Rotor, 50 layers, 500 slots", lambda: rotor(small, few), 1),
        ("Rotor, 200 layers, 500 slots", lambda: rotor(long, many), 5),
        (
            "DYNPROG, 150 layers, 500 slots",
            lambda: rematerialize_chain(wide, room, "dynprog", channel=channel),
            10,
        ),
        ("POFO, 100 layers, 50 slots", lambda: pofo(middle, tight, channel), 30),
        ("join (15, 75), 40 slots", lambda: JoinProgram((15, 75), 40).steps(), 10),
    ]
    found = []
    for name, run, allowed in runs:
        begin = time.process_time()
        run()
        found.append((name, time.process_time() - begin, float(allowed)))
    return found
