"""What blocks keep and take, found by running each of them in each of its ways.

Boundaries of the whole model and one block's storages are alive at once. Every figure is of the
same code that trains under a plan, so that bytes of a step are those of its parts.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from operator import is_
from typing import Final

import torch
from torch import Tensor

from pipeplan.capture.user_model.module_attributes import held_tensors
from pipeplan.errors import InputError
from pipeplan.host_copy import flat
from pipeplan.livebytes import LiveBytes, dense, storage_bytes
from pipeplan.offmate.block import LayerBlock, StepData
from pipeplan.remat.states.problem import StateBlock, StateBlockOption
from pipeplan.rematerialized.states import ForwardStates
from pipeplan.split_model import SplitModel
from pipeplan.task import Task

REPEATS: Final = 3
KEEP, RECOMPUTE, OFFLOAD = "keep", "recompute", "offload"
OPTIONS = (KEEP, RECOMPUTE, OFFLOAD)
"""Names of options."""


@dataclass(frozen=True, slots=True)
class _LightForward:
    """A forward that keeps nothing."""

    output: int
    workspace: int
    time_ns: int
    again: bool
    """Whether it may run a second time."""


@dataclass(frozen=True, slots=True)
class _Pass:
    """One forward and backward of a block: bytes beside what goes in and out, times."""

    kept: int
    moved: int
    keeps_output: bool
    forward_workspace: int
    backward_workspace: int
    forward_ns: int
    backward_ns: int


class Trial:
    """One run of each block in each of its ways."""

    def __init__(self, task: Task, model: SplitModel) -> None:
        self._task, self._model = task, model
        self.data = StepData(task)
        self.data.load(0)
        self._again = ForwardStates(
            torch.device("cpu"), {layer: () for layer in range(len(model.layers))}
        )
        self._values = [list(model.entry(self.data.inputs))]
        self._gradients: list[Tensor] = []

    def blocks(self) -> tuple[StateBlock, ...]:
        """All blocks: each backward gets the very gradients that the one behind it returns.

        Those of parameters stay behind.
        """
        forwards = [self._forward(index) for index in range(len(self._model.layers))]
        self._values.pop()
        found: list[StateBlock] = []
        for index in reversed(range(len(self._model.layers))):
            arrived = storage_bytes(self._gradients)
            options = tuple(self._options(index, forwards[index]))
            name, output = self._model.names[index], forwards[index].output
            found.append(StateBlock(name, options, output, arrived))
            self._values.pop()
        return tuple(reversed(found))

    def _forward(self, index: int) -> _LightForward:
        inputs, layer = self._values[index], self._model.layers[index]
        versions, held = _versions(inputs), _Bytes(held_tensors([layer]))
        buffers = list(layer.buffers())
        live = self._live(index, ())
        with live:
            block = LayerBlock(self._task, self._model, index, self.data)
            begin, start = live.live, time.perf_counter_ns()
            self._values.append(block.forward(inputs, self._again, keep=False))
            took = time.perf_counter_ns() - start
        if _versions(inputs) != versions:
            raise InputError(
                f"task: layer {self._model.names[index]}: works in place on its input, which its"
                " backward reads. Make the operation out of place."
            )
        output = storage_bytes(self._values[-1])
        changed = held.changed()
        self._check_parameters(index, changed)
        same = all(map(is_, buffers, layer.buffers()))  # another may have taken one's place
        again = same and not changed and index not in self._model.counting
        return _LightForward(output, live.peak - begin - output, took, again)

    def _check_parameters(self, index: int, changed: set[int]) -> None:
        """Raises InputError for a parameter among what a forward has changed."""
        for local, parameter in self._model.layers[index].named_parameters():
            if id(parameter) in changed:
                name = self._model.fqns[index][local]
                raise InputError(
                    f"task: parameter {name}: its layer's forward changes it, need one that only"
                    " the optimizer changes: its other copy, on the host, would not hear of it."
                    " Make it a buffer (register_buffer)."
                )

    def _options(self, index: int, forward: _LightForward) -> Iterator[StateBlockOption]:
        before = [each.grad for each in self._model.layers[index].parameters()]
        if forward.again:
            again = self._quickest(index, forward, before, again=True)
        keep = self._quickest(index, forward, before, again=False)
        option = StateBlockOption(
            KEEP,
            keep.forward_ns,
            keep.backward_ns,
            keep.kept,
            0,
            keep.forward_workspace,
            keep.backward_workspace,
            keep.keeps_output,
        )
        yield option
        if forward.again:
            yield StateBlockOption(
                RECOMPUTE,
                forward.time_ns,
                again.backward_ns,
                0,
                0,
                forward.workspace,
                again.backward_workspace,
            )
        if keep.moved and index < len(self._model.layers) - 1:
            rest = keep.kept - keep.moved
            yield replace(option, name=OFFLOAD, kept_bytes=rest, offloaded_bytes=keep.moved)

    def _quickest(
        self, index: int, forward: _LightForward, before: list[Tensor | None], *, again: bool
    ) -> _Pass:
        """Of several passes; leaves gradients as behind one."""
        found = [self._pass(index, forward, before, again=again) for _ in range(REPEATS)]
        first, gradients = found[-1]
        if not again:
            self._gradients = gradients
        return replace(
            first,
            forward_ns=min(each.forward_ns for each, _ in found),
            backward_ns=min(each.backward_ns for each, _ in found),
        )

    def _pass(
        self, index: int, forward: _LightForward, before: list[Tensor | None], *, again: bool
    ) -> tuple[_Pass, list[Tensor]]:
        inputs, gradients = self._values[index], self._gradients
        parameters = list(self._model.layers[index].parameters())
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = None if gradient is None else gradient.clone()
        kept = workspace = first = 0
        live = self._live(index, [*gradients, *(p.grad for p in parameters if p.grad is not None)])
        with live:
            block = LayerBlock(self._task, self._model, index, self.data)
            if not again:
                begin, start = live.live, time.perf_counter_ns()
                outputs = block.forward(inputs, self._again, keep=True)
                first = time.perf_counter_ns() - start
                kept = live.live - begin - forward.output
                workspace = live.peak - begin - forward.output - kept
                outputs.clear()
            # The gradients of earlier uses, which new ones are added to, stay for as long.
            held = [each.grad for each in parameters]
            live.reset_peak()
            begin, start = live.live, time.perf_counter_ns()
            found = block.backward(inputs, gradients, self._again, again=again)
            took = time.perf_counter_ns() - start
            made = [each.grad for each in parameters if each.grad is not None]
            extra = live.peak - begin - storage_bytes(found) - storage_bytes(made)
        del held
        moved = sum(each.storage.nbytes() for each in block.kept)
        times = first, took
        return _Pass(kept, moved, block.keeps_output, workspace, max(0, extra), *times), found

    def _live(self, index: int, others: Iterable[Tensor]) -> LiveBytes:
        states = [*held_tensors([self._model.layers[index]]), *self.data.tensors]
        return LiveBytes([*states, *self._values[index], *others])


def _versions(tensors: Iterable[Tensor]) -> list[int]:
    """How often each was written to; torch has no public name for it."""
    return [each._version for each in tensors]  # noqa: SLF001


class _Bytes:
    """What tensors hold at some instant; torch does not count what is written through `data`."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._kept = [(each, _bytes_of(each)) for each in tensors]

    def changed(self) -> set[int]:
        """Identities of those that hold something else by now."""
        return {
            id(each)
            for each, kept in self._kept
            if not all(map(torch.equal, kept, _bytes_of(each)))
        }


def _bytes_of(tensor: Tensor) -> list[Tensor]:
    return [flat(part.untyped_storage()).clone() for part in dense(tensor)]
