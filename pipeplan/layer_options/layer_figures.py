"""What a layer takes while it runs a program: bytes measured as those of layers are."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil

import torch

from pipeplan.capture.layer_costs.layer_bytes import LayerBytes, measure_bytes
from pipeplan.capture.layer_costs.layer_run import LayerRun
from pipeplan.capture.layer_costs.layer_timer import gradient_buffers
from pipeplan.chain import Layer, LayerOption
from pipeplan.layer_options.programs import GraphOptions
from pipeplan.operators import Captured, by_operators
from pipeplan.remat.graph import Option
from pipeplan.remat.programs import ProgramOutcome


@dataclass(frozen=True)
class FoundProgram:
    """One program of a layer."""

    option: Option
    size: LayerBytes


def with_bytes(
    run: LayerRun, captured: Captured, options: GraphOptions, accumulate: torch.dtype | None
) -> list[FoundProgram]:
    """Runs the layer by each program, as a stage of its own runs in the runtime.

    Args:
        run: the layer with the data to run it on.
        captured: of it.
        options: programs of its graph.
        accumulate: as `Task.accumulate`.
    """
    found = []
    with gradient_buffers([run.layer], accumulate):
        for each in options.found:
            module = by_operators(run.layer, captured, each.program)
            size = measure_bytes(replace(run, layer=module, splits=False))
            found.append(FoundProgram(each, size))
    return found


def layer_option(
    layer: Layer, found: FoundProgram, usual: ProgramOutcome, program: int
) -> LayerOption:
    """The option of `layer`: its own times and those of what runs again.

    These are scaled, so that what runs once takes the layer's own time in all.

    Args:
        layer: of the chain.
        found: the program.
        usual: what the graph takes where everything is kept.
        program: index among the chain's.
    """
    scale = Fraction(layer.forward_ns + layer.backward_ns, max(1, usual.compute_ns))
    outcome, size = found.option.outcome, found.size

    def further(now: int, before: int) -> int:
        return max(0, ceil((now - before) * scale))

    return LayerOption(
        program=program,
        forward_ns=layer.forward_ns + further(outcome.forward_ns, usual.forward_ns),
        backward_ns=layer.backward_ns + further(outcome.backward_ns, usual.backward_ns),
        saved_input_bytes=size.saved_input,
        saved_bytes=size.saved,
        saved_output_bytes=size.saved_output,
        saved_passing_bytes=size.saved_passing,
        forward_workspace_bytes=size.forward_workspace,
        backward_workspace_bytes=size.backward_workspace,
    )
