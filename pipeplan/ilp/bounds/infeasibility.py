"""Whether any plan exists, and the tightest reason proven if none does.

Every op of any plan finds at least its own micro-batch's bytes in memory, and states never leave
their GPU (those of optimizers may where `costs.states_away`). So a layer that fits no GPU with one
micro-batch, states beyond all memory, or a spread that cannot be found (`assignment`) each prove
that there is no plan. What a micro-batch keeps counts only where nothing is recomputed or
offloaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import pairwise

from pipeplan.ilp.costs import CostModel
from pipeplan.units import counted, format_bytes


def layer_need(costs: CostModel, layer: int) -> int:
    """Bytes without which no GPU can run the layer: its states and one micro-batch's peak.

    The least of what it needs as it is and under each of its options. Of a backward that may be
    split no more counts than what the forward has kept.
    """
    needs = []
    for each in _ways(costs, layer):
        size = each.segment(layer, layer, True)
        backward = 0 if each.may_split(layer, layer) else size.backward
        needs.append(size.states + max(size.forward, size.saved + backward, size.update))
    return min(needs)


def _ways(costs: CostModel, layer: int) -> Iterator[CostModel]:
    """The chain as it is, and with the layer under each of its options."""
    yield costs
    layers = costs.chain.layers
    for option in layers[layer].options:
        changed = (*layers[:layer], layers[layer].under(option), *layers[layer + 1 :])
        yield replace(costs, chain=costs.chain.model_copy(update={"layers": changed}))


def infeasibility_reason(costs: CostModel) -> str | None:
    """Why no plan exists that keeps all it saves on its GPUs, if sums show it; else None."""
    return reason_for_any_remat(costs) or _kept_reason(costs)


def reason_for_any_remat(costs: CostModel) -> str | None:
    """A layer that fits no GPU, pins, or states beyond all memory; None if none of them is so.

    Each of them also holds for plans that recompute layers or offload what they keep.
    """
    here = layer_reason(costs) or _pinned_reason(costs) or _states_reason(costs)
    return here or _host_reason(costs)


def layer_reason(costs: CostModel) -> str | None:
    """A layer that fits no GPU, even if it is recomputed; None if there is none.

    Or layers that must share a GPU and are pinned to two.
    """
    apart = _pinned_apart(costs)
    if apart is not None:
        return apart
    largest = max(costs.budgets)
    for layer in range(costs.layers):
        need = layer_need(costs, layer)
        if need > largest:
            name = costs.chain.layers[layer].name
            return (
                f"chain {costs.chain.name!r}: no plan exists: layer {layer} ({name!r}) needs"
                f" {need} bytes ({format_bytes(need)}) for its states and one micro-batch, the"
                f" largest GPU has {largest}: {need - largest} bytes over."
                f" {_suggestion_for_layer(costs, layer)}"
            )
    return None


def _suggestion_for_layer(costs: CostModel, layer: int) -> str:
    """What to try where a layer fits no GPU: other micro-batches leave its states as they are."""
    largest, data = max(costs.budgets), costs.chain.layers[layer]
    ways = ["a GPU with more memory"]
    if costs.segment(layer, layer, True).states <= largest:
        ways.insert(0, "a smaller micro-batch")
    if layer_need(costs, layer) - data.weight_bytes - data.waiting_gradient_bytes <= largest:
        ways += _fewer_versions(costs, (layer,))
    return _may_help(ways)


def _pinned_apart(costs: CostModel) -> str | None:
    """Tied layers that are pinned to different GPUs; None if there are none."""
    for group in costs.tied_groups:
        pinned = [(layer, gpu) for layer, gpu in costs.pins if layer in group]
        for (one, here), (other, there) in pairwise(pinned):
            if here != there:
                return (
                    f"chain {costs.chain.name!r}: no plan exists: layers {one} and {other} share"
                    f" a parameter, so they need one GPU, and are pinned to {here} and {there}."
                    " Pin them to one GPU, or only one of them."
                )
    return None


def _pinned_reason(costs: CostModel) -> str | None:
    """A GPU that cannot hold the states of what is pinned to it and one micro-batch's peak."""
    for gpu, budget in enumerate(costs.budgets):
        pinned = [layer for layer, home in enumerate(costs.pinned_gpus) if home == gpu]
        if not pinned:
            continue
        states = sum(costs.segment(layer, layer, True).states for layer in pinned)
        own = max(
            layer_need(costs, layer) - costs.segment(layer, layer, True).states for layer in pinned
        )
        if states + own > budget:
            return (
                f"chain {costs.chain.name!r}: no plan exists: what is pinned to GPU {gpu}"
                f" ({counted(len(pinned), 'layer')}) needs {states + own} bytes"
                f" ({format_bytes(states + own)}) for its states and one micro-batch, the GPU"
                f" has {budget}: {states + own - budget} bytes"
                " over. Pin less to it."
            )
    return None


def _states_reason(costs: CostModel) -> str | None:
    """(M1) of all layers together beyond all memory: nothing makes it smaller."""
    states, total = _states(costs), sum(costs.budgets)
    if states <= total:
        return None
    return (
        f"chain {costs.chain.name!r}: no plan exists: the {_which_states(costs)} sum to {states}"
        f" bytes ({format_bytes(states)}), {_all_have(costs)} {total}:"
        f" {states - total} bytes over. {suggestions(costs, only_states=True)}"
    )


def _host_reason(costs: CostModel) -> str | None:
    """States beyond all memory, the host's included; copies of weights and gradients left out."""
    host = costs.cluster.host
    if not costs.states_away or host is None:
        return None
    every = _states(costs) + costs.movable(0, costs.layers - 1)
    total = sum(costs.budgets)
    if every - total <= host.memory_bytes:
        return None
    return (
        f"chain {costs.chain.name!r}: no plan exists: the states of all layers sum to {every}"
        f" bytes ({format_bytes(every)}), {_all_have(costs)} {total}, the host has"
        f" {host.memory_bytes}: {every - total - host.memory_bytes} bytes over."
        f" {suggestions(costs, only_states=True)}"
    )


def _kept_reason(costs: CostModel) -> str | None:
    """States and what one micro-batch keeps beyond all memory."""
    saved = sum(costs.segment(layer, layer, True).saved for layer in range(costs.layers))
    states, total = _states(costs), sum(costs.budgets)
    need = states + saved
    if need <= total:
        return None
    return (
        f"chain {costs.chain.name!r}: no plan exists: the {_which_states(costs)} ({states} bytes)"
        f" and what one micro-batch keeps ({saved} bytes) sum to {need} bytes,"
        f" {_all_have(costs)} {total}: {need - total} bytes over. {suggestions(costs)}"
    )


def _which_states(costs: CostModel) -> str:
    return "states that cannot be on the host" if costs.states_away else "states of all layers"


def _all_have(costs: CostModel) -> str:
    return "the only GPU has" if costs.gpus == 1 else f"the {costs.gpus} GPUs have"


def _states(costs: CostModel) -> int:
    return sum(costs.segment(layer, layer, True).states for layer in range(costs.layers))


def suggestions(
    costs: CostModel, *, only_states: bool = False, recompute: bool = False, time: bool = False
) -> str:
    """What to try, as a sentence.

    Args:
        costs: of the chain that has no plan.
        only_states: whether states alone are too much: what a micro-batch keeps matters not.
        recompute: whether layers may be recomputed already.
        time: whether more time is worth a try.
    """
    ways = [f"more {way}" for way in (*(["time"] if time else []), "memory", "GPUs")]
    ways += _fewer_versions(costs, range(costs.layers))
    if costs.exact and not costs.states_away and costs.movable(0, costs.layers - 1):
        ways.append("offload states")
    if not only_states:
        ways.append("a smaller micro-batch")
        if not recompute and costs.exact and not costs.pins:
            ways.append("recompute auto")
    return _may_help(ways)


def _fewer_versions(costs: CostModel, layers: Iterable[int]) -> list[str]:
    """Flush as a way out, where it keeps less of these layers (M1); the paper's (P1) does not."""
    hosted = (costs.chain.layers[layer] for layer in layers)
    twice = costs.exact and costs.semantics == "2bw"
    if twice and any(layer.weight_bytes or layer.waiting_gradient_bytes for layer in hosted):
        return ["semantics flush (one version of the weights)"]
    return []


def _may_help(ways: list[str]) -> str:
    """The ways as a sentence."""
    *most, last = ways
    text = f"{', '.join(most)} or {last}" if most else last
    return f"{text[0].upper()}{text[1:]} may help."


def assignment_reason(costs: CostModel, missing: int) -> str:
    """No spread of the layers leaves room for one micro-batch on every GPU."""
    return (
        f"chain {costs.chain.name!r}: no plan exists: however its {costs.layers} layers are spread"
        f" over the {costs.gpus} GPUs{_kept_pins(costs)}, on some GPU the states and one"
        f" micro-batch exceed its memory by at least {missing} bytes ({format_bytes(missing)})."
        f" {suggestions(costs)}"
    )


def _kept_pins(costs: CostModel) -> str:
    return f" with {counted(len(costs.pins), 'layer')} pinned" if costs.pins else ""


def contiguous_reason(costs: CostModel) -> str:
    """No partition into one stage per GPU fits, whatever the period and k."""
    apart = _pins_in_turns(costs)
    if apart is not None:
        return apart
    together = " with tied layers together" if costs.tied_groups and not costs.pins else ""
    return (
        f"chain {costs.chain.name!r}: no contiguous plan exists: however its {costs.layers} layers"
        f" are cut into at most {costs.gpus} stages{_kept_pins(costs)}{together}, some stage's"
        " states and one micro-batch exceed its GPU's memory. Method auto may place several"
        " stages on a GPU; more memory or GPUs may help too."
    )


def _pins_in_turns(costs: CostModel) -> str | None:
    """Pins that no contiguous plan keeps, whatever the memory; None if they are none."""
    pinned = [(layer, gpu) for layer, gpu in enumerate(costs.pinned_gpus) if gpu is not None]
    last: dict[int, int] = {}
    for index, (layer, gpu) in enumerate(pinned):
        if gpu in last and pinned[index - 1][1] != gpu:
            between, other = pinned[index - 1]
            return (
                f"chain {costs.chain.name!r}: no contiguous plan exists: layers {last[gpu]} and"
                f" {layer} are pinned to GPU {gpu}, layer {between} between them to GPU {other}."
                " Method auto may place several stages on a GPU; other pins would help too."
            )
        last[gpu] = layer
    return None
