"""What of a plan would have to change for a lower peak, in one line per GPU."""

from __future__ import annotations

from collections.abc import Iterator

from pipeplan.chain import Layer
from pipeplan.memory_terms import GpuTerms, Purpose
from pipeplan.plan import Plan, Stage
from pipeplan.report.layers import kept_bytes
from pipeplan.units import format_bytes
from pipeplan.verifier import movable_states

P = Purpose
_GROUPS: dict[str, tuple[Purpose, ...]] = {
    "states": (P.WEIGHTS, P.OLDER_WEIGHTS, P.GRADIENTS, P.WAITING_GRADIENTS, P.OPTIMIZER),
    "saved activations": (P.SAVED, P.SAVED_FOR_W),
    "workspace": (P.WORK_F, P.WORK_B, P.WORK_I, P.WORK_W),
    "the optimizer's workspace": (P.UPDATE,),
    "tensors between stages": (
        *(P.DIRECT_F, P.DIRECT_B, P.SENT_F, P.SENT_B, P.RECEIVED_F, P.RECEIVED_B),
    ),
}
LESS = 10
"""Per cent that the peak shall be lower."""


def lower_peak(plan: Plan, memory: GpuTerms) -> str:
    """What has to go where, what the most of it is, and what would be the peak next."""
    peak = memory.peak
    if not peak.size:
        return ""
    sizes: dict[tuple[int, str], int] = {}
    for term in peak.terms:
        key = term.stage, next(name for name, of in _GROUPS.items() if term.purpose in of)
        sizes[key] = sizes.get(key, 0) + term.size
    stage, group = max(sizes, key=lambda key: sizes[key])
    most, need = sizes[stage, group], -(-peak.size * LESS // 100)
    line = (
        f"for a peak {LESS} % lower, {format_bytes(need)} have to go at"
        f" {peak.action or 'rest'}{_as_high(memory)}. The largest part is {group} of stage"
        f" {stage}, {format_bytes(most)}."
    )
    return f"{line}{_layer(plan, memory, stage, group, need)}{_next(memory)}"


def _layer(plan: Plan, memory: GpuTerms, stage: int, group: str, need: int) -> str:
    """The layer of the stage that has most of the group, and whether it is enough."""
    place = plan.stages[stage]
    sizes, line = dict(_sizes(plan, place, group)), ""
    saved = group == "saved activations"
    each, times = _in_flight(memory, stage) if saved else (0, 1)
    if any(sizes.values()):
        index = max(sizes, key=lambda layer: sizes[layer])
        size = format_bytes(sizes[index]) + (f" x {times}" if times != 1 else "")
        line = (
            f" Most of it is of layer {index} ({plan.chain.layers[index].name}): {size},"
            f" {_enough(sizes[index] * times, need)}."
        )
    if saved and times > 1:
        line += f" One micro-batch less is {format_bytes(each)}, {_enough(each, need)}."
    return line


def _enough(size: int, need: int) -> str:
    return "enough" if size >= need else "not enough alone"


def _in_flight(memory: GpuTerms, stage: int) -> tuple[int, int]:
    """Bytes that a micro-batch has saved in the stage, and how many have."""
    terms = [t for t in memory.peak.terms if t.purpose is P.SAVED and t.stage == stage]
    return max((t.each_bytes for t in terms), default=0), sum(t.count for t in terms)


def _sizes(plan: Plan, place: Stage, group: str) -> Iterator[tuple[int, int]]:
    """Layer, its bytes of the group: of a micro-batch, of states, while it runs."""
    runs = (*place.remat.recompute, *place.remat.offload) if place.remat else ()
    gone = {layer for first, last in runs for layer in range(first, last + 1)}
    gone |= {layer for layer, _ in place.remat.programs} if place.remat else set()
    for index in range(place.first, place.last + 1):
        layer = plan.chain.layers[index]
        if group == "saved activations":
            yield index, 0 if index in gone else kept_bytes(layer)
        elif group == "states":
            yield index, _states(plan, place, layer)
        elif group == "workspace":
            spaces = (layer.forward_workspace_bytes, layer.backward_workspace_bytes)
            ends = plan.chain.gradient_of_input(index) + layer.gradient_of_output_bytes
            yield index, max(0, *spaces) + max(ends, layer.output_bytes)
        elif group == "the optimizer's workspace":
            yield index, layer.optimizer_workspace_bytes
        else:
            before = plan.chain.input_of(index) if 0 < index == place.first else 0
            yield index, max(before, layer.output_bytes if index == place.last else 0)


def _states(plan: Plan, place: Stage, layer: Layer) -> int:
    """(M1) of one layer, (U2) where the host updates."""
    one = layer.weight_bytes + layer.gradient_bytes + layer.optimizer_bytes
    more = layer.weight_bytes + layer.waiting_gradient_bytes
    if place.states == "host":
        one -= movable_states(layer)
    return one + (more if plan.semantics == "2bw" else 0)


def _as_high(memory: GpuTerms) -> str:
    """What holds nearly as much, and would have to change as well."""
    limit = memory.peak.size * (100 - LESS) // 100
    high = [each.kind for each in memory.instants[1:] if each.size > limit]
    return f" and nearly as much at {', '.join(high)}" if high else ""


def _next(memory: GpuTerms) -> str:
    """What would be the peak then, where nothing is nearly as high now."""
    following = memory.following
    if following is None or _as_high(memory):
        return ""
    return f" Then the most is {format_bytes(following.size)}, at {following.action}."
