"""One pass: a device program on real tensors, instruction by instruction.

docs/reference/device-programs.md says what each instruction does; the judge has allowed the
program, so nothing is decided here.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from pipeplan.device_program import InstructionKind
from pipeplan.gradients import sum_of
from pipeplan.operator_graph import StorageKind
from pipeplan.operators.host import HostTransfers, LateHost, host_of
from pipeplan.operators.memory import Memory, contiguous_as
from pipeplan.operators.prepared import OperationCall, PreparedInstruction, PreparedProgram
from pipeplan.operators.random_states import RandomStates

Watch = Callable[[int], AbstractContextManager[Any]]
"""What an operation, given by its index, runs inside of."""


class ProgramPass:
    """One forward and its backward; use once."""

    def __init__(
        self,
        prepared: PreparedProgram,
        states: Mapping[str, Tensor],
        inputs: Sequence[Tensor],
        watch: Watch | None = None,
    ) -> None:
        """Nothing runs yet.

        Args:
            prepared: what to run.
            states: parameters and buffers by name, as they are now.
            inputs: of the call.
            watch: entered around every operation: a clock, or nothing.
        """
        captured = prepared.captured
        self._prepared, self._captured, self._states = prepared, captured, states
        self._memory = Memory(captured.values, prepared.views)
        self._host = self._way(prepared)
        weakref.finalize(self, self._host.drop).atexit = False
        self._random = RandomStates(prepared.again)
        self._watch = watch
        self._results: list[Tensor] = []
        for name, value in (captured.parameters | captured.buffers).items():
            self._memory.put(value, states[name])
        for value, tensor in captured.constants:
            self._memory.put(value, tensor)
        for given, tensor in zip(captured.inputs, inputs, strict=True):
            if given is not None:
                self._memory.put(given, tensor.detach())

    def _way(self, prepared: PreparedProgram) -> HostTransfers:
        device = self._captured.device
        if not prepared.moves:
            return LateHost(self._memory, device)
        return host_of(self._memory, device, prepared.pinned)

    def forward(self) -> list[Tensor]:
        """The outputs, cut off any graph."""
        self._execute(self._prepared.forward)
        results, self._results = self._results, []
        return results

    def backward(self, gradients: list[Tensor | None]) -> list[Tensor | None]:
        """Adds to the parameters' gradients; returns those of the inputs, None for one without.

        Args:
            gradients: of the outputs, None for zeros; emptied, so that none stays alive here.
        """
        for place in range(len(gradients)):
            self._take(place, gradients[place])
            gradients[place] = None
        self._execute(self._prepared.backward)
        self._host.close()
        values = self._captured.input_gradients
        return [None if value is None else self._memory.get(value) for value in values]

    def kept_inputs(self) -> list[int]:
        """Places of the inputs that are still read."""
        return [
            place
            for place, value in enumerate(self._captured.inputs)
            if value is not None and self._memory.has(self._captured.values[value].storage)
        ]

    def _take(self, place: int, gradient: Tensor | None) -> None:
        value, layout = self._captured.tangents[place], self._captured.layouts[place]
        if value is None or layout is None:
            return
        shape, strides, dtype = layout
        if gradient is None:
            gradient = torch.empty_strided(
                shape, strides, dtype=dtype, device=self._captured.device
            ).zero_()
        self._memory.put(value, contiguous_as(gradient, layout))

    def _execute(self, steps: Sequence[PreparedInstruction]) -> None:
        """Ends the copies where a step fails: a worker would wait for the rest."""
        try:
            self._follow(steps)
        except BaseException:
            self._host.drop()
            self._host.close()
            raise

    def _follow(self, steps: Sequence[PreparedInstruction]) -> None:
        calls, host = self._calls(), self._host
        cast = torch.autocast(self._captured.device.type, enabled=False)
        # The graph holds all that autograd and autocast would add. Some kernels ask whether
        # gradients are on (a recurrent layer's workspace), so they are, below autograd.
        with torch.enable_grad(), cast, torch._C._AutoDispatchBelowAutograd():  # noqa: SLF001
            for step in steps:
                if step.kind is InstructionKind.OFFLOAD:
                    host.offload(step.index, used_later=step.used_later)
                else:
                    calls[step.kind](step.index)
                for storage in step.unused:
                    host.unused(storage)

    def _calls(self) -> dict[InstructionKind, Callable[[int], None]]:
        return {
            InstructionKind.RUN: self._run if self._watch is None else self._watched_run,
            InstructionKind.FREE: self._free,
            InstructionKind.PREFETCH: self._host.prefetch,
            InstructionKind.WAIT: self._host.wait,
            InstructionKind.ACCUMULATE: self._accumulate,
            InstructionKind.UPDATE: self._update,
            InstructionKind.END_F: self._end_of_forward,
            InstructionKind.END_I: _pass,
        }

    def _watched_run(self, index: int) -> None:
        assert self._watch is not None
        with self._watch(index):
            self._run(index)

    def _run(self, index: int) -> None:
        task = self._prepared.tasks[index]
        args, kwargs = task.fill(self._memory.get)
        if task.random:
            with self._random.of(index, task.device):
                result = task.function(*args, **kwargs)
        else:
            result = task.function(*args, **kwargs)
        self._keep(task, result if task.several else (result,))

    def _keep(self, task: OperationCall, results: Sequence[Any]) -> None:
        """Puts results where there are none yet (A2)."""
        memory, host = self._memory, self._host
        there = [s for s in task.writes if memory.has(s) or host.holds(s)]
        for place, value, storage in task.kept:
            if storage not in there:
                memory.put(value, results[place])

    def _free(self, storage: int) -> None:
        if self._host.holds(storage):
            self._host.free(storage)
        else:
            self._memory.free(storage)

    def _accumulate(self, storage: int) -> None:
        alone = self._captured.graph.storages[storage].kind is StorageKind.WEIGHT_GRADIENT
        parts = self._captured.added[storage]
        for part in parts:
            parameter, gradient = self._states[part.name], self._memory.get(part.value)
            total = sum_of(parameter)
            if total is not None:
                total.add_(gradient)
            else:
                keep = alone and len(parts) == 1
                parameter.grad = first_gradient(parameter, gradient, keep=keep)

    def _update(self, storage: int) -> None:
        for part in self._captured.added[storage]:
            self._states[part.name].copy_(self._memory.get(part.value))

    def _end_of_forward(self, _: int) -> None:
        self._results = [self._memory.get(value) for value in self._captured.outputs]


def _pass(_: int) -> None:
    """A mark that asks for nothing."""


def first_gradient(parameter: Tensor, gradient: Tensor, *, keep: bool) -> Tensor:
    """What becomes the gradient of a parameter that has none, with the parameter's strides.

    Args:
        parameter: in its own layout.
        gradient: of this micro-batch.
        keep: whether nobody else needs the storage of `gradient`.
    """
    same = gradient.stride() == parameter.stride()
    whole = gradient.untyped_storage().nbytes() == gradient.nbytes
    if keep and same and whole:
        return gradient
    return torch.empty_like(parameter).copy_(gradient)
