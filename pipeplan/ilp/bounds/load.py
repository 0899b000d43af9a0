"""Lower bounds on the period per micro-batch from sums: valid for every k and every allocation.

They use the true integer data, no search and no rounding; each function says why it holds.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

from pipeplan.ilp.clock import OutOfTimeError, never
from pipeplan.ilp.contiguous.dynamic_program import ContiguousDP
from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.symmetry import gpu_classes


def closed_form_bound(costs: CostModel) -> Fraction:
    """The largest of the load bound with forced merging and the average-memory bound."""
    return max(load_bound(costs), residency_bound(costs), Fraction(1, 1024))


def load_bound(costs: CostModel) -> Fraction:
    """Smallest T with T >= v(T), where v is the load bound after merging what T forces together.

    A cut occupies one link with both transfers (half duplex) or one direction each (full duplex)
    once per micro-batch; if that exceeds T on the fastest link, the two layers share a GPU. v(T)
    only falls with T and changes at these thresholds only.
    """
    cuts = min_link_occupancy(costs)
    thresholds = sorted(set(cuts))
    low, high = 0, len(thresholds)
    # after the search: merging every cut above thresholds[high - 1] is not contradicted
    while low < high:
        middle = (low + high) // 2
        ceiling = thresholds[middle]
        if _merged_bound(costs, cuts, ceiling - 1) >= ceiling:
            low = middle + 1
        else:
            high = middle
    floor = thresholds[low - 1] if low else 0
    return max(Fraction(floor), _merged_bound(costs, cuts, floor))


def min_link_occupancy(costs: CostModel) -> list[int]:
    """Ns that a cut behind each layer keeps a link busy at least, on the fastest pair of GPUs."""
    half = costs.cluster.links.duplex == "half"
    classes = gpu_classes(costs)
    pairs = {(one[0], other[-1]) for one in classes for other in classes if one[0] != other[-1]}
    cuts = []
    for boundary in range(costs.layers - 1):
        busy = []
        for here, there in pairs:
            forward = costs.send_forward_ns(boundary, here, there)
            backward = costs.send_backward_ns(boundary, there, here)
            busy.append(forward + backward if half else max(forward, backward))
        cuts.append(min(busy, default=2**62))
    return cuts


def _merged_bound(costs: CostModel, cuts: list[int], period: int) -> Fraction:
    """Load bound when layers around every cut longer than `period` share a GPU.

    The largest of: the heaviest item on the fastest GPU; all work over all speeds; pigeonhole:
    among the n * P + 1 heaviest items some GPU gets n + 1, at least the n + 1 lightest of them.
    """
    overhead = 2 * costs.cluster.action_overhead_ns
    items = sorted(item_loads(costs, cuts, period), reverse=True)
    best = Fraction(max(items) + overhead)
    gpus = costs.gpus
    for several in range(1, (len(items) - 1) // gpus + 1):
        lightest = items[several * (gpus - 1) : several * gpus + 1]
        best = max(best, Fraction(sum(lightest) + overhead))
    return max(best, _average_load(costs))


def _average_load(costs: CostModel) -> Fraction:
    """Total work over the sum of speeds; on equal GPUs each one used pays the overhead once."""
    if len({gpu.speed for gpu in costs.cluster.gpus}) == 1:
        total = costs.load_ns(0, costs.layers - 1, 0) - 2 * costs.cluster.action_overhead_ns
        return Fraction(total, costs.gpus) + 2 * costs.cluster.action_overhead_ns
    work = sum(layer.forward_ns + layer.backward_ns for layer in costs.chain.layers)
    speeds = sum((Fraction(repr(gpu.speed)) for gpu in costs.cluster.gpus), Fraction(0))
    return work / speeds


def item_loads(costs: CostModel, cuts: list[int], period: int) -> list[int]:
    """Loads on the fastest GPU of sets of layers that must share a GPU at `period`."""
    fastest = max(range(costs.gpus), key=lambda gpu: costs.cluster.gpus[gpu].speed)
    forward, backward = costs.compute_sums(fastest)
    own = [
        forward[layer + 1] - forward[layer] + backward[layer + 1] - backward[layer]
        for layer in range(costs.layers)
    ]
    return [sum(own[layer] for layer in unit) for unit in must_share_groups(costs, cuts, period)]


def must_share_groups(costs: CostModel, cuts: list[int], period: int) -> list[tuple[int, ...]]:
    """Sets of layers that must share a GPU at `period`: tied, or a cut would outlast it.

    Args:
        costs: Durations and bytes.
        cuts: Ns that a cut behind each layer keeps the fastest link busy (`min_link_occupancy`).
        period: Nanoseconds per micro-batch.
    """
    parent = list(range(costs.layers))

    def root(layer: int) -> int:
        while parent[layer] != layer:
            parent[layer] = parent[parent[layer]]
            layer = parent[layer]
        return layer

    for boundary, busy in enumerate(cuts):
        if busy > period or costs.gpus == 1:
            parent[root(boundary + 1)] = root(boundary)
    for group in costs.tied_groups:
        for layer in group[1:]:
            parent[root(layer)] = root(group[0])
    sets: dict[int, list[int]] = {}
    for layer in range(costs.layers):
        sets.setdefault(root(layer), []).append(layer)
    return [tuple(layers) for layers in sets.values()]


def contiguous_bound(
    costs: CostModel, known: Fraction | int, over: Callable[[], bool] = never
) -> Fraction | None:
    """What every plan with one stage per GPU needs, whatever its k; None if none can exist."""
    return relaxed_bound(ContiguousDP(costs, any_k=True), known, over)


def relaxed_bound(
    relaxed: ContiguousDP, known: Fraction | int, over: Callable[[], bool] = never
) -> Fraction | None:
    """The period, at least `known`, below which a relaxation has no answer; None if at none.

    It may be `over` before that period is found: then what was refuted until then.
    If even a real period just below the smallest feasible integer T is infeasible, T itself is
    proven; otherwise only T - 1 is. Less than 1 may be known: micro-batches may share a ns.
    """
    known = Fraction(known)
    if not relaxed.complete:
        return known
    try:
        refuted, found = relaxed.bisect(max(1, int(known)), over)
    except OutOfTimeError:
        return known
    if found is None:
        return None
    if known >= found.period:
        return known
    if refuted + 1 < found.period:
        return max(known, Fraction(refuted))
    proven = relaxed.solve(found.period, just_below=True) is None
    return max(known, Fraction(found.period - (not proven)))


def residency_bound(costs: CostModel) -> Fraction:
    """Average memory: bytes kept times the time they are kept fit into all GPUs times T.

    Layer l's saved bytes of a micro-batch live at least as long as the work from its forward to
    its backward on the fastest GPU (Little's law); averages sum to at most the sum of
    peaks.
    """
    room = sum(costs.budgets) - sum(costs.segment(i, i).states for i in range(costs.layers))
    if room <= 0:
        return Fraction(0)
    fastest = max(range(costs.gpus), key=lambda gpu: costs.cluster.gpus[gpu].speed)
    forward, backward = costs.compute_sums(fastest)
    total = 0
    for layer, data in enumerate(costs.chain.layers):
        inside = forward[-1] - forward[layer + 1] + backward[-1] - backward[layer]
        if costs.exact:
            inside += forward[layer + 1] - forward[layer]
            before = costs.chain.layers[layer - 1].saved_output_bytes if layer else 0
            size = max(0, data.saved_input_bytes - before) + data.saved_bytes
            size += data.saved_output_bytes
        else:
            size = costs.segment(layer, layer).saved
        total += inside * size
    return Fraction(total, room)
