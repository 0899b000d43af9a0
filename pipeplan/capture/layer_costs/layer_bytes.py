"""What one layer holds: saved by autograd in three parts, and the working bytes beyond them.

The layer runs alone, as a stage of its own runs in the runtime, so what lives is what a rank will
hold, and the workspaces are what the formula (M3) of docs/reference/model.md does not explain
already.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from pipeplan.capture.layer_costs.allocator_record import RecordedBytes, recorded
from pipeplan.capture.layer_costs.layer_run import LayerPass, LayerRun
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
    carried: Carried = Carried()
    """Nothing where the allocator tells what lives: it does not know whose storage it is."""
    split: SplitBytes | None = None
    """None where it is not known: the layer's backward is never split, or cannot be."""
    whole: str | None = None
    """Why its backward cannot be split; None where it can, or never is."""

    @property
    def kept(self) -> int:
        """What lives between forward and backward."""
        return self.saved_input + self.saved + self.saved_output


def measure_bytes(run: LayerRun) -> LayerBytes:
    """Runs forward and backward of one layer and counts what lives.

    Saved: the storages that are alive between forward and backward. Those of the input count as
    saved input (also where the output shares them), those of the output as saved output, all
    others (the target among them) as saved; parameters, buffers and gradient buffers not at all.
    Working bytes are the measured peak minus what (M3) counts for a stage of this layer alone;
    below zero where (M3) counts a storage twice, as that of a tensor that rides along:

        forward_workspace  = peak(F) - (input + saved + output)
        backward_workspace = peak(B) - (saved, all parts + gradients of output and input)

    The parameters need gradient buffers already: adding to them is part of the backward.
    Where layers are compiled the allocator tells what lives (`recorded`), else the operations do.
    """
    if run.compiled:
        with recorded(_device(run)) as taken:
            _run(run, taken)
            return replace(_both(run, taken), carried=Carried())
    states = [*run.layer.parameters(), *run.layer.buffers()]
    sums = (total for state in states if (total := sum_of(state)) is not None)
    live = LiveBytes([*states, *sums])
    with live:
        # The first run shows what a layer makes once and keeps (tables, caches): no cost of a
        # micro-batch, so only the second one counts.
        _run(run, live)
        size = _both(run, live)
        return replace(size, carried=_until_the_end(run, live, size))


def _until_the_end(run: LayerRun, live: LiveBytes, size: LayerBytes) -> Carried:
    """What is carried, without the kept inputs that are gone when the layer needs most.

    Where another layer keeps such an input as well, the layer needs more than it does alone.
    """
    carried = size.carried
    may_ride = len(carried.sizes) > 1 or any(place is not None for place in carried.passed)
    kept = [may_ride and each for each in carried.kept]
    for place in (place for place, each in enumerate(kept) if each):
        base = live.live
        one = LayerPass(run, held=(place,))
        live.reset_peak()
        one.forward()
        forward = live.peak - base
        one.receive_gradients()
        live.reset_peak()
        one.backward()
        kept[place] = (forward, live.peak - base) == (size.forward_peak, size.backward_peak)
        del one
    return replace(carried, kept=tuple(kept))


def _both(run: LayerRun, live: LiveBytes | RecordedBytes) -> LayerBytes:
    """With the bytes of a backward in two halves."""
    if not run.splits:
        return _run(run, live)
    with accumulations(run.layer) as once:
        size = _run(run, live)
    if not run.trains:
        return replace(size, split=SplitBytes(input_workspace=size.backward_workspace))
    try:
        with accumulations(run.layer) as halves:
            split = _run_split(run, live)
    except (InputError, RuntimeError) as error:
        return replace(size, whole=failed(error))
    twice = more_sums(halves, once)
    return replace(size, whole=TWO_SUMS) if twice else replace(size, split=split)


def _run_split(run: LayerRun, live: LiveBytes | RecordedBytes) -> SplitBytes:
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
    return SplitBytes(
        saved=saved,
        saved_input=saved_input,
        input_workspace=peak - (kept + incoming + outgoing),
        weight_workspace=live.peak - base - saved,
    )


def _device(run: LayerRun) -> torch.device:
    first: torch.device = (*run.inputs, *run.fed)[0].device
    return first


def _run(run: LayerRun, live: LiveBytes | RecordedBytes) -> LayerBytes:
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
    kept_inputs = one.kept()
    incoming = one.receive_gradients()
    live.reset_peak()
    one.backward()
    backward_peak = live.peak - base
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
    )
