"""Layer by layer: its graph, its programs, its options; equal graphs are solved once.

Where layers are known to be alike before their graphs are captured, only the first one is.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from pipeplan.capture.estimation.layer_signature import LayerSignature
from pipeplan.capture.layer_costs.layer_run import LayerRun
from pipeplan.capture.layer_costs.whole_backwards import by_reason
from pipeplan.chain import Chain, Layer, LayerOption, OperatorProgram
from pipeplan.layer_options.layer_figures import FoundProgram, layer_option, with_bytes
from pipeplan.layer_options.programs import graph_options
from pipeplan.layer_options.worthwhile import worthwhile
from pipeplan.operators import Captured, UncapturableError, capture_layer
from pipeplan.remat.programs import ProgramOutcome
from pipeplan.split_model import SplitModel

NOTE = "without_options"
"""What a chain's facts of its device call the layers that no graph can hold, and why."""
_Key = tuple[str, int, bool]
"""Digest of a graph, inputs that are no fed ones, whether the loss comes behind it."""


@dataclass(frozen=True)
class _GraphPrograms:
    """What was found for one graph."""

    usual: ProgramOutcome
    programs: list[FoundProgram]


class LayerSearch:
    """Options of the layers of one chain."""

    def __init__(
        self,
        chain: Chain,
        model: SplitModel,
        accumulate: torch.dtype | None,
        timed: Callable[[LayerRun, Captured], Captured],
        check: Callable[[LayerRun, Captured], None],
        seconds: float,
        say: Callable[[str], None],
        around: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """Nothing is done yet.

        Args:
            chain: the layers' own times and bytes.
            model: the layers.
            accumulate: as `Task.accumulate`.
            timed: gives a graph its times.
            check: raises `UncapturableError` where a graph does not give the layer's bits.
            seconds: for the search of programs, in all.
            say: told what happens.
            around: entered while layers run to measure their bytes.
        """
        self._chain, self._model, self._accumulate = chain, model, accumulate
        self._timed, self._check, self._say, self._around = timed, check, say, around
        self._seconds = seconds
        self._known: dict[_Key, _GraphPrograms] = {}
        self._alike: dict[LayerSignature, _Key | str] = {}
        """Of a layer that was captured: its graph, or why there are no options."""
        self._programs: dict[OperatorProgram, int] = {}
        self._options: dict[int, list[LayerOption]] = {}
        self._why: dict[int, str] = {}
        if model.compile is not None:
            self._why = dict.fromkeys(range(len(model.layers)), "layers are compiled")
        counting = "its forward changes Python attributes"
        self._why |= {index: counting for index in model.counting if index not in self._why}

    def leave_out(self, layer: int, why: str) -> None:
        """Look for no options of `layer` (0-based)."""
        self._why.setdefault(layer, why)

    def look_at(self, index: int, run: LayerRun, alike: LayerSignature | None = None) -> None:
        """Finds the options of layer `index` (0-based), which `run` runs.

        Args:
            index: of the layer.
            run: runs it.
            alike: what it has in common with layers whose graphs are the same; None: unknown.
        """
        if index in self._why:
            return
        known = None if alike is None else self._alike.get(alike)
        if known is None:
            known = self._graph(index, run)
            if alike is not None:
                self._alike[alike] = known
        if isinstance(known, str):
            self._why[index] = known
        else:
            self._options[index] = self._of(index, known[0], self._known[known])

    def _graph(self, index: int, run: LayerRun) -> _Key | str:
        """The layer's graph, whose programs are known then; or why there are none."""
        try:
            captured = self._captured(run)
            key = captured.graph.structure_digest(), len(run.inputs), run.loss is not None
            if key not in self._known:
                self._known[key] = self._found(index, run, captured)
        except UncapturableError as error:
            return error.reason
        return key

    def _captured(self, run: LayerRun) -> Captured:
        pairs = zip(run.inputs, run.differentiable, strict=True)
        entered = [value.detach().clone().requires_grad_(flag) for value, flag in pairs]
        captured = capture_layer(run.layer, [*entered, *run.fed], run.autocast)
        self._check(run, captured)
        return captured

    def _found(self, index: int, run: LayerRun, captured: Captured) -> _GraphPrograms:
        """Programs of a graph that was not met before, and the bytes of each."""
        timed = self._timed(run, captured)
        options = graph_options(timed.graph, self._share(index))
        with self._around():
            programs = with_bytes(run, captured, options, self._accumulate)
        self._say(
            f"layer {index + 1} of {len(self._model.layers)}, {run.name}:"
            f" {len(captured.graph.operations)} operators, {len(programs)} programs"
        )
        return _GraphPrograms(options.usual, programs)

    def _share(self, index: int) -> float:
        """Seconds for a graph: an equal part of what is left, but half of it where few are."""
        left = self._seconds
        share = max(left / (len(self._model.layers) - index), left / 8)
        self._seconds = max(0.0, left - share)
        return share

    def _of(self, index: int, digest: str, known: _GraphPrograms) -> list[LayerOption]:
        layer = self._chain.layers[index]
        made = []
        for found in known.programs:
            program = OperatorProgram(graph_digest=digest, text=found.option.program.to_text())
            number = self._programs.setdefault(program, len(self._programs))
            made.append(layer_option(layer, found, known.usual, number))
        return worthwhile(self._chain, index, made)

    def chain(self) -> Chain:
        """The chain with all options, and programs that one of them runs."""
        used = sorted({each.program for options in self._options.values() for each in options})
        place = {program: index for index, program in enumerate(used)}
        layers = tuple(
            self._with(layer, self._options.get(index, []), place)
            for index, layer in enumerate(self._chain.layers)
        )
        programs = list(self._programs)
        count = sum(bool(layer.options) for layer in layers)
        self._say(
            f"{count} of {len(layers)} layers have options, {len(used)} programs over"
            f" {len(self._known)} distinct graphs"
        )
        reasons = [self._why.get(index) for index in range(len(layers))]
        lines = [
            f"{reason}: {names}" for reason, _, names in by_reason(self._model.names, reasons)
        ]
        for line in lines:
            self._say(f"no options: {line}")
        device = {**self._chain.device, **({NOTE: "; ".join(lines)} if lines else {})}
        data = self._chain.model_copy(
            update={
                "layers": layers,
                "programs": tuple(programs[each] for each in used),
                "device": device,
            }
        )
        return Chain.model_validate(data.model_dump(by_alias=True))

    @staticmethod
    def _with(layer: Layer, options: list[LayerOption], place: dict[int, int]) -> Layer:
        moved = (each.model_copy(update={"program": place[each.program]}) for each in options)
        return layer.model_copy(update={"options": tuple(moved)})
