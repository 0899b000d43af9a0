"""Times and true sizes of captured operations: run with the sample, or estimated."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from pipeplan.capture.layer_costs.device_clock import DeviceClock, ModelDevice
from pipeplan.capture.layer_costs.roofline import Roofline
from pipeplan.devices import Device
from pipeplan.operators.captured import Captured
from pipeplan.operators.executor import ProgramPass
from pipeplan.operators.flat_module import states_for_trial, states_of
from pipeplan.operators.prepared import OperationCall, PreparedProgram
from pipeplan.operators.refusals import UncapturableError
from pipeplan.remat.programs import keep_all


def measured(module: nn.Module, captured: Captured, repeats: int = 3) -> Captured:
    """`captured` with the times of its operations on this device, and the bytes that they make.

    Every operation runs once per repeat, in order, with the captured call's inputs; `module`, its
    gradients and the stream of random numbers are left as they were. All that `keep_all` keeps
    is alive meanwhile.

    Args:
        module: what was captured, with real tensors.
        captured: of a call with real inputs.
        repeats: of which the median is taken, behind one that is not counted.

    Raises:
        UncapturableError: if an operation's results share memory otherwise than the graph says.
    """
    place = ModelDevice(captured.device)
    prepared = PreparedProgram(captured, keep_all(captured.graph))
    rows: list[list[int]] = []
    sizes: dict[int, int] = {}
    with torch.random.fork_rng(devices=place.random_devices):
        for _ in range(1 + repeats):
            clocked = _Clocked(place.clock)
            states, inputs = states_for_trial(module), _tensors(captured)
            _Sized(prepared, states, inputs, clocked.watch, sizes).whole()
            rows.append(clocked.times())
    times = tuple(round(statistics.median(column)) for column in zip(*rows[1:], strict=True))
    return _with_sizes(captured, sizes).with_times(times)


def estimated(module: nn.Module, captured: Captured, device: Device) -> Captured:
    """`captured` with the times that a roofline model gives its operations on `device`.

    Nothing is computed; `module` and the captured inputs may be fake.
    """
    fake = next(_fakes(module, captured), None)
    mode = fake.fake_mode if fake is not None else FakeTensorMode(allow_non_fake_inputs=True)
    states = {name: _faked(mode, each) for name, each in states_for_trial(module).items()}
    inputs = [_faked(mode, each) for each in _tensors(captured)]
    held = tuple((value, _faked(mode, each)) for value, each in captured.constants)
    without = replace(captured, constants=held)
    times = [0] * len(captured.graph.operations)

    @contextmanager
    def watch(index: int) -> Iterator[None]:
        with Roofline(device) as roofline:
            yield
        times[index] = round(roofline.ns)

    with mode:
        _Whole(PreparedProgram(without, keep_all(captured.graph)), states, inputs, watch).whole()
    return captured.with_times(tuple(times))


class _Clocked:
    """When operations began and ended; each runs once."""

    def __init__(self, clock: DeviceClock) -> None:
        self._clock = clock
        self._marks: dict[int, tuple[Any, Any]] = {}

    @contextmanager
    def watch(self, index: int) -> Iterator[None]:
        """Around operation `index`."""
        begin = self._clock.mark()
        yield
        self._marks[index] = begin, self._clock.mark()

    def times(self) -> list[int]:
        """Of all operations by their indices, in ns."""
        return [self._clock.between(*self._marks[index]) for index in sorted(self._marks)]


class _Whole(ProgramPass):
    """A forward and its backward from gradients of zeros."""

    def whole(self) -> None:
        """Runs both."""
        outputs = self.forward()
        count = len(outputs)
        outputs.clear()
        self.backward([None] * count)


class _Sized(_Whole):
    """A pass that looks at the storages of results."""

    def __init__(
        self,
        prepared: PreparedProgram,
        states: Mapping[str, Tensor],
        inputs: list[Tensor],
        watch: Callable[[int], AbstractContextManager[Any]],
        sizes: dict[int, int],
    ) -> None:
        super().__init__(prepared, states, inputs, watch)
        self._sizes = sizes

    def _keep(self, task: OperationCall, results: Sequence[Any]) -> None:
        made: dict[int, dict[int, int]] = defaultdict(dict)
        for place, _, storage in task.kept:
            tensor = results[place]
            if not isinstance(tensor, Tensor):
                raise _otherwise(task)
            memory = tensor.untyped_storage()
            made[storage][id(memory)] = memory.nbytes()
        pieces = [name for each in made.values() for name in each]
        if len(set(pieces)) < len(pieces):
            raise _otherwise(task)
        # What torch takes for one storage may be several.
        self._sizes.update({storage: sum(each.values()) for storage, each in made.items()})
        super()._keep(task, results)


def _otherwise(task: OperationCall) -> UncapturableError:
    return UncapturableError(f"{task.function} does not return what torch says that it returns")


def _with_sizes(captured: Captured, sizes: Mapping[int, int]) -> Captured:
    storages = tuple(
        each.model_copy(update={"bytes": sizes.get(index, each.bytes)})
        for index, each in enumerate(captured.graph.storages)
    )
    return replace(captured, graph=captured.graph.model_copy(update={"storages": storages}))


def _tensors(captured: Captured) -> list[Tensor]:
    return [each.detach() for each in captured.arguments.tensors]


def _fakes(module: nn.Module, captured: Captured) -> Iterator[FakeTensor]:
    parameters, buffers = states_of(module)
    everything = [*parameters.values(), *buffers.values(), *captured.arguments.tensors]
    return (each for each in everything if isinstance(each, FakeTensor))


def _faked(mode: FakeTensorMode, tensor: Tensor) -> Tensor:
    return tensor if isinstance(tensor, FakeTensor) else mode.from_tensor(tensor)
