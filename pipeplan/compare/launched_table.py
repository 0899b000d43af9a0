"""Launched plans for people and for machines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table

from pipeplan.compare.launched import LaunchedPlan, LaunchedPoint
from pipeplan.report.bars import PlanBars
from pipeplan.units import format_bytes, format_ns


def launched_table(launched: LaunchedPoint) -> Table:
    """Of every plan the predicted and the measured time, place and, where modules ran, peaks."""
    shown = Table(box=None, padding=(0, 1, 0, 0))
    shown.add_column("schedule")
    told = any(each.rests for each in launched.plans)
    beside = ["beside its\nops' times"] if told else []
    for name in ("predicted", "measured", "difference", *beside, "rounds differ"):
        shown.add_column(name, justify="right", no_wrap=True)
    for name in ("predicted", "measured"):
        shown.add_column(f"place,\n{name}", justify="right", no_wrap=True)
    counted = any(each.peak_bytes is not None for each in launched.plans)
    if counted:
        shown.add_column("peaks, predicted | measured", justify="right", overflow="fold")
    predicted, measured = _places(launched)
    for index, each in enumerate(launched.plans):
        shown.add_row(
            "\n= ".join(each.names),
            format_ns(each.predicted_ns),
            *_measured_cells(each, told),
            str(predicted.get(index, "-")),
            str(measured.get(index, "-")),
            *((_peaks(each),) if counted else ()),
        )
    return shown


def title(launched: LaunchedPoint) -> str:
    """What ran where."""
    gpus = len(launched.point.cluster.gpus)
    how = (
        "trained"
        if launched.request.clock == "real"
        else f"asleep for planned times x {float(launched.time_scale):.4g}, and"
        f" {format_ns(round(launched.action_ns))} beside each op"
    )
    memory = format_bytes(launched.point.memory_bytes)
    return f"launched: {gpus} GPUs of {memory}, {how}, {_rounds(launched)}"


def remarks(launched: LaunchedPoint) -> Iterator[str]:
    """Which plans failed, and how far the others are in the predicted order."""
    for each in launched.plans:
        if each.failure is not None:
            yield f"{each.names[0]}: {each.failure}"
    order = launched.order()
    pairs, near = order.agree + order.parted, order.close
    told = f"{order.agree} of {pairs} pairs of plans are measured in the predicted order"
    yield told + (f"; {near} more are predicted nearer than rounds differ" if near else "")


def data(launched: Sequence[LaunchedPoint]) -> list[dict[str, object]]:
    """Everything as JSON: times in ns per micro-batch, not stretched; sizes in bytes."""
    return [_point(each) for each in launched]


def bars(launched: LaunchedPoint) -> list[PlanBars]:
    """What the picture of one point shows."""
    return [
        PlanBars("\n= ".join(each.names), each.predicted_ns, tuple(each.measured))
        for each in launched.done
    ]


def _rounds(launched: LaunchedPoint) -> str:
    count = launched.request.rounds
    return "1 round" if count == 1 else f"median of {count} rounds in turns"


def _measured_cells(each: LaunchedPlan, rests: bool) -> list[str]:
    """Measured and its difference, with `rests` that beside the ops' times, too, and spread."""
    measured, rest = each.measured_ns, each.rest
    if measured is None:
        return ["failed" if each.failure else "-", "-", *(["-"] if rests else []), "-"]
    beside = ["-" if rest is None else f"{rest:+.1%}"] if rests else []
    difference = f"{measured / each.predicted_ns - 1:+.1%}"
    return [format_ns(measured), difference, *beside, f"{each.spread:.1%}"]


def _places(launched: LaunchedPoint) -> tuple[dict[int, int], dict[int, int]]:
    """The places of measured plans by their index: as predicted and as measured, 1 is fastest."""
    known = [
        (index, each.predicted_ns, each.measured_ns)
        for index, each in enumerate(launched.plans)
        if each.measured_ns is not None
    ]
    by_predicted = sorted(known, key=lambda each: each[1])
    by_measured = sorted(known, key=lambda each: each[2])
    return (
        {index: place for place, (index, *_) in enumerate(by_predicted, 1)},
        {index: place for place, (index, *_) in enumerate(by_measured, 1)},
    )


def _peaks(each: LaunchedPlan) -> str:
    if each.peak_bytes is None:
        return "-"
    told = [row.peak_bytes for row in each.plan.memory]
    if list(each.peak_bytes) == told:
        return " ".join(map(format_bytes, told)) + ", equal"
    pairs = zip(told, each.peak_bytes, strict=True)
    return ", ".join(
        f"{format_bytes(one)} | {'-' if other is None else format_bytes(other)}"
        for one, other in pairs
    )


def _point(launched: LaunchedPoint) -> dict[str, object]:
    order = launched.order()
    return {
        "gpus": len(launched.point.cluster.gpus),
        "memory_bytes": [gpu.memory_bytes for gpu in launched.point.cluster.gpus],
        "clock": launched.request.clock,
        "time_scale": float(launched.time_scale),
        "rounds": launched.request.rounds,
        "action_overhead_ns": launched.action_ns,
        "pairs_in_order": order.agree,
        "pairs_out_of_order": order.parted,
        "pairs_too_close": order.close,
        "plans": [_plan(each) for each in launched.plans],
    }


def _plan(each: LaunchedPlan) -> dict[str, object]:
    measured = each.measured_ns
    return {
        "names": list(each.names),
        "predicted_ns": each.predicted_ns,
        "measured_ns": measured,
        "difference": None if measured is None else measured / each.predicted_ns - 1,
        "rounds_ns": each.measured,
        "beside_ops": each.rests,
        "predicted_peak_bytes": [row.peak_bytes for row in each.plan.memory],
        "measured_peak_bytes": None if each.peak_bytes is None else list(each.peak_bytes),
        "failure": each.failure,
    }
