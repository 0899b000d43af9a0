"""The device a model is on: how time is taken there, where random numbers come from, its name."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from pipeplan.errors import InputError
from pipeplan.task import SplitModel


class Clock(Protocol):
    """Marks instants in the stream of work and tells afterwards what lies between two."""

    def mark(self) -> Any:
        """This instant."""

    def between(self, start: Any, end: Any) -> int:
        """Nanoseconds of work from one mark to a later one."""


class WallClock:
    """For devices that work while the caller waits."""

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

    def mark(self) -> torch.cuda.Event:
        """An event behind all work that has been handed over."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, start: torch.cuda.Event, end: torch.cuda.Event) -> int:
        """Waits until both have happened."""
        end.synchronize()
        milliseconds: float = start.elapsed_time(end)
        return round(milliseconds * 1e6)


class Place:
    """The one device of a model."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_cuda = device.type == "cuda"
        self.clock: Clock = StreamClock() if self.is_cuda else WallClock()
        self.random_devices: Sequence[torch.device] = [device] if self.is_cuda else []
        """What `torch.random.fork_rng` must keep beside the processor's generator."""

    def seed(self, number: int) -> None:
        """Sets the generator that layers on this device draw from."""
        if self.is_cuda:
            with torch.cuda.device(self.device):
                torch.cuda.manual_seed(number)
        else:
            torch.default_generator.manual_seed(number)

    def facts(self) -> dict[str, str | int]:
        """What a chain says about the machine it was measured on."""
        facts: dict[str, str | int] = {
            "device": self.device.type,
            "cpu": _cpu_name(),
            "cores": _cores(),
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
        }
        if self.is_cuda:
            facts["gpu"] = torch.cuda.get_device_name(self.device)
        return facts


def place_of(model: SplitModel) -> Place:
    """Where all tensors of `model` are; the processor for a model without any.

    Raises:
        InputError: if they are on several devices, or on one that cannot be measured.
    """
    first: tuple[str, torch.device] | None = None
    for name, layer in zip(model.names, model.layers, strict=True):
        for tensor in [*layer.parameters(), *layer.buffers()]:
            if tensor.device.type not in ("cpu", "cuda"):
                raise InputError(
                    f"profile: layer {name!r}: got a tensor on {tensor.device}, need cpu or cuda."
                    " Other devices cannot be measured; --mode fake estimates."
                )
            first = first or (name, tensor.device)
            if tensor.device != first[1]:
                raise InputError(
                    f"profile: got tensors on two devices, {first[1]} in layer {first[0]!r} and"
                    f" {tensor.device} in layer {name!r}; need one. Move the whole model to one"
                    " device: the plan decides which layer goes where."
                )
    return Place(first[1] if first else torch.device("cpu"))


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
