"""Measures a task where it is: the chain with the time and the bytes of every layer."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from pipeplan.capture.agreement import agreement
from pipeplan.capture.boundary_trace import call_layer
from pipeplan.capture.layer_costs import layer_bytes, optimizer_cost
from pipeplan.capture.layer_costs.allocator_overhead import AllocatorOverhead, AllocatorWatch
from pipeplan.capture.layer_costs.chain_layers import (
    LayerCost,
    SplitTimes,
    chain_layers,
    stepped_parameters,
)
from pipeplan.capture.layer_costs.device_clock import ModelDevice, device_of
from pipeplan.capture.layer_costs.layer_bytes import LayerBytes
from pipeplan.capture.layer_costs.layer_run import LayerPass, LayerRun, layer_run
from pipeplan.capture.layer_costs.layer_timer import LayerTimer, gradient_buffers
from pipeplan.capture.layer_costs.micro_batches import MicroBatches
from pipeplan.capture.layer_costs.whole_backwards import told
from pipeplan.capture.measurement.halves import compared
from pipeplan.capture.split import split
from pipeplan.capture.user_model.loss_state import restored_loss
from pipeplan.capture.user_model.module_attributes import restored
from pipeplan.chain import Chain, Layer
from pipeplan.compiling import compiled
from pipeplan.gradients import sum_of
from pipeplan.layout import kept
from pipeplan.livebytes import LiveBytes
from pipeplan.repeat import check_data
from pipeplan.split_model import SplitModel
from pipeplan.task import Task
from pipeplan.units import counted

Progress = Callable[[str], None]

ROUND = 5
"""Consecutive micro-batches whose medians are taken together."""
SOURCE = f"measured with torch {torch.__version__}"
NOISY = 0.25
"""Share by which rounds may usually be slower than the quietest before it is said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerMeasurements:
    """All that was measured of a split model."""

    costs: list[LayerCost]
    layers: tuple[Layer, ...]
    """The same as layers of a chain."""
    input_bytes: int
    device: dict[str, str | int | float | bool | None]


def profile_task(
    task: Task,
    *,
    repeats: int = 20,
    warmup: int = 3,
    max_layers: int | None = None,
    progress: Progress | None = None,
) -> Chain:
    """The measured chain of `task`, without a reference to find it again.

    The model is left as it was: values, buffers, random state; gradients are removed.
    Layers are merged where there are more than `max_layers`.

    Raises:
        InputError: if the task cannot be split or run, its data do not repeat, or its layers do
            not train as it does.
    """
    say = progress or _silent
    place = device_of(task.model)
    check_data(task)
    task = place.bring(task)
    model = split(task, max_layers)
    say(f"split into {counted(len(model.layers), 'layer')}")
    for note in model.notes:
        say(note)
    running = ready(model, say)
    say("comparing the layers with the model")
    how = agreement(running, task)
    say(how.told)
    found = measure_layers(
        running, task, repeats=repeats, warmup=warmup, say=say, bits=how.is_exact
    )
    return Chain(
        name=type(task.model).__name__,
        source=SOURCE,
        task_digest=model.digest(),
        mode="measured",
        microbatch_size=model.microbatch_size,
        input_bytes=found.input_bytes,
        device=found.device,
        tied=model.tied(task.tied),
        agreement=how,
        layers=found.layers,
    )


def ready(model: SplitModel, say: Progress) -> SplitModel:
    """`model` with the layers that a run has; compiled ones are compiled when they are called."""
    if model.compile is None:
        return model
    count, done = len(model.layers) - len(model.eager), iter(range(1, len(model.layers) + 1))
    layers = counted(count, "layer")
    say(f"compiling {layers} with {model.compile}, each alone; the first time takes long")
    return compiled(model, lambda name: say(f"compiling layer {next(done)} of {count}: {name}"))


def measure_layers(
    model: SplitModel,
    task: Task,
    *,
    repeats: int,
    warmup: int,
    say: Progress,
    bits: bool = False,
) -> LayerMeasurements:
    """Times and bytes of each layer of `model`, which is what `task` was split into.

    Args:
        model: its layers.
        task: data, loss, optimizer.
        repeats: micro-batches that are timed.
        warmup: those before them.
        say: told what happens.
        bits: whether a layer whose backward in two halves has other bits stays whole.

    Raises:
        InputError: if its data, layers, loss or optimizer fail.
    """
    place = device_of(model.layers)
    batches = MicroBatches(task)
    sweep = LayerTimer(model, batches, task.loss, place)
    with (
        torch.random.fork_rng(devices=place.random_devices),
        restored(model.layers),
        restored_loss(task.loss),
        gradient_buffers(model.layers, task.accumulate),
    ):
        if model.compile:
            sweep.run(0)  # what is compiled here is no time of a layer, whatever `warmup` is
        found, noise = layer_times(sweep.run, repeats, warmup, say)
        sweep.clear()
        if noise > NOISY:
            say(f"the machine is busy: times are usually {noise:.0%} above the quietest round's")
        say("measuring optimizer steps")
        steps = _steps(model, task, repeats, place)
        say("measuring bytes")
        sizes, overhead = _sizes(model, task, batches, place)
        if bits:
            say("comparing backwards in two halves with whole ones")
            sizes = compared(model, task, batches, sizes)
        for line in told(model.names, [size.whole for size in sizes]):
            say(line)
        halves = _split_times(sweep, found, sizes, repeats, say)
        costs = [
            LayerCost(
                forward_ns=f, backward_ns=b, forward_light_ns=light, split=split, size=s, step=o
            )
            for f, b, light, split, s, o in zip(*found, halves, sizes, steps, strict=True)
        ]
        layers = chain_layers(model, costs, task)
    return LayerMeasurements(
        costs=costs,
        layers=layers,
        input_bytes=sum(each.nbytes for each in model.entry(batches.fetch(0).inputs)),
        device={
            **place.facts(),
            "repeats": repeats,
            "noise": round(noise, 3),
            **({"compile": model.compile} if model.compile else {}),
            **_told(overhead, say),
        },
    )


def _steps(
    model: SplitModel, task: Task, repeats: int, place: ModelDevice
) -> list[optimizer_cost.OptimizerCost]:
    """What an update of each layer costs."""
    timer = optimizer_cost.median_timer(repeats, place)
    return [
        optimizer_cost.total_cost(optimizer_cost.step_cost(task, one, timer) for one in each)
        for each in stepped_parameters(model, task)
    ]


def _split_times(
    sweep: LayerTimer,
    whole: Sequence[Sequence[int]],
    sizes: Sequence[LayerBytes],
    repeats: int,
    say: Progress,
) -> list[SplitTimes]:
    """Times of each layer as part of a stage whose backward comes in two halves.

    They are no less than those of `whole` (forward, backward, ..):
    what noise says against that counts for the first half.
    """
    splits = [size.split is not None for size in sizes]
    if not any(splits):
        return [SplitTimes()] * len(sizes)
    say("timing backwards in two halves")
    found, _ = layer_times(lambda number: sweep.run_split(number, splits), repeats, 1, say)
    sweep.clear()
    rows = zip(sizes, whole[0], whole[1], *found, strict=True)
    return [_split_time(*row) if row[0].split else SplitTimes() for row in rows]


def _split_time(
    size: LayerBytes, forward: int, backward: int, before: int, first: int, second: int
) -> SplitTimes:
    weight = second if size.split and size.split.saved else 0
    inputs = max(first + second, backward) - weight
    return SplitTimes(forward_ns=max(before, forward), input_ns=inputs, weight_ns=weight)


def layer_times(
    sweep: Callable[[int], tuple[list[int], ...]],
    repeats: int,
    warmup: int,
    say: Progress,
) -> tuple[tuple[list[int], ...], float]:
    """Nanoseconds of each layer, one list per kind of work, and how much slower than need be.

    They are the medians of all micro-batches, as a run has them. What else the machine does for a
    while lengthens few of them; by how much the usual round of `ROUND` consecutive micro-batches
    is longer than the quietest says whether it did so for longer.
    """
    sweeps = []
    for number in range(warmup + repeats):
        found = sweep(number)
        if number >= warmup:
            sweeps.append(found)
        done = number + 1 - warmup
        if done > 0 and (done % 10 == 0 or done == repeats):
            say(f"timed {done} of {counted(repeats, 'micro-batch')}")
    starts = range(0, max(1, repeats - ROUND + 1), ROUND)
    rounds = [_medians(sweeps[start : start + ROUND]) for start in starts]
    totals = [sum(map(sum, kinds)) for kinds in rounds]
    return _medians(sweeps), statistics.median(totals) / max(1, min(totals)) - 1


def _medians(sweeps: Sequence[tuple[list[int], ...]]) -> tuple[list[int], ...]:
    """Layer by layer, of each kind of work."""
    return tuple(
        [round(statistics.median(row)) for row in zip(*rows, strict=True)]
        for rows in zip(*sweeps, strict=True)
    )


def _sizes(
    model: SplitModel, task: Task, batches: MicroBatches, place: ModelDevice
) -> tuple[list[LayerBytes], AllocatorOverhead | None]:
    """The bytes of each layer, fed with what the layers before it really compute."""
    batch = batches.fetch(0)
    values = model.entry(batch.inputs)
    sizes: list[LayerBytes] = []
    overhead = AllocatorOverhead() if place.is_cuda and not model.compile else None
    for index in range(len(model.layers)):
        run = layer_run(model, index, values, batch, task.loss)
        held = layer_bytes.held_by(sizes[-1] if sizes else None, run)
        sizes.append(layer_bytes.measure_bytes(run, held))
        if overhead is not None:
            overhead = overhead.worst(_beyond_tensors(run, AllocatorWatch.of(place.device)))
        with torch.no_grad():
            given = tuple(value.clone() for value in (*values, *run.fed))
            outputs = call_layer(run.name, run.layer, given, run.autocast)
            values = tuple(map(kept, outputs))
    return sizes, overhead


def _beyond_tensors(run: LayerRun, watch: AllocatorWatch) -> AllocatorOverhead:
    """What the allocator takes for one pass of a layer beyond the bytes that LiveBytes counts."""
    states = [*run.layer.parameters(), *run.layer.buffers()]
    sums = (total for state in states if (total := sum_of(state)) is not None)
    live = LiveBytes([*states, *sums])
    before = live.live
    with watch, live:
        one = LayerPass(run)
        one.forward()
        one.receive_gradients()
        one.backward()
    return watch.overhead(live.peak - before)


def _told(overhead: AllocatorOverhead | None, say: Progress) -> dict[str, int]:
    if overhead is None:
        return {}
    say(
        f"beyond tensors, one layer takes up to {overhead.rounding} bytes of rounding and"
        f" {overhead.scratch} bytes of scratch; leave room for them"
    )
    return {
        "allocator_rounding_bytes": overhead.rounding,
        "kernel_scratch_bytes": overhead.scratch,
    }


def _silent(_: str) -> None:
    pass
