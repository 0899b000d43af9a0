"""A backward in two halves, I and W: where it is allowed, and its bytes, (S1), (S3) to (S5)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from pipeplan.chain import Chain, Layer
from pipeplan.plan import Plan, Stage
from pipeplan.verifier.violation import Rule, Violation


@dataclass(frozen=True, slots=True)
class Halves:
    """Bytes of one micro-batch in a stage whose backward is split."""

    running: int
    """pI(s): while I runs."""
    kept: int
    """G(s): kept between I and W."""
    weights: int
    """pW(s): while W runs."""
    shared: int
    """What of G(s) the previous stage counts until its own backward starts."""


def allowed(plan: Plan, stage: Stage) -> Iterator[Violation]:
    """(S1): under flush, in the exact model, behind stage 0, of layers that tell what W takes."""
    if not stage.split_backward:
        return
    where = f"stages[{stage.id}].split_backward"
    if plan.semantics != "flush":
        yield Violation(Rule.STAGES, where, f"got it under {plan.semantics}, need flush")
    if plan.memory_model != "exact":
        got = f"got it in the {plan.memory_model} memory model, need the exact one"
        yield Violation(Rule.STAGES, where, got)
    if stage.first == 0:
        got = "got it in the first stage, need another one: nobody waits for its gradients"
        yield Violation(Rule.STAGES, where, got)
    for index in range(stage.first, stage.last + 1):
        layer = plan.chain.layers[index]
        for name in ("backward_weight_ns", "saved_for_weight_bytes"):
            if getattr(layer, name) is None:
                got = f"layer {index} has no {name}, need it of every layer of the stage"
                yield Violation(Rule.STAGES, where, got)


def halves(plan: Plan, index: int) -> Halves:
    """(S3) to (S5) of a stage; `shared` as in (M2)."""
    stage = plan.stages[index]
    layers = plan.chain.layers[stage.first : stage.last + 1]
    above = 0
    if index and plan.stages[index - 1].gpu == stage.gpu:
        above = plan.chain.layers[stage.first - 1].saved_output_bytes
    entry = max(0, layers[0].saved_input_bytes - above)
    return Halves(
        running=most_in_inputs(plan.chain, stage.first, stage.last, entry),
        kept=sum(layer.saved_for_weight_bytes or 0 for layer in layers),
        weights=most_in_weights(layers),
        shared=min(above, layers[0].saved_input_for_weight_bytes),
    )


def most_in_inputs(chain: Chain, first: int, last: int, entry: int) -> int:
    """(S4) of the layers first..last, whose input counts `entry`."""
    layers = chain.layers[first : last + 1]
    rest = list(accumulate(layer.saved_bytes for layer in layers))
    inner = [max(one.saved_output_bytes, two.saved_input_bytes) for one, two in pairwise(layers)]
    through = [0, *accumulate(inner)]
    most = behind = following = 0
    for i in reversed(range(len(layers))):
        layer = layers[i]
        gradients = layer.gradient_of_output_bytes + chain.gradient_of_input(first + i)
        ends = max(layer.saved_output_bytes, following) + gradients
        saved = entry + rest[i] + through[i]
        most = max(most, saved + ends + layer.input_backward_workspace_bytes + behind)
        behind += following + _beside_input(layer)
        following = layer.saved_input_for_weight_bytes
    return most


def most_in_weights(layers: Sequence[Layer]) -> int:
    """(S5): the last layer's turn comes first and gives back what it needed."""
    held = accumulate(layer.saved_for_weight_bytes or 0 for layer in layers)
    return max(
        size + layer.weight_backward_workspace_bytes
        for size, layer in zip(held, layers, strict=True)
    )


def _beside_input(layer: Layer) -> int:
    """Wr of a layer: what its weights need that is not its input."""
    return (layer.saved_for_weight_bytes or 0) - layer.saved_input_for_weight_bytes
