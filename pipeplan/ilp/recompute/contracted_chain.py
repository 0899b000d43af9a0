"""A chain whose recomputed segments are contracted to single layers: (V1) to (V5), (S6)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

from pipeplan.chain import Chain, Layer
from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.runs import Run, Segment, from_plan, listed
from pipeplan.ilp.segment_bytes import exact_segment, movable_bytes, run_peaks
from pipeplan.plan import Plan, Remat, Stage

LayerOf = Callable[[Run, int], Layer]
"""A run as one layer, given what the layer before saves of its input."""


@dataclass(frozen=True, slots=True)
class ContractedChain:
    """A chain in which each of `runs` is one layer; `pieces[l]` is what contracted layer l stands
    for.

    Attributes:
        source: The chain that was contracted.
        chain: The contracted chain; (T2) and all of section 4 hold for it as they stand.
        pieces: First and last original layer of each contracted one.
        runs: Those that are recomputed.
    """

    source: Chain
    chain: Chain
    pieces: tuple[Segment, ...]
    runs: frozenset[Run]

    @property
    def recomputed(self) -> frozenset[int]:
        """The contracted layers that stand for runs."""
        return self._standing_for(self.runs)

    @property
    def programs(self) -> frozenset[int]:
        """Those of them that run an option."""
        return self._standing_for(run for run in self.runs if run.option is not None)

    def _standing_for(self, runs: Iterable[Run]) -> frozenset[int]:
        spans = {run.segment for run in runs}
        return frozenset(n for n, piece in enumerate(self.pieces) if piece in spans)

    def renumbered(self, stages: Iterable[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
        """Stages (first, last, GPU) of the original chain in contracted layers, runs whole."""
        number = {layer: n for n, piece in enumerate(self.pieces) for layer in piece}
        return [(number[first], number[last], gpu) for first, last, gpu in stages]

    def of(self, costs: CostModel) -> CostModel:
        """The same machines with the contracted chain."""
        runs, programs = self.recomputed, self.programs
        return replace(costs, chain=self.chain, recomputed=runs, programs=programs)

    def original(self, stage: Stage, away: Remat | None = None) -> Stage:
        """A stage of the contracted chain as a stage of the original one.

        Args:
            stage: of the contracted chain.
            away: what of it resides on the host, in contracted layers.
        """
        held = self.pieces[stage.first : stage.last + 1]
        inside = range(held[0][0], held[-1][1] + 1)
        here = sorted(run for run in self.runs if run.first in inside)
        runs = listed(run for run in here if run.option is None)
        programs = tuple((run.first, run.option) for run in here if run.option is not None)
        sent = away.offload if away else ()
        gone = tuple((self.pieces[first][0], self.pieces[last][1]) for first, last in sent)
        remat = None
        if runs or away or programs:
            remat = Remat(
                recompute=runs,
                offload=gone,
                offload_input=away is not None and away.offload_input,
                programs=programs,
            )
        return Stage(
            id=stage.id,
            layers=(inside[0], inside[-1]),
            gpu=stage.gpu,
            remat=remat,
            split_backward=stage.split_backward,
            states=stage.states,
        )


def contracted_plan(plan: Plan) -> tuple[ContractedChain, Plan]:
    """The contracted chain of a valid plan's runs, and the plan as one for that chain.

    What it sends to the host it still does, in runs of contracted layers.
    """
    given = [stage.remat for stage in plan.stages if stage.remat]
    runs = [run for each in given for run in from_plan(each.recompute)]
    runs += [Run(layer, layer, option) for each in given for layer, option in each.programs]
    runs.sort()
    result = contract(plan.chain, runs)
    first = {piece[0]: number for number, piece in enumerate(result.pieces)}
    last = {piece[1]: number for number, piece in enumerate(result.pieces)}
    stages = tuple(
        stage.model_copy(
            update={
                "layers": (first[stage.first], last[stage.last]),
                "remat": _renumbered(stage.remat, first, last),
            }
        )
        for stage in plan.stages
    )
    return result, plan.model_copy(update={"chain": result.chain, "stages": stages})


def _renumbered(remat: Remat | None, first: dict[int, int], last: dict[int, int]) -> Remat | None:
    """What goes to the host, in runs of contracted layers."""
    if remat is None or not remat.offloads:
        return None
    sent = tuple((first[a], last[b]) for a, b in remat.offload)
    return Remat(offload=sent, offload_input=remat.offload_input)


def contract(
    chain: Chain, runs: Sequence[Run], layer_of: LayerOf | None = None
) -> ContractedChain:
    """`chain` with `runs`, which are disjoint and in order, as single layers.

    Args:
        chain: the original one.
        runs: what is recomputed.
        layer_of: `as_layer` of this chain, for who has it at hand.
    """
    made = layer_of or partial(as_layer, chain)
    pieces: list[Segment] = []
    for run in runs:
        begin = pieces[-1][1] + 1 if pieces else 0
        pieces += [(layer, layer) for layer in range(begin, run.first)]
        pieces.append(run.segment)
    begin = pieces[-1][1] + 1 if pieces else 0
    pieces += [(layer, layer) for layer in range(begin, len(chain.layers))]
    chosen = {run.segment: run for run in runs}
    layers: list[Layer] = []
    for piece in pieces:
        held = layers[-1].saved_output_bytes if layers else 0
        layers.append(made(chosen[piece], held) if piece in chosen else chain.layers[piece[0]])
    update = {"layers": tuple(layers)}
    return ContractedChain(chain, chain.model_copy(update=update), tuple(pieces), frozenset(runs))


def as_layer(chain: Chain, run: Run, held: int) -> Layer:
    """The run as one layer; `held` is what the layer before saves of the run's input."""
    first = run.first
    if run.option is not None:
        return chain.layers[first].under(chain.layers[first].options[run.option])
    light, _ = _peaks(chain, first, run.last, held)
    apart = chain.layers[first : run.last + 1]
    # By (V4) the runs in it are layers when it runs again.
    chain, last = _opened(chain, run, held)
    layers = chain.layers[first : last + 1]
    forward = sum(layer.forward_ns for layer in layers)
    source, output = chain.input_of(first), layers[-1].output_bytes
    ends = source + layers[-1].gradient_of_output_bytes + chain.gradient_of_input(first)
    _, recomputing = _peaks(chain, first, last, held)
    return Layer(
        name=f"{layers[0].name}..{layers[-1].name}",
        forward_ns=forward,
        backward_ns=forward + sum(layer.backward_ns for layer in layers),
        optimizer_ns=sum(layer.optimizer_ns for layer in layers),
        weight_bytes=sum(layer.weight_bytes for layer in layers),
        gradient_bytes=sum(layer.gradient_bytes for layer in layers),
        waiting_gradient_bytes=sum(layer.waiting_gradient_bytes for layer in layers),
        optimizer_bytes=sum(layer.optimizer_bytes for layer in layers),
        frozen_bytes=sum(layer.optimizer_bytes - movable_bytes(layer) for layer in apart),
        output_bytes=output,
        output_gradient_bytes=layers[-1].output_gradient_bytes,
        saved_input_bytes=source,
        forward_workspace_bytes=light - source - output,
        backward_workspace_bytes=max(0, recomputing - ends),
        optimizer_workspace_bytes=max(layer.optimizer_workspace_bytes for layer in layers),
        parameters=tuple(dict.fromkeys(name for layer in layers for name in layer.parameters)),
        **_halves(chain, (first, last), held, ends),
    )


def _peaks(chain: Chain, first: int, last: int, held: int) -> tuple[int, int]:
    """Of one run: bytes of its first forward, and of the second one with the backward."""
    return next(islice(run_peaks(chain, first, held), last - first, None))


def _opened(chain: Chain, run: Run, held: int) -> tuple[Chain, int]:
    """The chain in which the runs inside `run` are layers, and the last layer of `run` there."""
    layers, at = list(chain.layers[: run.first]), run.first
    for each in run.inner:
        layers += chain.layers[at : each.first]
        before = held if each.first == run.first else layers[-1].saved_output_bytes
        copied = sum(one.buffer_bytes for one in chain.layers[each.first : each.last + 1])
        one = as_layer(chain, each, before)
        layers.append(one.model_copy(update={"buffer_bytes": copied}))
        at = each.last + 1
    last = len(layers) + run.last - at
    layers += chain.layers[at:]
    return chain.model_copy(update={"layers": tuple(layers)}), last


def _halves(chain: Chain, run: Segment, held: int, ends: int) -> dict[str, Any]:
    """(S6): a backward in two ops; nothing where a layer does not tell what they take."""
    first, last = run
    layers = chain.layers[first : last + 1]
    if not all(layer.tells_split for layer in layers):
        return {}
    entry = layers[0].model_copy(
        update={"saved_input_bytes": max(layers[0].saved_input_bytes, held)}
    )
    changed = (*chain.layers[:first], entry, *chain.layers[first + 1 :])
    size = exact_segment(
        chain.model_copy(update={"layers": changed}), "flush", first, last, covered=False
    )
    copied = sum(layer.buffer_bytes for layer in layers)
    second = layers[-1].gradient_of_output_bytes + size.forward + copied
    for_weights = sum(layer.saved_for_weight_bytes or 0 for layer in layers)
    return {
        "backward_weight_ns": sum(layer.backward_weight_ns or 0 for layer in layers),
        "backward_input_ns": sum(layer.split_forward_ns + layer.input_ns for layer in layers),
        "saved_for_weight_bytes": for_weights,
        "saved_input_for_weight_bytes": layers[0].saved_input_for_weight_bytes,
        "input_backward_workspace_bytes": max(
            0, second - ends, size.saved + size.input_backward - ends
        ),
        "weight_backward_workspace_bytes": size.weight + size.weight_backward - for_weights,
    }
