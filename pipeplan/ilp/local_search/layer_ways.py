"""What layers of a stage take that run in other ways than keeping all, as machine code.

A run of layers that are computed again is one layer, and a layer under one of its options takes
that option's figures, as in a contracted chain: (V1) to (V5). `stage_bytes` and `stage_ns` say of
a stage what `CostModel` says of it there; times are nearly the same, as a GPU's speed rounds those
of each layer here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np

from pipeplan.ilp.compiled import Ints, compiled
from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.local_search.chain_arrays import (
    BACKWARD,
    EXACT,
    FACTS,
    FORWARD,
    LATE,
    SIZES,
    ChainArrays,
    op_ns,
)

KEPT, RUN, INSIDE, OPTION = range(4)
"""Ways to run a layer: all is kept; a run begins with it; the run before it goes on, up to the
stage's end; from here on, one of its options."""
INPUT, INPUT_GRADIENT, OUTPUT, OUTPUT_GRADIENT, BUFFERS, OPTIONS = range(6)
"""Bytes of each layer's ends and of its buffers; how many options it has."""
SAVED_INPUT, SAVED_REST, SAVED_OUTPUT, FORWARD_MORE, BACKWARD_MORE, LIGHT_MORE, UNSAVED = range(7)
"""Bytes of each layer that keeps all, and of each under an option: what it saves, its workspaces,
that of a forward without autograd among them, and what of its output is nowhere else."""
ENDS, FIGURES, SUMS_OF_NS = range(3)
"""Ends are by layer, figures by way (all kept, options) and layer, sums of times by way, GPU, op
and layer."""
WayArrays = tuple[Ints, Ints, Ints]
"""What `way_arrays` returns: `ENDS` to `SUMS_OF_NS`."""
NO_WAYS: Final = (np.zeros((6, 0), int), np.zeros((1, 7, 0), int), np.zeros((1, 1, 2, 1), int))
"""In place of `way_arrays` where all layers keep all."""
_SAVED: Final = ("saved_input_bytes", "saved_bytes", "saved_output_bytes")
_MORE: Final = ("forward_workspace_bytes", "backward_workspace_bytes", "light_workspace_bytes")


def way_arrays(costs: CostModel) -> WayArrays:
    """What a chain's layers take in each way."""
    chain, count = costs.chain, range(costs.layers)
    ends = [
        [chain.input_of(layer) for layer in count],
        [chain.gradient_of_input(layer) for layer in count],
        [layer.output_bytes for layer in chain.layers],
        [layer.gradient_of_output_bytes for layer in chain.layers],
        [layer.buffer_bytes for layer in chain.layers],
        [len(layer.options) for layer in chain.layers],
    ]
    figures, sums = [], []
    for way in (None, *range(max(ends[-1]))):
        layers = tuple(
            layer if way is None or way >= len(layer.options) else layer.under(layer.options[way])
            for layer in chain.layers
        )
        mine = replace(costs, chain=chain.model_copy(update={"layers": layers}))
        rows = [[getattr(layer, name) for layer in layers] for name in (*_SAVED, *_MORE)]
        figures.append([*rows, [mine.unsaved_bytes(layer, backward=False) for layer in count]])
        sums.append([mine.compute_sums(gpu) for gpu in range(costs.gpus)])
    return np.array(ends, np.int64), np.array(figures, np.int64), np.array(sums, np.int64)


@compiled
def keeps_all(ways: Ints, first: int, behind: int) -> bool:
    """Whether layers from `first` to before `behind`, and the one before them, keep all."""
    return not ways[max(0, first - 1) : behind].any()


@compiled
def piece_end(ways: Ints, first: int, behind: int) -> int:
    """The layer behind the piece of a stage that begins with `first`; the stage's own is last."""
    end = first + 1
    if runs_again(ways[first]):
        while end < behind and ways[end] == INSIDE:
            end += 1
    return end


@compiled
def runs_again(way: int) -> bool:
    """Whether a layer is in a run."""
    return way in (RUN, INSIDE)


@compiled
def stage_ns(
    chain: ChainArrays,
    by_way: WayArrays,
    ways: Ints,
    first: int,
    behind: int,
    gpu: int,
) -> tuple[int, int]:
    """Of a stage's F and B on a GPU."""
    forward = op_ns(chain, FORWARD, first, behind, gpu)
    backward = op_ns(chain, BACKWARD, first, behind, gpu)
    if len(ways) == 0:
        return forward, backward
    for layer in range(first, behind):
        if runs_again(ways[layer]):
            backward += _layer_ns(by_way, KEPT, gpu, FORWARD, layer)
        elif ways[layer] >= OPTION:
            forward += _layer_ns(by_way, ways[layer], gpu, FORWARD, layer)
            forward -= _layer_ns(by_way, KEPT, gpu, FORWARD, layer)
            backward += _layer_ns(by_way, ways[layer], gpu, BACKWARD, layer)
            backward -= _layer_ns(by_way, KEPT, gpu, BACKWARD, layer)
    return forward, backward


@compiled
def _layer_ns(by_way: WayArrays, way: int, gpu: int, op: int, layer: int) -> int:
    """Of one layer, all kept or under an option."""
    sums = by_way[SUMS_OF_NS][_row(way)]
    return int(sums[gpu, op, layer + 1] - sums[gpu, op, layer])


@compiled
def _row(way: int) -> int:
    """Where figures and sums have a layer that keeps all, or is under an option."""
    return max(0, 1 + way - OPTION)


@compiled
def unsaved_output(by_way: WayArrays, way: int, layer: int) -> int:
    """As `CostModel.unsaved_bytes` of a layer's output."""
    if runs_again(way):
        return int(by_way[ENDS][OUTPUT, layer])
    return int(by_way[FIGURES][_row(way), UNSAVED, layer])


@compiled
def _saved_output(by_way: WayArrays, way: int, layer: int) -> int:
    """What a layer saves of its output."""
    if runs_again(way):
        return 0
    return int(by_way[FIGURES][_row(way), SAVED_OUTPUT, layer])


@compiled
def stage_bytes(
    chain: ChainArrays,
    by_way: WayArrays,
    ways: Ints,
    first: int,
    behind: int,
    beside: bool,
) -> tuple[int, int, int]:
    """(M1) to (M3) and (M7), or (P1) to (P3), of a stage: as `SegmentBytes` has them.

    Args:
        chain: what `chain_arrays` makes of it.
        by_way: what `way_arrays` makes of it.
        ways: how each layer runs.
        first: first layer of the stage.
        behind: the layer behind it.
        beside: whether the stage before is on the same GPU.

    Returns:
        `saved`, `running` and `backward`.
    """
    ends, exact = by_way[ENDS], chain[FACTS][EXACT]
    before = _saved_output(by_way, ways[first - 1], first - 1) if first > 0 else 0
    shared = before if beside and exact else 0
    kept = forward = backward = 0
    layer = first
    while layer < behind:
        end = piece_end(ways, layer, behind)
        entering, rest, leaving, going, returning = _piece(by_way, ways, layer, end, before)
        source, output = ends[INPUT, layer], ends[OUTPUT, end - 1]
        gradients = ends[OUTPUT_GRADIENT, end - 1] + ends[INPUT_GRADIENT, layer]
        if not exact:
            stored = entering + rest + leaving
            forward = max(forward, kept + max(stored, source) + output)
            kept += stored
            backward = max(backward, output + source + kept)
        else:
            if layer == first:
                kept = max(0, entering - shared)
                incoming, past = max(kept, source - shared), 0
            else:
                inner = max(before, entering)
                incoming, past = max(inner, source), kept
                kept += inner
            kept += rest
            forward = max(forward, incoming + past + rest + going + output)
            backward = max(backward, kept + leaving + returning + gradients)
        before, layer = leaving, end
    if not exact:
        return kept, forward, backward - kept
    saved, late = kept + before, chain[SIZES][LATE, first, behind - 1]
    if late > 0:
        forward = max(forward, late - shared)
    return saved, forward, backward - saved


@compiled
def _piece(
    by_way: WayArrays, ways: Ints, first: int, end: int, held: int
) -> tuple[int, int, int, int, int]:
    """What a run, or a layer, saves of its input, of neither end and of its output; workspaces."""
    if not runs_again(ways[first]):
        figures = by_way[FIGURES][_row(ways[first])]
        return (
            figures[SAVED_INPUT, first],
            figures[SAVED_REST, first],
            figures[SAVED_OUTPUT, first],
            figures[FORWARD_MORE, first],
            figures[BACKWARD_MORE, first],
        )
    ends = by_way[ENDS]
    source, output = ends[INPUT, first], ends[OUTPUT, end - 1]
    light, recomputing = _peaks(by_way, first, end, held)
    at_ends = source + ends[OUTPUT_GRADIENT, end - 1] + ends[INPUT_GRADIENT, first]
    return source, 0, 0, light - source - output, max(0, recomputing - at_ends)


@compiled
def _peaks(by_way: WayArrays, first: int, end: int, held: int) -> tuple[int, int]:
    """As `segment_bytes.run_peaks`, of one run."""
    ends, figures = by_way[ENDS], by_way[FIGURES][0]
    source = ends[INPUT, first]
    kept = max(figures[SAVED_INPUT, first], held)
    past = saved = light = going = back = copied = 0
    for layer in range(first, end):
        if layer > first:
            past = kept
            kept += max(figures[SAVED_OUTPUT, layer - 1], figures[SAVED_INPUT, layer])
        saved += figures[SAVED_REST, layer]
        around = ends[INPUT, layer] + ends[OUTPUT, layer]
        keeping = source if layer > first else 0
        light = max(light, keeping + around + figures[LIGHT_MORE, layer])
        going = max(going, past + saved + around + figures[FORWARD_MORE, layer])
        gradients = ends[OUTPUT_GRADIENT, layer] + ends[INPUT_GRADIENT, layer]
        own = figures[SAVED_OUTPUT, layer] + figures[BACKWARD_MORE, layer] + gradients
        back = max(back, kept + saved + own)
        copied += ends[BUFFERS, layer]
    return light, max(ends[OUTPUT_GRADIENT, end - 1] + going + copied, back)


@compiled
def offloadable(by_way: WayArrays, ways: Ints, first: int, behind: int, beside: bool) -> int:
    """The most bytes of a stage that may leave: (H1), of layers that keep all, and its input's."""
    figures, found = by_way[FIGURES][0], _entering(by_way, ways, first, beside)
    for layer in range(first, behind):
        if ways[layer] != KEPT:
            continue
        found += figures[SAVED_REST, layer]
        if layer > first and ways[layer - 1] == KEPT:
            found += max(figures[SAVED_OUTPUT, layer - 1], figures[SAVED_INPUT, layer])
    return found


@compiled
def _entering(by_way: WayArrays, ways: Ints, first: int, beside: bool) -> int:
    """As `own_input_bytes`: what is saved of a stage's input, by its first piece or before it."""
    before = 0
    if beside and first > 0:
        before = _saved_output(by_way, ways[first - 1], first - 1)
        if before > 0 and ways[first - 1] >= OPTION:
            return 0
    if ways[first] >= OPTION:
        return 0
    own = by_way[FIGURES][0][SAVED_INPUT, first]
    return int(max(before, by_way[ENDS][INPUT, first] if runs_again(ways[first]) else own))
