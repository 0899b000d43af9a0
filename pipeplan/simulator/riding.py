"""What stages hold where a storage that several layers keep counts once: (M9).

Peaks of a plan count a tensor that rides along for every layer that keeps it: sums over layers
are what a solver can search. The terms of a replay are to be those of a run, so each stage is
walked through again here, with what is held of riding tensors at each layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from pipeplan.chain import Chain, Layer
from pipeplan.plan import LayerRanges, OpKind, Plan, Stage
from pipeplan.simulator import costs
from pipeplan.simulator.charges import result_bytes
from pipeplan.simulator.costs import StageBytes
from pipeplan.simulator.recompute import walked
from pipeplan.simulator.tape import number


@dataclass(frozen=True, slots=True)
class Once:
    """A stage of which every storage counts once, where it is known to be one."""

    size: StageBytes
    output: int
    """What F hands over beside what is held anyway."""


Held = frozenset[int]
"""Numbers of riding tensors that something keeps at least as long as what is looked at needs."""


def stages_once(plan: Plan, condensed: Plan) -> Mapping[int, Once]:
    """The stages that may hold less than a plan says, by index; none where nothing rides.

    Of stages in a row on one GPU an earlier one keeps its tensors for longer: from before the F of
    the later ones until after their B. What may leave for the host, a layer under a program and a
    stage with a split backward count as in the plan: there others may need a tensor for longer.

    Args:
        plan: a sound one; under the paper's memory model it has no such stages.
        condensed: the same with one layer in place of each run.
    """
    found: dict[int, Once] = {}
    if plan.memory_model == "paper" or not any(layer.riding for layer in plan.chain.layers):
        return found
    riders, held = _Riders.of(plan.chain), Held()
    for stage in plan.stages:
        if not stage.id or plan.stages[stage.id - 1].gpu != stage.gpu:
            held = Held()
        programs = stage.remat.programs if stage.remat else ()
        if stage.split_backward or programs:
            continue
        walk = _Walk(plan.chain, riders, frozenset(_may_leave(stage)))
        behind = walk.stage(stage, held)
        found[stage.id] = _once(condensed, stage, walk, held, behind)
        held = behind
    return found


def _once(condensed: Plan, stage: Stage, walk: _Walk, held: Held, behind: Held) -> Once:
    """The stage in the condensed plan, with the bytes of the walk."""
    home, riders = condensed.stages[stage.id], walk.riders
    layers = list(condensed.chain.layers)
    before = layers[home.first - 1].saved_output_bytes if home.first else 0
    if home.first:
        entering = layers[home.first - 1].output_bytes - riders.size(stage.first, held)
        layers[home.first - 1] = _giving(layers[home.first - 1], entering)
    own = walked(walk.chain(), stage.layers, _again(stage), held=before, light=walk.most_light)
    layers[home.first : home.last + 1] = [layer for _, layer in own]
    chain = condensed.chain.model_copy(update={"layers": tuple(layers)})
    found = costs.live_stage_bytes(condensed.model_copy(update={"chain": chain}), stage.id)
    # A rider that autograd keeps, but not to the end, is part of its layer's saved input all the
    # same: then the layer may seem to need more than the plan says, which is enough.
    most = costs.live_stage_bytes(condensed, stage.id)
    size = StageBytes(
        found.kept,
        min(most.forward, max(found.kept, found.forward)),
        min(most.backward, max(found.kept, found.backward)),
    )
    output = 0
    if stage.id + 1 < len(condensed.stages):
        last = condensed.chain.layers[home.last]
        output = last.output_bytes - last.saved_output_bytes
        output -= riders.size(stage.last + 1, behind)
        output = max(0, min(output, result_bytes(condensed, number(OpKind.F, stage.id))))
    return Once(size, output)


def _again(stage: Stage) -> LayerRanges:
    return stage.remat.recompute if stage.remat else ()


def _may_leave(stage: Stage) -> Iterator[int]:
    """Layers whose saved input may leave for the host."""
    if stage.remat and stage.remat.offload_input:
        yield stage.first
    for first, last in stage.remat.offload if stage.remat else ():
        yield from range(first + 1, last + 1)


def _giving(layer: Layer, output: int) -> Layer:
    """The layer with an output of so many bytes; its gradient stays as it is."""
    gradient = layer.gradient_of_output_bytes
    return layer.model_copy(update={"output_bytes": output, "output_gradient_bytes": gradient})


@dataclass(frozen=True, slots=True)
class _Riders:
    """The riding tensors of a chain by numbers, and by layer."""

    sizes: list[int] = field(default_factory=list)
    entering: list[Held] = field(default_factory=list)
    """In the layer's input; an empty one behind the last layer."""
    kept: list[Held] = field(default_factory=list)
    through: list[Held] = field(default_factory=list)
    """There all the time that the layer runs: kept, or passed on."""

    @classmethod
    def of(cls, chain: Chain) -> _Riders:
        """Follows them from layer to layer."""
        made, came = cls(), list[int]()
        for layer in chain.layers:
            fresh = [tensor.size_bytes for tensor in layer.riding[len(came) :]]
            numbers = [*came, *range(len(made.sizes), len(made.sizes) + len(fresh))]
            made.sizes.extend(fresh)
            pairs = list(zip(numbers, layer.riding, strict=True))
            came = [each for each, tensor in pairs if tensor.passed]
            kept = [each for each, tensor in pairs if tensor.kept]
            made.entering.append(Held(numbers))
            made.kept.append(Held(kept))
            made.through.append(Held([*kept, *came]))
        made.entering.append(Held())
        return made

    def size(self, boundary: int, among: Held) -> int:
        """Bytes of those in the input of layer `boundary` that are `among` these."""
        return self.of_all(self.entering[boundary] & among)

    def of_all(self, some: Held) -> int:
        """Their bytes."""
        return sum(self.sizes[each] for each in some)


class _Walk:
    """The layers of one stage, each without what is held at its turn."""

    def __init__(self, chain: Chain, riders: _Riders, leaving: frozenset[int]) -> None:
        """Takes the chain; `leaving`: layers whose saved input counts in itself."""
        self.riders = riders
        self._chain, self._leaving = chain, leaving
        self._held: dict[int, Held] = {}
        """By layer, and by the one behind the last: what is held as it begins for its backward."""
        self._at_run: dict[tuple[int, int], Held] = {}
        self._span = (0, 0)

    def stage(self, stage: Stage, held: Held) -> Held:
        """Goes through it; what is held behind it."""
        self._span = stage.layers
        behind = self._go(stage.layers, _again(stage), held)
        self._held[stage.last + 1] = behind
        return behind

    def _go(self, span: tuple[int, int], again: LayerRanges, held: Held) -> Held:
        """One level: layers that keep their graph, and runs that keep their input instead."""
        waiting, layer = list(again), span[0]
        while layer <= span[1]:
            if waiting and waiting[0][0] == layer:
                run = waiting.pop(0)
                within: list[tuple[int, int]] = []
                while waiting and waiting[0][0] <= run[1]:
                    within.append(waiting.pop(0))
                around = Held() if layer in self._leaving else held
                self._at_run[run] = around
                # When it is computed again it gives its input up as its layers do.
                self._go(run, tuple(within), around)
                if layer not in self._leaving:
                    held |= self.riders.entering[layer]
                layer = run[1] + 1
                continue
            self._held[layer] = held
            if layer not in self._leaving:
                held |= self.riders.kept[layer]
            layer += 1
        return held

    def chain(self) -> Chain:
        """The chain with these layers."""
        layers = list(self._chain.layers)
        first, last = self._span
        if first:
            entering = self._chain.input_of(first) - self._known(first, self._held[first])
            layers[first - 1] = _giving(layers[first - 1], entering)
        for index in range(first, last + 1):
            layers[index] = self._layer(index)
        return self._chain.model_copy(update={"layers": tuple(layers)})

    def _known(self, boundary: int, held: Held) -> int:
        return self.riders.size(boundary, held)

    def _layer(self, index: int) -> Layer:
        """One layer, without what is held already; what it needs alone less that."""
        layer, held, behind = self._chain.layers[index], self._held[index], self._held[index + 1]
        entering, giving = self._known(index, held), self._known(index + 1, behind)
        saved = 0
        if index not in self._leaving:
            saved = self.riders.of_all(self.riders.kept[index] & held)
        gone = self.riders.of_all(self.riders.through[index] & held)
        fields = {
            "saved_input_bytes": layer.saved_input_bytes - saved,
            "forward_workspace_bytes": (layer.forward_workspace_bytes + entering + giving - gone),
        }
        return _giving(layer, layer.output_bytes - giving).model_copy(update=fields)

    def most_light(self, first: int, last: int) -> int:
        """The most bytes in a run's first forward, without what is held beside the run (V3)."""
        chain, riders = self._chain, self.riders
        outside = self._at_run[first, last]
        most, own = 0, chain.input_of(first) - self._known(first, outside)
        for index in range(first, last + 1):
            layer = chain.layers[index]
            held = outside | riders.entering[first] if index > first else outside
            # Where it is measured, all of its input was there until the end.
            told = layer.forward_light_workspace_bytes is not None
            there = riders.entering[index] if told else riders.through[index]
            live = chain.input_of(index) - riders.of_all(there & held)
            live += layer.light_workspace_bytes + layer.output_bytes
            most = max(most, live + (own if index > first else 0))
        return most
