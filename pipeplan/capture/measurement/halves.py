"""Each layer's backward in two halves beside its whole one: gradients and buffers, bit for bit.

Two micro-batches, each with a seed of its own, are under way at once, as in a stage that is split:
their first halves run, then their second ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pipeplan.capture.boundary_trace import call_layer
from pipeplan.capture.eager_modules.eager_operation import seed_like_torch
from pipeplan.capture.layer_costs.layer_bytes import LayerBytes
from pipeplan.capture.layer_costs.layer_run import LayerPass, LayerRun, layer_run
from pipeplan.capture.layer_costs.micro_batches import MicroBatches
from pipeplan.capture.layer_costs.whole_backwards import OTHER_BITS, failed
from pipeplan.capture.tensor_distance import densified
from pipeplan.capture.user_model.module_attributes import restored
from pipeplan.errors import InputError
from pipeplan.gradients import sum_of
from pipeplan.layout import kept
from pipeplan.nested import MicroBatch
from pipeplan.repeat import kept_generators, seed_all
from pipeplan.split_model import SplitModel
from pipeplan.task import Task


def compared(
    model: SplitModel, task: Task, batches: MicroBatches, sizes: Sequence[LayerBytes]
) -> list[LayerBytes]:
    """`sizes`, where layers whose halves give other bits than one backward say so.

    The parameters need gradient buffers already, which hold anything afterwards.

    Args:
        model: its layers are left as they were.
        task: gives the loss.
        batches: the first two are taken; one, if there is no second.
        sizes: of each layer; where nothing waits for the second half, nothing is compared.
    """
    waits = [size.split is not None and size.split.saved > 0 for size in sizes]
    found = list(sizes)
    taken = _first_two(batches)
    boundaries = [model.entry(batch.inputs) for batch in taken]
    with kept_generators(), restored(model.layers):
        for index in range(len(sizes) if any(waits) else 0):
            runs = [
                layer_run(model, index, values, batch, task.loss)
                for values, batch in zip(boundaries, taken, strict=True)
            ]
            if waits[index] and (why := _why_whole(runs)):
                found[index] = replace(found[index], split=None, whole=why)
            boundaries = [_after(run) for run in runs]
    return found


def _first_two(batches: MicroBatches) -> list[MicroBatch]:
    first = batches.fetch(0)
    try:
        return [first, batches.fetch(1)]
    except InputError:
        return [first, first]


def _after(run: LayerRun) -> tuple[Tensor, ...]:
    with torch.no_grad():
        given = tuple(value.clone() for value in (*run.inputs, *run.fed))
        outputs = call_layer(run.name, run.layer, given, run.autocast)
        return tuple(map(kept, outputs))


def _why_whole(runs: Sequence[LayerRun]) -> str | None:
    """Why the layer's backward stays whole; None if its halves give the same bits."""
    try:
        expected = _trained(runs, split=False)
        got = _trained(runs, split=True)
    except (InputError, RuntimeError) as error:
        return failed(error)
    same = len(expected) == len(got) and all(map(_same, expected, got))
    return None if same else OTHER_BITS


def _trained(runs: Sequence[LayerRun], *, split: bool) -> list[Tensor | None]:
    """Gradients of the inputs of all `runs` and of the weights, then the buffers."""
    layer = runs[0].layer
    parameters = [each for each in layer.parameters() if each.requires_grad]
    with restored([layer]):
        for parameter in parameters:
            if (total := sum_of(parameter)) is not None:
                total.zero_()
        passes = [LayerPass(run, split=split) for run in runs]
        for seed, one in enumerate(passes):
            _seed(seed)
            one.forward()
        arrived: list[Tensor] = []
        for seed, one in enumerate(passes):
            _seed(seed)
            one.receive_gradients(one.drawn_gradients())
            arrived += one.backward()
        for one in passes:
            one.weights()
        sums = [sum_of(parameter) for parameter in parameters]
        kept = [None if total is None else total.clone() for total in sums]
        return [*arrived, *kept, *(buffer.clone() for buffer in layer.buffers())]


def _seed(number: int) -> None:
    seed_all(number)
    seed_like_torch()


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    """To the bit; what is no number is like any other."""
    if one is None or other is None:
        return one is other
    one, other = densified(one), densified(other)
    if torch.equal(one, other):
        return True
    floats = one.is_floating_point() and one.shape == other.shape
    return floats and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
