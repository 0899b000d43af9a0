"""What one layer holds: saved by autograd in three parts, and the working bytes beyond them.

The layer runs alone, as a stage of its own runs in the runtime, so what lives is what a rank will
hold, and the workspaces are what the formula (M3) of docs/reference/model.md does not explain
already.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch

from pipeplan.capture.layer_costs.allocator_record import RecordedBytes, recorded
from pipeplan.capture.layer_costs.layer_run import FusedLayers, LayerPass, LayerRun
from pipeplan.capture.layer_costs.whole_backwards import (
    TWO_SUMS,
    accumulations,
    failed,
    more_sums,
)
from pipeplan.errors import InputError
from pipeplan.gradients import sum_of
from pipeplan.livebytes import LiveBytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitBytes:
    """What a backward in two halves holds, named as in (S3) to (S5) of docs/reference/model.md."""

    saved: int = 0
    """Between the halves, for weights."""
    saved_input: int = 0
    """The part of it that is the layer's input."""
    input_workspace: int = 0
    weight_workspace: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """What a layer does with each tensor of its input, and which of them its outputs are."""

    sizes: tuple[int, ...] = ()
    kept: tuple[bool, ...] = ()
    """Whether autograd keeps it, and still does when the layer needs most."""
    passed: tuple[int | None, ...] = ()
    """By output: the place of the input that it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBytes:
    """Bytes of one layer and one micro-batch, named as in `pipeplan.chain.Layer`; its peaks."""

    output: int
    output_gradient: int
    saved_input: int
    saved: int
    saved_output: int
    saved_passing: int
    forward_workspace: int
    backward_workspace: int
    forward_peak: int
    """Most that lived during the forward, beyond the states."""
    backward_peak: int
    light_workspace: int = 0
    """Of a forward without autograd."""
    carried: Carried = Carried()
    """Nothing where the allocator tells what lives: it does not know whose storage it is."""
    kept_inputs: tuple[bool, ...] = ()
    """By tensor of the input: whether autograd keeps it from forward to backward."""
    kept_outputs: tuple[bool, ...] = ()
    """By output: whether autograd keeps it for this layer, and it is no input."""
    split: SplitBytes | None = None
    """None where it is not known: the layer's backward is never split, or cannot be."""
    whole: str | None = None
    """Why its backward cannot be split; None where it can, or never is."""

    @property
    def kept(self) -> int:
        """What lives between forward and backward."""
        return self.saved_input + self.saved + self.saved_output


def measure_bytes(run: LayerRun, held: Collection[int] = ()) -> LayerBytes:
    """Runs forward and backward of one layer and counts what lives.

    Saved: the storages that are alive between forward and backward. Those of the input count as
    saved input (also where the output shares them), those of the output as saved output, all
    others (the target among them) as saved; parameters, buffers and gradient buffers not at all.
    Working bytes are the measured peak minus what (M3) counts for a stage of this layer alone;
    below zero where (M3) counts a storage twice, as that of a tensor that rides along:

        forward_workspace  = peak(F) - (input + saved + output)
        backward_workspace = peak(B) - (saved, all parts + gradients of output and input)
        light_workspace    = peak(F without autograd) - (input + output)

    The parameters need gradient buffers already: adding to them is part of the backward.
    Where layers are compiled the allocator tells what lives (`recorded`), else the operations do.

    Args:
        run: the layer, and what it is run on.
        held: places of inputs that the layer before keeps for its own backward. In a stage of
            both they live on when this layer has released them: peaks are with them.
    """
    if run.compiled:
        with recorded(_device(run)) as taken:
            _run(run, taken)
            size = _both(run, taken, held)
            light = _light_workspace(run, taken)
            return replace(
                size, light_workspace=light, carried=Carried(), kept_inputs=(), kept_outputs=()
            )
    states = [*run.layer.parameters(), *run.layer.buffers()]
    sums = (total for state in states if (total := sum_of(state)) is not None)
    live = LiveBytes([*states, *sums])
    with live:
        # The first run shows what a layer makes once and keeps (tables, caches): no cost of a
        # micro-batch, so only the second one counts.
        _run(run, live)
        size = _both(run, live, held)
        light = _light_workspace(run, live)
        carried = _until_the_end(run, live, size, held)
        return replace(size, light_workspace=light, carried=carried)


def _light_workspace(run: LayerRun, live: LiveBytes | RecordedBytes) -> int:
    """Of a forward that keeps nothing, whose caller keeps the input to run it again."""
    base = live.live
    one = LayerPass(run, held=range(len(run.inputs)))
    live.reset_peak()
    with torch.no_grad():
        one.forward()
    inputs = sum(value.nbytes for value in run.inputs)
    return live.peak - base - inputs - one.output_bytes


def _until_the_end(
    run: LayerRun, live: LiveBytes, size: LayerBytes, held: Collection[int]
) -> Carried:
    """What is carried, without the kept inputs that are gone when the layer needs most.

    Where another layer keeps such an input as well, the layer needs more than it does alone.
    """
    carried = size.carried
    may_ride = len(carried.sizes) > 1 or any(place is not None for place in carried.passed)
    kept = [may_ride and each for each in carried.kept]
    for place in (place for place, each in enumerate(kept) if each):
        peaks = _held_peaks(run, live, {place, *held}, size.kept_inputs)
        kept[place] = peaks == (size.forward_peak, size.backward_peak)
    return replace(carried, kept=tuple(kept))


def _held_peaks(
    run: LayerRun,
    live: LiveBytes | RecordedBytes,
    held: Collection[int],
    kept: Sequence[bool],
    *,
    split: bool = False,
) -> tuple[int, int]:
    """Peaks of forward and (first half of the) backward while others hold inputs.

    Args:
        run: the layer.
        live: counts what lives.
        held: places of these inputs.
        kept: by input, whether the layer keeps it itself; others do not count in the backward.
        split: whether gradients of weights wait.
    """
    base = live.live
    one = LayerPass(run, split=split, held=held)
    live.reset_peak()
    one.forward()
    forward = live.peak - base
    one.receive_gradients()
    live.reset_peak()
    one.backward()
    backward = live.peak - base
    one.weights()
    return forward, backward - sum(run.inputs[place].nbytes for place in held if not kept[place])


def _both(run: LayerRun, live: LiveBytes | RecordedBytes, held: Collection[int]) -> LayerBytes:
    """With the bytes of a backward in two halves."""
    if not run.splits:
        return _run(run, live, held)
    with accumulations(run.layer) as once:
        size = _run(run, live, held)
    if not run.trains:
        return replace(size, split=SplitBytes(input_workspace=size.backward_workspace))
    try:
        with accumulations(run.layer) as halves:
            split = _run_split(run, live, held, size)
    except (InputError, RuntimeError) as error:
        return replace(size, whole=failed(error))
    twice = more_sums(halves, once)
    return replace(size, whole=TWO_SUMS) if twice else replace(size, split=split)


def _run_split(
    run: LayerRun, live: LiveBytes | RecordedBytes, held: Collection[int], whole: LayerBytes
) -> SplitBytes:
    """Between the halves live what weights need and the gradients that are handed on."""
    base = live.live
    one = LayerPass(run, split=True)
    one.forward()
    kept = live.live - base
    incoming = one.receive_gradients()
    live.reset_peak()
    gradients = one.backward()
    peak = live.peak - base
    outgoing = sum(gradient.nbytes for gradient in gradients)
    del gradients
    saved_input = one.inputs.alive()
    saved = max(saved_input, live.live - base)
    live.reset_peak()
    one.weights()
    weights_peak = live.peak - base
    if held:
        peak = max(peak, _held_peaks(run, live, held, whole.kept_inputs, split=True)[1])
    return SplitBytes(
        saved=saved,
        saved_input=saved_input,
        input_workspace=peak - (kept + incoming + outgoing),
        weight_workspace=weights_peak - saved,
    )


def _device(run: LayerRun) -> torch.device:
    first: torch.device = (*run.inputs, *run.fed)[0].device
    return first


def _run(run: LayerRun, live: LiveBytes | RecordedBytes, held: Collection[int] = ()) -> LayerBytes:
    base = live.live
    one = LayerPass(run)
    live.reset_peak()
    one.forward()
    forward_peak, kept = live.peak - base, live.live - base
    saved_input = one.inputs.alive()
    saved_output = min(one.outputs.alive(), one.output_bytes)
    # An output that stays with the layer takes the place of the one before: nothing more lives.
    saved = max(0, kept - saved_input - saved_output)
    saved_passing = min(one.passing(), saved_input, one.output_bytes - saved_output)
    kept_inputs, kept_outputs = one.kept(), one.kept_outputs()
    incoming = one.receive_gradients()
    live.reset_peak()
    one.backward()
    backward_peak = live.peak - base
    if held:
        peaks = _held_peaks(run, live, held, kept_inputs)
        forward_peak, backward_peak = max(forward_peak, peaks[0]), max(backward_peak, peaks[1])
    inputs = [value.nbytes for value in run.inputs]
    outgoing = sum(size for size, flag in zip(inputs, run.differentiable, strict=True) if flag)
    return LayerBytes(
        output=one.output_bytes,
        output_gradient=incoming,
        saved_input=saved_input,
        saved=saved,
        saved_output=saved_output,
        saved_passing=saved_passing,
        forward_workspace=forward_peak - (sum(inputs) + saved + one.output_bytes),
        backward_workspace=backward_peak - (kept + incoming + outgoing),
        forward_peak=forward_peak,
        backward_peak=backward_peak,
        carried=Carried(sizes=tuple(inputs), kept=kept_inputs, passed=one.passed),
        kept_inputs=kept_inputs,
        kept_outputs=kept_outputs,
    )


def held_by(before: LayerBytes | None, run: LayerRun) -> tuple[int, ...]:
    """Places of the inputs of `run` that the layer before keeps; none if that is another stage."""
    if before is None or isinstance(run.layer, FusedLayers):
        return ()
    return tuple(place for place, flag in enumerate(before.kept_outputs) if flag)
