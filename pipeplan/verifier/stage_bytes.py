"""What one micro-batch costs a stage: (M2), (M3), (H1), and (P2), (P3) in the paper model."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

from pipeplan.plan import Plan, Stage


@dataclass(frozen=True, slots=True)
class StageBytes:
    """Bytes of one micro-batch in one stage."""

    kept: int
    """A(s): kept between forward and backward."""
    forward: int
    """pF(s): while F runs."""
    backward: int
    """pB(s): while B runs; in the paper model added to A."""


def exact(plan: Plan, index: int) -> StageBytes:
    """(M2), (M3) and (M7). A boundary inside the stage is one storage, counted once.

    If the previous stage shares the GPU, what it saved of its output is counted there already and
    outlives this stage's use of it.
    """
    stage = plan.stages[index]
    layers = plan.chain.layers[stage.first : stage.last + 1]
    shared = saved_output(plan, stage_before(plan, stage))
    entry = max(0, layers[0].saved_input_bytes - shared)
    rest = list(accumulate(layer.saved_bytes for layer in layers))
    inner = [
        max(before.saved_output_bytes, after.saved_input_bytes)
        for before, after in pairwise(layers)
    ]
    through = [0, *accumulate(inner)]
    forward = backward = 0
    for i, layer in enumerate(layers):
        size = plan.chain.input_of(stage.first + i)
        if i == 0:
            held = max(entry, size - shared)
        else:
            held = max(inner[i - 1], size) + entry + through[i - 1]
        running = layer.forward_workspace_bytes + layer.output_bytes
        forward = max(forward, held + rest[i] + running)
        gradients = layer.gradient_of_output_bytes + plan.chain.gradient_of_input(stage.first + i)
        kept = entry + rest[i] + through[i] + layer.saved_output_bytes
        backward = max(backward, kept + layer.backward_workspace_bytes + gradients)
    saved = entry + rest[-1] + through[-1] + layers[-1].saved_output_bytes
    if plan.semantics == "2bw" and any(layer.waiting_gradient_bytes for layer in layers):
        handed = plan.chain.input_of(stage.first) - shared if index else 0
        update = max(layer.optimizer_workspace_bytes for layer in layers)
        forward = max(forward, handed + (update if stage.states == "gpu" else 0))
    return StageBytes(kept=saved, forward=forward, backward=backward)


def stage_before(plan: Plan, stage: Stage) -> Stage | None:
    """The one that hands over to it on the same GPU."""
    same = (each for each in plan.stages if each.gpu == stage.gpu)
    return next((each for each in same if each.last == stage.first - 1), None)


def saved_output(plan: Plan, stage: Stage | None) -> int:
    """So of a stage's last layer, as it keeps it: (V2), (V5)."""
    if stage is None:
        return 0
    layer, remat = plan.chain.layers[stage.last], stage.remat
    if remat is None:
        return layer.saved_output_bytes
    if any(last == stage.last for _, last in remat.recompute):
        return 0
    option = dict(remat.programs).get(stage.last)
    if option is None or option >= len(layer.options):
        return layer.saved_output_bytes
    return layer.options[option].saved_output_bytes


def offloaded(plan: Plan, stage: Stage) -> int:
    """(H1): what the stage's offloaded runs keep strictly between their ends; its saved input.

    Of that the more of what the stage and the one before on its GPU keep.
    """
    total = 0
    if stage.remat and stage.remat.offload_input:
        shared = saved_output(plan, stage_before(plan, stage))
        again = any(first == stage.first for first, _ in stage.remat.recompute)
        own = plan.chain.layers[stage.first].saved_input_bytes
        total += max(plan.chain.input_of(stage.first) if again else own, shared)
    for first, last in stage.remat.offload if stage.remat else ():
        layers = plan.chain.layers[first : last + 1]
        total += sum(layer.saved_bytes for layer in layers)
        total += sum(
            max(before.saved_output_bytes, after.saved_input_bytes)
            for before, after in pairwise(layers)
        )
    return total


def sends_whole_input(plan: Plan, stage: Stage) -> bool:
    """Whether the stage offloads its input alone, all of which is kept: (H3)."""
    remat = stage.remat
    alone = remat is not None and remat.offload_input and not remat.offload
    return alone and offloaded(plan, stage) == plan.chain.input_of(stage.first)


def all_late(plan: Plan, stage: Stage) -> bool:
    """Whether no gradient of the stage is used before a later forward: (M7)."""
    layers = plan.chain.layers[stage.first : stage.last + 1]
    waiting = sum(layer.waiting_gradient_bytes for layer in layers)
    return waiting > 0 and waiting == sum(layer.gradient_bytes for layer in layers)


def paper(plan: Plan, index: int) -> StageBytes:
    """(P2) and (P3): every layer keeps its own input, rest and output; no workspaces."""
    stage = plan.stages[index]
    layers = plan.chain.layers[stage.first : stage.last + 1]
    stored = [x.saved_input_bytes + x.saved_bytes + x.saved_output_bytes for x in layers]
    through = [0, *accumulate(stored)]
    forward = backward = 0
    for i, layer in enumerate(layers):
        size, output = plan.chain.input_of(stage.first + i), layer.output_bytes
        forward = max(forward, through[i] + max(stored[i], size) + output)
        backward = max(backward, output + size - (through[-1] - through[i + 1]))
    return StageBytes(kept=through[-1], forward=forward, backward=backward)
