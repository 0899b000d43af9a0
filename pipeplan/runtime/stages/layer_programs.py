"""Layers that run a device program over their operators: captured again where they run.

The chain's program belongs to a graph that `profile` captured; a rank captures its layers anew,
before the run, and refuses a program of another graph. Nothing is computed meanwhile, and what the
capture needs is gone when it ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor, nn

from pipeplan.chain import Chain, OperatorProgram
from pipeplan.device_program import DeviceProgram
from pipeplan.errors import InputError
from pipeplan.plan import Stage
from pipeplan.runtime.stages.stage import StageSpec
from pipeplan.runtime.transport.endpoints import empty

if TYPE_CHECKING:
    from pipeplan.operators import Captured

_NEXT = "Profile with --options where it is to run, and plan again."


def programs_of(planned: Stage, chain: Chain) -> dict[int, OperatorProgram]:
    """Index of a layer in the stage -> the program that the plan lets it run.

    Raises:
        InputError: if a layer has no such option.
    """
    found = {}
    for layer, option in planned.remat.programs if planned.remat else ():
        options = chain.layers[layer].options
        if option >= len(options):
            raise InputError(
                f"plan: stage {planned.id}: layer {chain.layers[layer].name!r}: got option"
                f" {option}, need one of its {len(options)} options. Verify and plan again."
            )
        found[layer - planned.first] = chain.programs[options[option].program]
    return found


def with_programs(
    spec: StageSpec, chain: Chain, programs: Mapping[int, OperatorProgram]
) -> StageSpec:
    """`spec` with layers that run `programs`, by their index in the stage.

    Raises:
        InputError: if a layer cannot be captured here, its graph is another one than the
            program's, or the program breaks a rule.
    """
    layers = list(spec.layers)
    for index, program in programs.items():
        where = f"stage {spec.index}, layer {chain.layers[spec.first_layer + index].name!r}"
        if spec.split_backward:
            raise InputError(
                f"{where}: got a program and a split backward, need a whole one. Plan again."
            )
        layers[index] = _running(spec, index, program, where)
    return replace(spec, layers=tuple(layers))


def _running(spec: StageSpec, index: int, program: OperatorProgram, where: str) -> nn.Module:
    from pipeplan.operators import by_operators  # with torch's tracers, which few runs need

    captured = _captured(spec, index, where)
    found = captured.graph.structure_digest()
    if found != program.graph_digest:
        raise InputError(
            f"{where}: got a graph of operators with digest {found[:12]}, need"
            f" {program.graph_digest[:12]}, that of the plan's program: torch, device or model are"
            f" others than when the task was profiled. {_NEXT}"
        )
    parsed = DeviceProgram.from_text(program.text, f"{where}, program")
    try:
        return by_operators(spec.layers[index], captured, parsed)
    except InputError as error:
        error.args = (f"{where}: {error}", *error.args[1:])
        raise


def _captured(spec: StageSpec, index: int, where: str) -> Captured:
    from pipeplan.operators import UncapturableError, capture_layer

    enters = spec.index > 0 or index > 0
    values: list[Tensor] = [
        empty(each, spec.device).requires_grad_(each.differentiable and enters)
        for each in spec.boundaries[index]
    ]
    fed = spec.fed[index].specs if index in spec.fed else ()
    values += [empty(each, spec.device) for each in fed]
    try:
        return capture_layer(spec.layers[index], values, spec.autocast)
    except UncapturableError as error:
        raise InputError(
            f"{where}: got no graph of operators, need one for the plan's program:"
            f" {error.reason}. {_NEXT}"
        ) from error
