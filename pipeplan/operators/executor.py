"""One pass: a device program on real tensors, instruction by instruction.

docs/reference/device-programs.md says what each instruction does; the judge has allowed the
program, so nothing is decided here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipeplan.device_program import DeviceProgram, Instruction, InstructionKind
from pipeplan.errors import InputError
from pipeplan.operator_graph import PERMANENT, StorageKind
from pipeplan.operators.captured import Captured
from pipeplan.operators.host import LateHost
from pipeplan.operators.memory import Filled, Memory, contiguous_as, filler, views_of
from pipeplan.operators.random_states import RandomStates
from pipeplan.remat.programs import judge

Watch = Callable[[int], AbstractContextManager[Any]]
"""What an operation, given by its index, runs inside of."""


class Prepared:
    """All that the passes of one program share; nothing here holds the module."""

    def __init__(self, captured: Captured, program: DeviceProgram) -> None:
        """Takes both apart.

        Raises:
            InputError: if the program breaks a rule of the judge, or offloads parameters, which
                the module holds, too.
        """
        found = judge(captured.graph, program)
        if found.violations:
            raise InputError(
                f"device program: {found.violations[0]}. Plan the module again, or correct the"
                " program."
            )
        for each in program.instructions:
            _check_copy(captured, each)
        operations = captured.graph.operations
        self.captured = captured
        self.tasks = tuple(Task.of(captured, index) for index in range(len(operations)))
        self.views = views_of(captured)
        self.forward, self.backward = _parts(captured, program)
        runs = Counter(
            each.index for each in program.instructions if each.kind is InstructionKind.RUN
        )
        self.again = frozenset(
            index for index, count in runs.items() if count > 1 and operations[index].random
        )


@dataclass(frozen=True, slots=True)
class Task:
    """An operation, prepared for runs."""

    function: Callable[..., Any]
    fill: Filled
    several: bool
    """Whether it returns several results."""
    kept: tuple[tuple[int, int, int], ...]
    """Place among the results, value and storage of each that is kept."""
    writes: tuple[int, ...]
    random: bool
    device: torch.device

    @classmethod
    def of(cls, captured: Captured, index: int) -> Task:
        """Of operation `index`."""
        operation, computation = captured.graph.operations[index], captured.computations[index]
        return cls(
            function=computation.call.function,
            fill=filler(computation.call),
            several=computation.several,
            kept=tuple(
                (place, value, captured.values[value].storage)
                for place, value in enumerate(computation.results)
                if value is not None
            ),
            writes=operation.writes,
            random=operation.random,
            device=computation.device,
        )


def _check_copy(captured: Captured, instruction: Instruction) -> None:
    if instruction.kind is not InstructionKind.OFFLOAD:
        return
    storage = captured.graph.storages[instruction.index]
    if storage.kind in PERMANENT:
        raise InputError(
            f"device program: {instruction}: got {storage.kind} {storage.name!r}, need a storage"
            " that the module does not hold. Keep it on the device."
        )


def _parts(
    captured: Captured, program: DeviceProgram
) -> tuple[tuple[Instruction, ...], tuple[Instruction, ...]]:
    """What runs in the forward, and what in the backward.

    What is freed right behind the end of the forward goes before the caller has his turn.
    """
    lines = program.instructions
    end = lines.index(Instruction(InstructionKind.END_F)) + 1
    storages = captured.graph.storages
    while end < len(lines) and lines[end].kind is InstructionKind.FREE:
        if storages[lines[end].index].kind is StorageKind.TANGENT:
            break
        end += 1
    return lines[:end], lines[end:]


class Pass:
    """One forward and its backward; use once."""

    def __init__(
        self,
        prepared: Prepared,
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
        self._host = LateHost(self._memory, captured.device)
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
        values = self._captured.input_gradients
        return [None if value is None else self._memory.get(value) for value in values]

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

    def _execute(self, instructions: Sequence[Instruction]) -> None:
        steps = self._steps()
        cast = torch.autocast(self._captured.device.type, enabled=False)
        # The graph holds all that autograd and autocast would add. Some kernels ask whether
        # gradients are on (a recurrent layer's workspace), so they are, below autograd.
        with torch.enable_grad(), cast, torch._C._AutoDispatchBelowAutograd():  # noqa: SLF001
            for instruction in instructions:
                steps[instruction.kind](instruction.index)

    def _steps(self) -> dict[InstructionKind, Callable[[int], None]]:
        return {
            InstructionKind.RUN: self._run if self._watch is None else self._watched_run,
            InstructionKind.FREE: self._free,
            InstructionKind.OFFLOAD: self._host.offload,
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

    def _keep(self, task: Task, results: Sequence[Any]) -> None:
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
            if parameter.grad is not None:
                parameter.grad.add_(gradient)
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
