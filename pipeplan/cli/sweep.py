"""`pipeplan plan` for several numbers of GPUs and memories: one table, a plan per point."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from pipeplan.cli import common, output
from pipeplan.errors import InfeasibleError, TimeLimitError
from pipeplan.units import exact_bytes, format_bytes, format_ns

if TYPE_CHECKING:
    from rich.table import Table

    from pipeplan.chain import Chain
    from pipeplan.cluster import Cluster
    from pipeplan.plan import Plan
    from pipeplan.planner import Config
    from pipeplan.sweep import Point


def run(
    chain: Chain, clusters: list[Cluster], config: Config, folder: Path, *, as_json: bool
) -> int:
    """Plan for every cluster, save, show; without a single plan 3 if that is proven, else 5."""
    from pipeplan.cli import progress
    from pipeplan.sweep import sweep

    with progress.search() as listener:
        points = sweep(chain, clusters, config, listener)
    data: dict[str, object] = {"chain": chain.name, "points": [_data(point) for point in points]}
    _save(folder, chain.name, points, data)
    if as_json:
        common.emit(data)
    else:
        common.screen().print(sweep_table(points))
        for point in points:
            if point.plan is None:
                print(f"{point.gpus} GPUs, {format_bytes(point.memory_bytes)}: {point.reason}")
        print("every plan is verified and replayed")
    if len(points) < len(clusters):
        common.say(f"interrupted: {len(clusters) - len(points)} more were asked for")
    planned = [point for point in points if point.plan is not None]
    if planned:
        common.then("pipeplan show {}", folder / _name(planned[-1]))
    if planned:
        return 0
    proven = all(point.infeasible for point in points)
    return InfeasibleError.exit_code if proven else TimeLimitError.exit_code


def sweep_table(points: tuple[Point, ...]) -> Table:
    """One line per point; what a missing plan lacks is said below it."""
    from rich.table import Table

    made = Table(title="what if", title_justify="left")
    columns = ("GPUs", "memory", "per micro-batch", "k", "stages", "bound", "gap", "status")
    uses_host = any(_hosted(point.plan) for point in points)
    ends = ("largest peak", "on host") if uses_host else ("largest peak",)
    for name in (*columns, "step", "contiguous", *ends):
        made.add_column(name, justify="right")
    for point in points:
        cells = tuple(_cells(point.plan, uses_host))
        made.add_row(str(point.gpus), format_bytes(point.memory_bytes), *cells)
    return made


def _hosted(plan: Plan | None) -> int:
    """Bytes in the host's memory at most, of all GPUs."""
    return 0 if plan is None else sum(row.host_bytes for row in plan.memory)


def _cells(plan: Plan | None, uses_host: bool) -> Iterator[str]:
    from pipeplan.report import tables

    if plan is None:
        yield from ("none", *["-"] * (9 if uses_host else 8))
        return
    bound, gap = tables.plan_bound(plan), plan.solver.gap
    contiguous = plan.solver.contiguous_period_ns
    yield format_ns(plan.period_per_microbatch)
    yield str(plan.k)
    yield str(len(plan.stages))
    yield "-" if bound is None else format_ns(bound)
    yield "-" if gap is None else f"{gap:.2%}"
    yield plan.solver.status
    yield format_ns(plan.step_ns)
    yield "-" if contiguous is None else format_ns(tables.fraction(contiguous))
    yield format_bytes(max(row.peak_bytes for row in plan.memory))
    if uses_host:
        yield format_bytes(_hosted(plan))


def _name(point: Point) -> str:
    return f"plan-{point.gpus}gpus-{exact_bytes(point.memory_bytes)}.json"


def _data(point: Point) -> dict[str, object]:
    from pipeplan.cli.show import figures

    where = {"gpus": point.gpus, "memory_bytes": point.memory_bytes}
    if point.plan is None:
        return {**where, "plan": None, "reason": point.reason}
    return {**where, "plan": _name(point), **figures(point.plan)}


def _save(folder: Path, name: str, points: tuple[Point, ...], data: dict[str, object]) -> None:
    """The plans, sweep.json, and a picture of memory and period per number of GPUs."""
    for point in points:
        if point.plan is not None:
            output.write(str(folder / _name(point)), point.plan.to_json(), force=True)
    output.write(str(folder / "sweep.json"), json.dumps(data, indent=1) + "\n", force=True)
    if find_spec("matplotlib") is not None:
        for gpus in sorted({point.gpus for point in points}):
            _draw(folder, name, [point for point in points if point.gpus == gpus])
    common.say(f"saved: {folder}/sweep.json, plans and pictures")


def _draw(folder: Path, name: str, points: list[Point]) -> None:
    from pipeplan.report import cloud, tables

    ours, hosted, contiguous, bounds = [], [], [], []
    for point in points:
        if point.plan is None:
            continue
        memory, solver = point.memory_bytes, point.plan.solver
        ours.append((memory, float(point.plan.period_per_microbatch)))
        if _hosted(point.plan):
            hosted.append(ours[-1])
        if solver.contiguous_period_ns is not None:
            contiguous.append((memory, float(tables.fraction(solver.contiguous_period_ns))))
        bound = tables.plan_bound(point.plan)
        if bound is not None:
            bounds.append((memory, float(bound)))
    gpus = points[0].gpus
    picture = cloud.Picture(f"{name}, {gpus} GPUs", (), ours, contiguous, bounds, hosted=hosted)
    for ending in ("png", "svg"):
        cloud.draw_cloud(picture, folder / f"sweep-{gpus}gpus.{ending}")
