"""The device that a model is on: its clock, its random number generator, its name."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from pipeplan.errors import InputError
from pipeplan.task import Task, walked


class DeviceClock(Protocol):
    """Marks instants in the stream of work and tells afterwards what lies between two."""

    name: str

    def mark(self) -> Any:
        """This instant."""

    def between(self, start: Any, end: Any) -> int:
        """Nanoseconds of work from one mark to a later one."""


class ThreadClock:
    """For one thread of the processor: its own time, which nobody can take by taking the core.

    On an idle machine that is the time that passes. On a busy one others still slow it down
    through caches and memory, but a wait for the core does not count.
    """

    name = "thread"

    def mark(self) -> int:
        """Processor time of this thread."""
        return time.thread_time_ns()

    def between(self, start: int, end: int) -> int:
        """The difference."""
        return end - start


class WallClock:
    """For several threads, which work while the caller waits."""

    name = "wall"

    def mark(self) -> int:
        """Now."""
        return time.perf_counter_ns()

    def between(self, start: int, end: int) -> int:
        """The difference."""
        return end - start


class StreamClock:
    """For CUDA, which works behind the caller's back: events in its stream.

    An operation that waits for its launch lasts longer here, as it does in a run.
    """

    name = "stream"

    def __init__(self, device: torch.device) -> None:
        """Its stream is that of `device`, whatever GPU is the current one."""
        self._device = device

    def mark(self) -> torch.cuda.Event:
        """An event behind all work that has been handed over."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def between(self, start: torch.cuda.Event, end: torch.cuda.Event) -> int:
        """Waits until both have happened."""
        end.synchronize()
        milliseconds: float = start.elapsed_time(end)
        return round(milliseconds * 1e6)


def _clock(device: torch.device) -> DeviceClock:
    if device.type == "cuda":
        return StreamClock(device)
    return ThreadClock() if torch.get_num_threads() == 1 else WallClock()


class ModelDevice:
    """The one device of a model."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_cuda = device.type == "cuda"
        self.clock = _clock(device)
        self.random_devices: Sequence[torch.device] = [device] if self.is_cuda else []
        """What `torch.random.fork_rng` must keep beside the processor's generator."""

    def seed(self, number: int) -> None:
        """Sets the generator that layers on this device draw from."""
        if self.is_cuda:
            with torch.cuda.device(self.device):
                torch.cuda.manual_seed(number)
        else:
            torch.default_generator.manual_seed(number)

    def bring(self, task: Task) -> Task:
        """`task` with its micro-batches on this device."""
        if not self.is_cuda:
            return task

        def data(microbatch: int) -> Any:
            where = f"task: data({microbatch})"
            return walked(lambda tensor, _: tensor.to(self.device), task.data(microbatch), where)

        return replace(task, data=data)

    def facts(self) -> dict[str, str | int]:
        """What a chain says about the machine it was measured on."""
        facts: dict[str, str | int] = {
            "device": self.device.type,
            "cpu": _cpu_name(),
            "cores": _cores(),
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "clock": self.clock.name,
        }
        if self.is_cuda:
            facts["gpu"] = torch.cuda.get_device_name(self.device)
        return facts


def device_of(model: object) -> ModelDevice:
    """Where all tensors of a task's `model` are; the processor for one without any.

    Raises:
        InputError: if they are on several devices, or on one that cannot be measured.
    """
    first: tuple[str, torch.device] | None = None
    for name, tensor in _named_tensors(model):
        if tensor.device.type not in ("cpu", "cuda"):
            raise InputError(
                f"profile: {name}: got a tensor on {tensor.device}, need cpu or cuda."
                " Other devices cannot be measured; --mode fake estimates."
            )
        first = first or (name, tensor.device)
        if tensor.device != first[1]:
            raise InputError(
                f"profile: got tensors on two devices, {first[0]} on {first[1]} and {name} on"
                f" {tensor.device}; need one. Move the whole model to one device: the plan"
                " decides which layer goes where."
            )
    return ModelDevice(first[1] if first else torch.device("cpu"))


def _named_tensors(model: object) -> Iterator[tuple[str, Tensor]]:
    parts = {"": model} if isinstance(model, nn.Module) else {}
    if isinstance(model, Sequence):
        parts = {str(index): part for index, part in enumerate(model)}
    for prefix, part in parts.items():
        if isinstance(part, nn.Module):
            yield from part.named_parameters(prefix)
            yield from part.named_buffers(prefix)


def _cores() -> int:
    """Cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu_name() -> str:
    """The processor as Linux names it; elsewhere what Python knows."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
