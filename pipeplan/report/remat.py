"""What stages do not keep on their GPUs from forward to backward: in words, and for run.json."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from math import ceil

from pydantic import ConfigDict

from pipeplan.document import Count, Positive, Record
from pipeplan.plan import LayerRanges, OpKind, Plan, Stage, outermost
from pipeplan.units import format_bytes, format_ns
from pipeplan.verifier import offloaded, stage_on_host


class Share(Record):
    """A stage, its GPU, and what of it is recomputed or offloaded to the host."""

    model_config = ConfigDict(extra="ignore")
    gpu: Count
    layers: tuple[Count, Count]
    recompute: LayerRanges = ()
    again_ns: Count = 0
    """What a micro-batch takes longer for `recompute` (V1)."""
    programs: LayerRanges = ()
    """[layer, option] of layers under device programs (V5)."""
    programs_ns: Count = 0
    """What a micro-batch takes longer for `programs`."""
    offload: LayerRanges = ()
    offload_input: bool = False
    """Whether what is saved of the stage's input is offloaded as well."""
    offload_bytes: Count = 0
    """Of a micro-batch (H1)."""
    offloaded: tuple[Count, Positive] = (0, 1)
    """[micro-batches that are offloaded, of so many in a row]."""
    states_bytes: Count = 0
    """On the host, (U3); 0 where the optimizer's states are on the GPU."""

    @property
    def again(self) -> str:
        """The recomputed layers and how long that takes; empty if there are none."""
        if not self.recompute:
            return ""
        outer = outermost(self.recompute)
        inner = [run for run in self.recompute if run not in outer]
        more = f" (in it again {spans(inner)})" if inner else ""
        return f"{spans(outer)}{more}: {format_ns(self.again_ns)}"

    @property
    def under(self) -> str:
        """The layers under device programs and how long these add; empty if there are none."""
        if not self.programs:
            return ""
        layers = spans(_joined([layer for layer, _ in self.programs]))
        return f"{layers}: {format_ns(self.programs_ns)}"

    @property
    def recomputed(self) -> str:
        """Both; empty if there is nothing."""
        under = f"programs of {self.under}" if self.programs else ""
        return "; ".join(filter(None, (self.again, under)))

    @property
    def updated(self) -> str:
        """The layers that the host updates and what it has of them; empty if there are none."""
        if not self.states_bytes:
            return ""
        return f"{spans([self.layers])}: {format_bytes(self.states_bytes)}"

    @property
    def on_host(self) -> str:
        """What of the stage is there; empty if there is nothing."""
        states = f"states: {format_bytes(self.states_bytes)}" if self.states_bytes else ""
        return "; ".join(filter(None, (self.away, states)))

    @property
    def away(self) -> str:
        """The layers that are offloaded and what they keep; empty if there are none."""
        return _away([self], spans) if self.offload or self.offload_input else ""


def remat_shares(plan: Plan) -> tuple[Share, ...]:
    """Every stage of `plan`, which may be broken."""
    return tuple(_share(plan, index, stage) for index, stage in enumerate(plan.stages))


def _share(plan: Plan, index: int, stage: Stage) -> Share:
    on_host = stage_on_host(plan, stage)
    if stage.remat is None:
        return Share(gpu=stage.gpu, layers=stage.layers, states_bytes=on_host)
    some = {op.copy_ for op in plan.ops if op.kind is OpKind.OFFLOAD and op.stage == index}
    return Share(
        gpu=stage.gpu,
        layers=stage.layers,
        recompute=stage.remat.recompute,
        again_ns=_again_ns(plan, stage),
        programs=stage.remat.programs,
        programs_ns=_programs_ns(plan, stage),
        offload=stage.remat.offload,
        offload_input=stage.remat.offload_input,
        offload_bytes=offloaded(plan, stage),
        offloaded=(len(some), plan.k),
        states_bytes=on_host,
    )


def _again_ns(plan: Plan, stage: Stage) -> int:
    runs = stage.remat.recompute if stage.remat else ()
    layers = [layer for first, last in runs for layer in plan.chain.layers[first : last + 1]]
    speed = Fraction(repr(plan.cluster.gpus[stage.gpu].speed))
    return sum(ceil(layer.forward_ns / speed) for layer in layers)


def _programs_ns(plan: Plan, stage: Stage) -> int:
    speed = Fraction(repr(plan.cluster.gpus[stage.gpu].speed))
    longer = 0
    for number, option in stage.remat.programs if stage.remat else ():
        layer = plan.chain.layers[number]
        if option < len(layer.options):  # the plan may be broken
            under = layer.under(layer.options[option])
            for now, own in (
                (under.forward_ns, layer.forward_ns),
                (under.backward_ns, layer.backward_ns),
            ):
                longer += ceil(now / speed) - ceil(own / speed)
    return longer


def _away(shares: Sequence[Share], layers: Callable[[Sequence[tuple[int, int]]], str]) -> str:
    """What stages offload, of the same micro-batches, and how many bytes.

    Args:
        shares: of the stages.
        layers: says which these are.
    """
    runs = [run for share in shares for run in share.offload]
    firsts = [share.layers[0] for share in shares if share.offload_input]
    inside = layers(runs) if runs else ""
    entering = f"input{'s' * (len(firsts) > 1)} of {layers(_joined(firsts))}" if firsts else ""
    some, every = shares[0].offloaded
    which = "per micro-batch" if some == every else f"of {some} in {every} micro-batches"
    size = format_bytes(sum(share.offload_bytes for share in shares))
    return f"{', '.join(filter(None, (inside, entering)))}: {size} {which}"


def _joined(layers: Sequence[int]) -> list[tuple[int, int]]:
    """Neighbouring layers as runs."""
    runs: list[tuple[int, int]] = []
    for layer in layers:
        if runs and runs[-1][1] == layer - 1:
            runs[-1] = (runs[-1][0], layer)
        else:
            runs.append((layer, layer))
    return runs


def spans(runs: Sequence[tuple[int, int]]) -> str:
    """Runs of layers as people write them: `0-3, 5`."""
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def named(runs: Sequence[tuple[int, int]]) -> str:
    """Runs of layers with their noun: `layer 5`, `layers 0-3, 5`."""
    text = spans(runs)
    return f"layer {text}" if text.isdigit() else f"layers {text}"


def lines(plan: Plan) -> Iterator[tuple[str, str]]:
    """(what, text) for the figures of `plan`: stage by stage, then the host's memory.

    What a GPU's stages offload of the same micro-batches is one line.
    """
    every = remat_shares(plan)
    labels = plan.cluster.labels

    def stage_by_stage(name: str, what: str) -> Iterator[tuple[str, str]]:
        for share in every:
            if text := getattr(share, what):
                yield name, f"{labels[share.gpu]}, layers {text}"

    yield from stage_by_stage("recomputed", "again")
    yield from stage_by_stage("device programs", "under")
    sending: dict[tuple[int, tuple[int, int]], list[Share]] = {}
    for share in every:
        if share.away:
            sending.setdefault((share.gpu, share.offloaded), []).append(share)
    for (gpu, _), shares in sending.items():
        yield "offloaded", f"{labels[gpu]}, {_away(shares, named)}"
    yield from stage_by_stage("states on host", "updated")
    held = sum(row.host_bytes for row in plan.memory)
    if held and plan.cluster.host:
        yield (
            "host memory",
            f"{format_bytes(held)} of {format_bytes(plan.cluster.host.memory_bytes)}",
        )
