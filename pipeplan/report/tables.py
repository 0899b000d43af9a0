"""Tables of a plan and of a run, as rich renderables; the caller prints them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from rich.table import Table
from rich.text import Text

from pipeplan.chain import Chain
from pipeplan.cluster import Cluster, Host
from pipeplan.plan import MemoryRow, Plan, Rational
from pipeplan.report import remat
from pipeplan.report.remat import Share
from pipeplan.units import counted, format_bytes, format_ns, format_rate

STALENESS = (
    "gradients are one step stale; `--semantics flush` trains exactly as one process would.\n"
    "Adam-family optimizers suffer most from stale gradients: compare the loss of a flush run."
)

_LEGEND = (
    "states: weights (as many versions as are kept), gradients, optimizer;"
    " saved: kept from forward to backward;\n"
    "working: more while an operation runs; direct: between stages of the GPU;"
    " messages: being sent or received"
)


def memory_table(plan: Plan) -> Table:
    """Bytes of every GPU at its worst instant, term by term, beside its budget (M6).

    What it has in the host's memory at most (H7) stands behind, where anything is there.
    """
    away = any(row.host_bytes for row in plan.memory)
    # One more column stays on 120 with less air between them.
    table = Table(
        title="memory per GPU at its worst instant",
        title_justify="left",
        caption=_LEGEND,
        caption_justify="left",
        collapse_padding=away,
    )
    table.add_column("GPU")
    table.add_column("layers")
    for name in ("states", "saved", "working", "direct", "messages", "peak", "budget", "slack"):
        table.add_column(name, justify="right")
    if away:
        table.add_column("on host", justify="right")
    for row in plan.memory:
        slack = row.budget_bytes - row.peak_bytes
        table.add_row(
            plan.cluster.labels[row.gpu],
            remat.spans([stage.layers for stage in plan.hosted(row.gpu)]) or "none",
            *(format_bytes(value) for value in _terms(row)),
            Text(format_bytes(slack), style="red" if slack < 0 else ""),
            *([format_bytes(row.host_bytes)] if away else []),
        )
    return table


def _terms(row: MemoryRow) -> tuple[int, ...]:
    return (
        row.states_bytes,
        row.saved_bytes,
        row.working_bytes,
        row.direct_bytes,
        row.message_bytes,
        row.peak_bytes,
        row.budget_bytes,
    )


def headline(plan: Plan) -> Table:
    """The plan in numbers: period, bound, gap, step time, throughput, contiguous period."""
    table = Table.grid(padding=(0, 2))
    per = plan.period_per_microbatch
    table.add_row(
        "semantics", f"{plan.semantics}, {counted(plan.microbatches, 'micro-batch')} per step"
    )
    table.add_row("period", f"{format_ns(plan.period_ns)}  (k = {plan.k})")
    table.add_row("per micro-batch", format_ns(per))
    table.add_row("bound", _bound(plan))
    table.add_row("step", f"{format_ns(plan.step_ns)}  (optimizer included)")
    table.add_row("throughput", f"{samples_per_second(plan):,.4g} samples/s")
    contiguous = plan.solver.contiguous_period_ns
    if contiguous is not None:
        best = fraction(contiguous)
        table.add_row(
            "contiguous", f"{format_ns(best)} per micro-batch ({_percent(best / per - 1)})"
        )
    if plan.chain.mode == "estimated":
        table.add_row("times", f"estimates, nothing was measured: {plan.chain.source}")
    for what, text in (*_kept_together(plan), *_split(plan), *remat.lines(plan)):
        table.add_row(what, text)
    for note in plan.solver.notes:
        table.add_row("note", note)
    return table


def _kept_together(plan: Plan) -> Iterator[tuple[str, str]]:
    """What the plan may not choose: pins, and layers apart that share a weight."""
    names = plan.cluster.labels
    for gpu, name in enumerate(names):
        pinned = [layer for layer, home in sorted(plan.solver.pins) if home == gpu]
        if pinned:
            yield "pinned", f"{remat.named(_runs(pinned))} to {name}"
    if plan.chain.tied != "synchronize" and len(names) > 1:
        for parameter, layers in _shared(plan.chain).items():
            if layers[-1] - layers[0] >= len(layers):
                yield (
                    "tied",
                    f"layers {', '.join(map(str, layers))} share {parameter}, so they stay on one"
                    ' GPU: Task(tied="synchronize") lets them apart',
                )


def _split(plan: Plan) -> Iterator[tuple[str, str]]:
    """Which layers compute the gradients of their weights apart."""
    if plan.splits:
        layers = remat.named([stage.layers for stage in plan.stages if stage.split_backward])
        yield "split", f"backward of {layers}: gradients of weights apart, later"


def _runs(layers: Sequence[int]) -> list[tuple[int, int]]:
    """Rising numbers as runs [first, last]."""
    begins = [layer for layer in layers if layer - 1 not in layers]
    ends = [layer for layer in layers if layer + 1 not in layers]
    return list(zip(begins, ends, strict=True))


def _shared(chain: Chain) -> dict[str, list[int]]:
    """For each set of layers that share parameters, the first of these."""
    users: dict[str, list[int]] = {}
    for index, layer in enumerate(chain.layers):
        for parameter in dict.fromkeys(layer.parameters):
            users.setdefault(parameter, []).append(index)
    first = {tuple(layers): name for name, layers in reversed(users.items()) if len(layers) > 1}
    return {name: list(layers) for layers, name in reversed(first.items())}


def machines_line(cluster: Cluster) -> str:
    """What a cluster says about its machines, in one line."""
    links, gpus = cluster.links, len(cluster.gpus)
    rate = links.bandwidth_bytes_per_s
    shown = "infinite bandwidth" if rate is None else format_rate(rate)
    return (
        f"{counted(gpus, 'GPU')} of {_memories(cluster)}, latency"
        f" {format_ns(links.latency_ns)}, {shown},"
        + (f" {len(links.pairs)} of the links differ," if links.pairs else "")
        + f" {format_ns(cluster.action_overhead_ns)} overhead per action"
        + (f", host {_host(cluster.host)}" if cluster.host else "")
    )


def _memories(cluster: Cluster) -> str:
    """Memories, reserves and speeds, those of several GPUs once."""
    kinds = dict.fromkeys(
        format_bytes(gpu.memory_bytes)
        + (f" less {format_bytes(gpu.reserve_bytes)}" if gpu.reserve_bytes else "")
        + (f" at speed {gpu.speed:g}" if gpu.speed != 1 else "")
        for gpu in cluster.gpus
    )
    some = list(kinds)[:4]
    return " or ".join(some) + (" or more" if len(kinds) > len(some) else "")


def _host(host: Host) -> str:
    rate = format_rate(host.bandwidth_bytes_per_s)
    updates = host.update_bytes_per_s
    return f"of {format_bytes(host.memory_bytes)} at {rate} per GPU, {host.duplex} duplex" + (
        f", updates at {format_rate(updates)}" if updates else ""
    )


def fraction(value: Rational) -> Fraction:
    """A rational of a plan file as a number."""
    return Fraction(*value)


def plan_bound(plan: Plan) -> Fraction | None:
    """The bound on the period per micro-batch that the plan's gap is measured against, in ns."""
    value: Rational | None = getattr(plan.solver.bounds, plan.solver.gap_bound)
    return None if value is None else fraction(value)


def samples_per_second(plan: Plan) -> float:
    """Samples per second of the step time, fill, drain and optimizer included where they count."""
    samples = plan.microbatches * plan.chain.microbatch_size
    return samples * 1e9 / max(plan.step_ns, 1)


def _bound(plan: Plan) -> str:
    value, gap = plan_bound(plan), plan.solver.gap
    if value is None or gap is None:
        return "none proven"
    proven = {
        "any": "no plan",
        "k1": "no plan with k = 1",
        "contiguous": "no contiguous plan",
    }[plan.solver.gap_bound]
    proven += f"{' with these pins' if plan.solver.pins else ''}{_steps(plan)} has a shorter one"
    return f"{format_ns(value)} per micro-batch: {proven}; gap {gap:.2%} ({plan.solver.status})"


def _steps(plan: Plan) -> str:
    """Of which steps the bound is, where a number of micro-batches was asked for."""
    most = plan.solver.most_microbatches
    if most is None:
        return ""
    return f" with at most {most} micro-batch{'es' if most > 1 else ''} per step"


def _percent(value: Fraction) -> str:
    return f"{float(value):+.1%}"


@dataclass(frozen=True, slots=True)
class PredictedMeasured:
    """One quantity, predicted and measured, in its own unit (`ns` or `bytes`)."""

    name: str
    unit: str
    predicted: float
    measured: float
    stages: tuple[Share, ...] = ()
    """Of a rank's peak: the stages it is of, where the run's files tell."""

    @property
    def error(self) -> float | None:
        """(measured - predicted) / predicted; None where something came from nothing."""
        if self.predicted == 0:
            return 0.0 if self.measured == 0 else None
        return (self.measured - self.predicted) / self.predicted


def comparison_table(
    rows: Sequence[PredictedMeasured],
    title: str,
    names: Sequence[str] = ("predicted", "measured", "error"),
) -> Table:
    """One row per quantity: predicted | measured | error, or what `names` calls them."""
    table = Table(title=title, title_justify="left")
    table.add_column("quantity")
    for name in names:
        table.add_column(name, justify="right")
    for row in rows:
        show = format_ns if row.unit == "ns" else lambda value: format_bytes(round(value))
        error = "-" if row.error is None else f"{row.error:+.2%}"
        table.add_row(row.name, show(row.predicted), show(row.measured), error)
    return table


def stage_table(
    stages: Sequence[Share],
    predicted: Sequence[int],
    measured: Sequence[int | None],
    away: Sequence[int],
    title: str,
) -> Table:
    """What each stage does not keep, beside the bytes of its rank.

    Args:
        stages: all of a plan.
        predicted: peak of each rank.
        measured: the same, None where it was not.
        away: predicted bytes of each rank in the host's memory; shown where there are any.
        title: names the run.
    """
    table = Table(title=title, title_justify="left", collapse_padding=True)
    for name in ("stage", "rank", "layers", "recomputed", "offloaded"):
        table.add_column(name)
    for name in ("peak predicted", "measured", *(["on host"] if any(away) else [])):
        table.add_column(name, justify="right")
    for index, share in enumerate(stages):
        peak = measured[share.gpu]
        table.add_row(
            str(index),
            str(share.gpu),
            remat.spans([share.layers]),
            share.recomputed or "-",
            share.on_host or "-",
            format_bytes(predicted[share.gpu]),
            "-" if peak is None else format_bytes(peak),
            *([format_bytes(away[share.gpu])] if any(away) else []),
        )
    return table
