"""Bytes of a segment: (M1)-(M3), (M7) and (S3)-(S5), or (P1)-(P3) of docs/reference/model.md.

Of a run that is recomputed: (V3), (V4).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from pipeplan.chain import Chain, Layer
from pipeplan.plan import Semantics

PAPER_WEIGHT_COPIES = 3


@dataclass(frozen=True, slots=True)
class SegmentBytes:
    """Bytes of one segment.

    `saved` is A, what each micro-batch keeps. While the forward runs, its own micro-batch counts
    `running` bytes (not yet A); while the backward runs, it counts A + `backward`.

    (M7) reads the input of a stage's first layer. So `running` and `optimizer` hold for a stage;
    what holds for a layer in the midst of any stage are `forward`, and `update` at some time.
    """

    saved: int
    forward: int
    """(M3)."""
    backward: int
    states: int
    optimizer: int
    """W where the update follows a backward (or the drain), 0 where all of it is late (M7)."""
    update: int = 0
    """W of an update at any time: it is beside the states once at least."""
    late: int = 0
    """(M7): an update just before the forward, beside the input; 0 if no update waits."""
    weight: int = 0
    """G of (S3): what a split backward keeps from I to W."""
    weight_shared: int = 0
    """The part of G that the stage before, on the same GPU, counts until its own backward ends."""
    input_backward: int = 0
    """pI - A of (S4)."""
    weight_backward: int = 0
    """pW - G of (S5)."""

    def most_beyond_saved(self, split: bool) -> int:
        """What the op that needs most adds to `saved`, or to `weight`, while it runs."""
        backwards = (self.input_backward, self.weight_backward) if split else (self.backward,)
        return max(self.running - self.saved, *backwards)

    @property
    def running(self) -> int:
        """Bytes of a stage's own micro-batch from the late update to the end of the forward."""
        return max(self.forward, self.late)


def movable_bytes(layer: Layer) -> int:
    """(U1): what of a layer's `optimizer_bytes` may be on the host."""
    return max(0, layer.optimizer_bytes - layer.buffer_bytes - layer.frozen_bytes)


def exact_segment(
    chain: Chain,
    semantics: Semantics,
    first: int,
    last: int,
    covered: bool,
    states_away: bool = False,
) -> SegmentBytes:
    """(M1)-(M3) and (M7) of one segment, in one pass over its layers; (U2) with `states_away`."""
    layers = chain.layers
    shared = layers[first - 1].saved_output_bytes if covered and first else 0
    saved_input = max(0, layers[first].saved_input_bytes - shared)
    kept = saved_input  # saved input, saved rests and inner boundaries of the layers before l
    forward = backward = 0
    for index in range(first, last + 1):
        layer = layers[index]
        source = chain.input_of(index)
        if index == first:
            incoming, behind = max(saved_input, max(0, source - shared)), 0
        else:
            inner = max(layers[index - 1].saved_output_bytes, layer.saved_input_bytes)
            incoming, behind = max(inner, source), kept
            kept += inner
        kept += layer.saved_bytes
        forward = max(
            forward,
            incoming
            + behind
            + layer.saved_bytes
            + layer.forward_workspace_bytes
            + layer.output_bytes,
        )
        backward = max(
            backward,
            kept
            + layer.saved_output_bytes
            + layer.backward_workspace_bytes
            + layer.gradient_of_output_bytes
            + chain.gradient_of_input(index),
        )
    saved = kept + layers[last].saved_output_bytes
    weight, shared_weight, input_backward, weight_backward = _split_segment(
        chain, first, last, shared, saved
    )
    versions = 2 if semantics == "2bw" else 1
    hosted = layers[first : last + 1]
    update = 0 if states_away else max(x.optimizer_workspace_bytes for x in hosted)
    waiting = (versions - 1) * sum(x.waiting_gradient_bytes for x in hosted)
    entering = chain.input_of(first) - shared if first else 0
    all_late = waiting and waiting == sum(x.gradient_bytes for x in hosted)
    return SegmentBytes(
        saved=saved,
        forward=forward,
        backward=backward - saved,
        states=sum(
            versions * x.weight_bytes
            + x.gradient_bytes
            + (versions - 1) * x.waiting_gradient_bytes
            + x.optimizer_bytes
            - (movable_bytes(x) if states_away else 0)
            for x in hosted
        ),
        optimizer=0 if all_late else update,
        update=update,
        late=entering + update if waiting else 0,
        weight=weight,
        weight_shared=shared_weight,
        input_backward=input_backward,
        weight_backward=weight_backward,
    )


def _split_segment(
    chain: Chain, first: int, last: int, shared: int, saved: int
) -> tuple[int, int, int, int]:
    """(S3)-(S5): G, its part that the stage before shares, pI - A, pW - G; zeros where not known.

    Args:
        chain: The chain.
        first: First layer of the stage.
        last: Its last layer.
        shared: u of (M2).
        saved: A of the stage.
    """
    layers = chain.layers
    hosted = layers[first : last + 1]
    if any(each.saved_for_weight_bytes is None for each in hosted):
        return 0, 0, 0, 0
    kept = saved  # of layer l and those before it, while I walks back from the last one
    done = boundary = 0  # of the layers behind l: kept for weights; input of the next one
    most = 0
    for index in range(last, first - 1, -1):
        layer = layers[index]
        own = layer.saved_output_bytes
        gradients = layer.gradient_of_output_bytes + chain.gradient_of_input(index)
        held = kept - own + max(own, boundary)
        most = max(most, held + done + layer.input_backward_workspace_bytes + gradients)
        entering = layer.saved_input_for_weight_bytes
        done += (layer.saved_for_weight_bytes or 0) - entering + boundary
        boundary = entering
        if index > first:
            before = layers[index - 1].saved_output_bytes
            inner = max(before, layer.saved_input_bytes)
            kept += before - own - layer.saved_bytes - inner
    total = done + boundary
    peak, rest = 0, total
    for layer in reversed(hosted):
        peak = max(peak, rest + layer.weight_backward_workspace_bytes)
        rest -= layer.saved_for_weight_bytes or 0
    return total, min(shared, boundary), most - saved, peak - total


def paper_segment(chain: Chain, first: int, last: int) -> SegmentBytes:
    """(P1)-(P3) of one segment."""
    layers = chain.layers[first : last + 1]
    stored = [x.saved_input_bytes + x.saved_bytes + x.saved_output_bytes for x in layers]
    before = list(accumulate(stored, initial=0))
    total, forward, backward = before[-1], 0, 0
    for index, layer in enumerate(layers):
        source = chain.input_of(first + index)
        forward = max(forward, before[index] + max(stored[index], source) + layer.output_bytes)
        released = total - before[index + 1]
        backward = max(backward, layer.output_bytes + source - released)
    return SegmentBytes(
        saved=total,
        forward=forward,
        backward=backward,
        states=PAPER_WEIGHT_COPIES * sum(x.weight_bytes for x in layers),
        optimizer=0,
    )


def run_peaks(chain: Chain, first: int, held: int) -> Iterator[tuple[int, int]]:
    """Bytes at once of the runs that begin at `first`, by their last layer, input included.

    Yields the most of the first forward, and of the second one with the backward: what (V3) and
    (V4) take the run's ends from. Maxima that grow with the last layer.

    Args:
        chain: the chain.
        first: first layer of the runs.
        held: what the layer before saves of their input.
    """
    source = chain.input_of(first)
    kept = max(chain.layers[first].saved_input_bytes, held)
    past = saved = light = going = back = copied = 0
    for index in range(first, len(chain.layers)):
        layer, size = chain.layers[index], chain.input_of(index)
        if index > first:
            past = kept
            kept += max(chain.layers[index - 1].saved_output_bytes, layer.saved_input_bytes)
        saved += layer.saved_bytes
        around, keeping = size + layer.output_bytes, source if index > first else 0
        light = max(light, keeping + around + layer.light_workspace_bytes)
        going = max(going, past + saved + around + layer.forward_workspace_bytes)
        gradients = layer.gradient_of_output_bytes + chain.gradient_of_input(index)
        own = layer.saved_output_bytes + layer.backward_workspace_bytes + gradients
        back = max(back, kept + saved + own)
        copied += layer.buffer_bytes
        yield light, max(layer.gradient_of_output_bytes + going + copied, back)
