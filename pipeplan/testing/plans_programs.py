"""Random options of layers, and stages that run some of them."""

from __future__ import annotations

from random import Random

from pipeplan.chain import Chain, Layer, LayerOption, OperatorProgram
from pipeplan.plan import Remat, Stage


def with_options(rng: Random, chain: Chain, most: int = 2) -> Chain:
    """`chain` with up to `most` options for some of its layers, one program for each."""
    layers: list[Layer] = []
    programs: list[OperatorProgram] = []
    for index, layer in enumerate(chain.layers):
        count = rng.randint(0, most)
        numbers = range(len(programs), len(programs) + count)
        size = chain.input_of(index)
        options = tuple(_option(rng, layer, size, number) for number in numbers)
        programs += [OperatorProgram(graph_digest=f"{n}", text=f"{n}") for n in numbers]
        layers.append(layer.model_copy(update={"options": options}))
    update = {"layers": tuple(layers), "programs": tuple(programs)}
    return Chain.model_validate(chain.model_copy(update=update).model_dump())


def _option(rng: Random, layer: Layer, size: int, program: int) -> LayerOption:
    """Longer than the layer; it keeps anything."""
    kept, out = rng.randint(0, size), rng.randint(0, layer.output_bytes)
    return LayerOption(
        program=program,
        forward_ns=layer.forward_ns + rng.randint(0, 1),
        backward_ns=layer.backward_ns + rng.randint(0, 4),
        saved_input_bytes=kept,
        saved_bytes=rng.randint(0, 4),
        saved_output_bytes=out,
        saved_passing_bytes=min(kept, layer.output_bytes - out) if kept % 2 else 0,
        forward_workspace_bytes=rng.randint(0, 4),
        backward_workspace_bytes=rng.randint(0, 4),
    )


def running(rng: Random, chain: Chain, stage: Stage) -> Stage:
    """The stage with random options of the layers that it does not compute again."""
    again = stage.remat.recompute if stage.remat else ()
    inside = {layer for first, last in again for layer in range(first, last + 1)}
    programs = tuple(
        (layer, rng.randrange(len(options)))
        for layer in range(stage.first, stage.last + 1)
        if layer not in inside and (options := chain.layers[layer].options) and rng.random() < 0.6
    )
    if not programs:
        return stage
    remat = Remat(recompute=again, programs=programs)
    return stage.model_copy(update={"remat": remat})
