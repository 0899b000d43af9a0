"""What carries messages: NCCL between GPUs, gloo between processors, or what fits.

A rank computes where its task puts the model: on the processor, or on `cuda`, which is the rank's
own GPU, or one that it shares if the machine has fewer GPUs than ranks.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

import torch
from torch.distributed import is_nccl_available

from pipeplan.errors import InputError
from pipeplan.runtime.place import Place
from pipeplan.task import SplitModel

Backend = Literal["nccl", "gloo"]
Wanted = Literal["nccl", "gloo", "auto"]


@dataclass(frozen=True, slots=True)
class Machine:
    """What this machine has for the ranks on it."""

    gpus: int
    """That torch sees."""
    has_nccl: bool
    """Whether torch was built with it."""

    @classmethod
    def here(cls) -> Machine:
        """This one."""
        return cls(torch.cuda.device_count(), is_nccl_available())

    def check(self, wanted: Wanted, place: Place) -> None:
        """Refuse `nccl` where it cannot work.

        Raises:
            InputError: if there is no NCCL, or not a GPU for each rank.
        """
        if wanted != "nccl":
            return
        if not self.gpus or not self.has_nccl:
            lacks = "no GPU" if not self.gpus else "no NCCL"
            raise InputError(
                f"backend: got nccl, and torch {torch.__version__} has {lacks} here; need a CUDA"
                " build of torch and a GPU for each rank. Or use backend gloo."
            )
        if self.gpus < place.local_size:
            raise InputError(
                f"backend: got nccl with {place.local_size} ranks and {self.gpus} GPUs on this"
                " machine, need a GPU for each rank: NCCL refuses two ranks on one. Use backend"
                " gloo, under which ranks can share a GPU."
            )

    def chosen(self, wanted: Wanted, place: Place, device: torch.device) -> Backend:
        """What carries the messages of a model on `device`.

        Raises:
            InputError: as `check`, or if the model is not on a GPU and `nccl` is wanted.
        """
        self.check(wanted, place)
        if wanted == "nccl" and device.type != "cuda":
            raise InputError(
                f"backend: got nccl and a model on {device.type}, need it on cuda: let the task"
                " build the model and move it there. Or use backend gloo."
            )
        if wanted != "auto":
            return wanted
        own = device.type == "cuda" and self.has_nccl and self.gpus >= place.local_size
        return "nccl" if own else "gloo"


def take_gpu(place: Place, machine: Machine) -> None:
    """Let `cuda` mean this rank's GPU; call it before the task is loaded.

    A receive that waits occupies a queue of the GPU's hardware, so there should be as many as the
    hardware has, lest kernels wait behind it.
    """
    if machine.gpus:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        torch.cuda.set_device(place.local_rank % machine.gpus)


def device_of(split: SplitModel) -> torch.device:
    """Where the layers are; the processor for layers without tensors."""
    for layer in split.layers:
        for tensor in (*layer.parameters(), *layer.buffers()):
            return tensor.device
    return torch.device("cpu")


def check_current(device: torch.device) -> None:
    """Refuse a model on another GPU than the current one, on which streams and waits would be.

    Raises:
        InputError: if it is.
    """
    if device.type == "cuda" and device.index != (current := torch.cuda.current_device()):
        raise InputError(
            f"pipeline: model: got it on {device}, need it on cuda:{current}, the current GPU of"
            f" this process. Call torch.cuda.set_device({device.index}) before making the model."
        )
