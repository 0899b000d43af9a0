"""Period against memory per GPU, with optimizer states on the GPUs alone and on the host, too.

    PYTHONPATH=. python -m benchmarks.host_states [ROW ...]

writes benchmarks/results/host_states.json and docs/img/host-states.png; rows that the file holds
are not measured again unless they are named. Each row plans one network on four equal GPUs for
memories that are shares of the states' average. Plans may recompute. Those without the host
compete among those with it. Searches count work, one thread, so that a busy machine plans the
same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.markdown import table
from benchmarks.store import measure_rows
from pipeplan.chain import Chain
from pipeplan.cluster import Host
from pipeplan.planner import Config
from pipeplan.report.budget import Curves, draw_curves
from pipeplan.sweep import Point, sweep
from pipeplan.testing.instances import BANDWIDTH, UNLIMITED, chain_of, machines
from pipeplan.units import format_bytes

RESULT = Path(__file__).parent / "results" / "host_states.json"
PICTURE = Path(__file__).parents[1] / "docs" / "img" / "host-states.png"
ROWS = {
    "GPT-2, 24 blocks of width 1600": ("gpt24", "adam"),
    "Llama, 24 blocks of width 4096": ("llama24", "adam"),
    "GPT-2, 24 blocks of width 1600, momentum": ("gpt24", "momentum"),
}
"""Network and optimizer: two numbers per weight, or one."""
GPUS = 4
MICROBATCHES = 32
UPDATE = 4 * 10**9
"""Bytes of weights that the host updates in a second for each GPU."""
SHARES = (0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 1.0, 1.1, 1.25, 1.5)
"""Memories over the states' average."""
LIMIT_S = 6.0
"""Of counted work, for each plan."""
KINDS = {"gpu": "states on the GPUs", "host": "states also on the host"}
FIGURES = {
    "period_ns": "period per micro-batch, ms",
    "step_ns": "step over its micro-batches, ms",
}


def trained(name: str, optimizer: str) -> Chain:
    """The network, whose optimizer has momentum alone, or Adam's two numbers per weight.

    Adam's update moves 7 bytes where that of momentum moves 5.
    """
    chain = chain_of(name)
    if optimizer == "momentum":
        return chain
    layers = (
        layer.model_copy(
            update={
                "optimizer_bytes": 2 * layer.weight_bytes,
                "optimizer_ns": layer.optimizer_ns * 7 // 5,
            }
        )
        for layer in chain.layers
    )
    return chain.model_copy(update={"layers": tuple(layers)})


def states_average(chain: Chain) -> int:
    """Bytes per GPU of two versions of the weights, gradients and optimizer states."""
    sizes = (
        2 * layer.weight_bytes + layer.gradient_bytes + layer.optimizer_bytes
        for layer in chain.layers
    )
    return sum(sizes) // GPUS


def row(
    name: str,
    optimizer: str = "adam",
    *,
    shares: Sequence[float] = SHARES,
    limit_s: float = LIMIT_S,
) -> dict[str, Any]:
    """The plans of one network: per memory and kind its figures, None where none was found."""
    chain = trained(name, optimizer)
    average = states_average(chain)
    host = Host(memory_bytes=UNLIMITED, bandwidth_bytes_per_s=BANDWIDTH, update_bytes_per_s=UPDATE)
    memories = [int(share * average) for share in shares]
    clusters = [machines(GPUS, memory).model_copy(update={"host": host}) for memory in memories]
    config = Config(
        microbatches=MICROBATCHES,
        recompute="auto",
        time_limit_s=limit_s,
        workers=1,
        deterministic=True,
    )
    alone = sweep(chain, clusters, config)
    known = tuple(point.plan for point in alone if point.plan is not None)
    hosted = sweep(chain, clusters, replace(config, offload="states", resume=known))
    return {
        "network": name,
        "average_bytes": average,
        "shares": list(shares),
        "memories": memories,
        "gpu": [_figures(point) for point in alone],
        "host": [_figures(point) for point in hosted],
    }


def _figures(point: Point) -> dict[str, Any] | None:
    plan = point.plan
    if plan is None:
        return None
    return {
        "period_ns": round(float(plan.period_per_microbatch)),
        "step_ns": round(plan.step_ns / plan.microbatches),
        "hosted_bytes": sum(each.host_bytes for each in plan.memory),
        "gap": plan.solver.gap,
    }


def draw(found: dict[str, Any]) -> None:
    """A line per kind and figure; the states' average as an upright line."""
    groups = []
    for name, each in found.items():
        size = [memory / 2**30 for memory in each["memories"]]
        for figure, label in FIGURES.items():
            lines: dict[str, list[tuple[float, float | None]]] = {
                words: [
                    (x, None if at is None else at[figure] / 1e6)
                    for x, at in zip(size, each[kind], strict=True)
                ]
                for kind, words in KINDS.items()
            }
            times = [y for line in lines.values() for _, y in line if y is not None]
            mean = each["average_bytes"] / 2**30
            lines["average of all states"] = [(mean, min(times)), (mean, max(times))]
            groups.append(Curves(name, "memory per GPU, GiB", label, lines))
    draw_curves(groups, PICTURE, columns=len(FIGURES))


def page(found: dict[str, Any]) -> Iterator[str]:
    """Least memory with a plan, then periods and steps per memory."""
    yield "# Optimizer states on the host of a pipeline"
    yield (
        "The command `python -m benchmarks.host_states` measures all of this page: synthetic"
        f" chains (`pipeplan/testing/networks.py`) on {GPUS} GPUs with half-duplex links of 12"
        f" GB/s, 2bw, {MICROBATCHES} micro-batches a step, recomputation where it pays,"
        f" {LIMIT_S:g} s of counted work for each plan. The host has 12 GB/s each way for each"
        f" GPU, updates {UPDATE / 1e9:g} GB of weights a second for each of them, and memory"
        " enough. States are two versions of the weights, gradients, and Adam's two numbers per"
        " weight, or one of momentum. Only the last may be on the host: two fifths, or a quarter."
        " An update on the host runs beside the next step's micro-batches once its gradients are"
        " there ((U7) of [the model](../reference/model.md)): a step is longer than its periods by"
        " the gradients' way alone."
        " `average` is all of them over the GPUs. Plans without the host compete among those with"
        " it; `none`: no plan was found."
    )
    yield "![period and step against memory per GPU](../img/host-states.png)"
    for name, each in found.items():
        yield f"## {name}"
        yield " ".join(_summary(each))
        yield table(
            (
                "memory",
                "of the average",
                *(f"{words}: {what}" for words in KINDS.values() for what in ("period", "step")),
                "on the host",
            ),
            (
                _cells(*at)
                for at in zip(
                    each["memories"], each["shares"], each["gpu"], each["host"], strict=True
                )
            ),
        )
        yield "Periods per micro-batch and steps over their micro-batches, in ms."


def _summary(row: dict[str, Any]) -> Iterator[str]:
    """Least memories with a plan, and what the host costs and saves."""
    yield f"The states' average is {format_bytes(row['average_bytes'])} a GPU."
    for kind, words in KINDS.items():
        least = next((at for at, plan in enumerate(row[kind]) if plan is not None), None)
        if least is None:
            yield f"With {words} no memory has a plan."
        else:
            share, bytes_ = row["shares"][least], format_bytes(row["memories"][least])
            yield f"With {words} the least memory with a plan is {bytes_}, {share:.2f} of it."
    pairs = [pair for pair in zip(row["gpu"], row["host"], strict=True) if all(pair)]
    shorter = [one["step_ns"] / two["step_ns"] - 1 for one, two in pairs]
    if shorter:
        yield (
            f"Where both have one, the step is {max(shorter):.1%} longer without the host at most,"
            f" and {min(shorter):.1%} at least."
        )


def _cells(memory: int, share: float, *plans: dict[str, Any] | None) -> Iterator[str]:
    yield format_bytes(memory)
    yield f"{share:.2f}"
    for plan in plans:
        for figure in FIGURES:
            yield "none" if plan is None else f"{plan[figure] / 1e6:.1f}"
    yield "-" if plans[-1] is None else format_bytes(plans[-1]["hosted_bytes"])


if __name__ == "__main__":
    draw(measure_rows(__doc__, RESULT, {each: partial(row, *of) for each, of in ROWS.items()}))
