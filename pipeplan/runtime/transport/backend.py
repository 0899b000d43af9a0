"""What carries messages: NCCL between GPUs, gloo between processors, or what fits.

A rank computes where its task puts the model: on the processor, or on `cuda`, which is the rank's
own GPU, or one that it shares if the machine has fewer GPUs than ranks. What carries messages is
decided once for all ranks, from what each of them has (`agreed`).
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch.distributed import is_nccl_available

from pipeplan.errors import InputError
from pipeplan.runtime.transport.local_rendezvous import machine
from pipeplan.runtime.transport.torchrun_env import TorchrunEnv
from pipeplan.split_model import SplitModel

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

    def check(self, wanted: Wanted) -> None:
        """Refuse `nccl` where it cannot work, before anything is loaded.

        Raises:
            InputError: if there is no GPU or no NCCL.
        """
        if wanted == "nccl" and not (self.gpus and self.has_nccl):
            lacks = "no GPU" if not self.gpus else "no NCCL"
            raise InputError(
                f"backend: got nccl, and torch {torch.__version__} has {lacks} here; need a CUDA"
                " build of torch and a GPU for each rank. Or use backend gloo."
            )


@dataclass(frozen=True, slots=True)
class Means:
    """What one rank wants and has; all tell each other when they join."""

    wanted: Wanted
    device: str
    """Where its model is: `cpu`, `cuda`."""
    gpu: str | None
    """Which GPU of all there are anywhere; None for a model elsewhere."""
    has_nccl: bool

    @classmethod
    def of(cls, wanted: Wanted, split: SplitModel) -> Means:
        """Those of this rank, which has `split`."""
        device = device_of(split)
        gpu = _identity(device) if device.type == "cuda" else None
        return cls(wanted, device.type, gpu, Machine.here().has_nccl)


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """What carries the messages of a run, and why."""

    backend: Backend
    why: str


GLOO, NCCL = BackendChoice("gloo", "as asked for"), BackendChoice("nccl", "as asked for")


def agreed(means: Sequence[Means]) -> BackendChoice:
    """What carries messages between ranks of these `means`, the same answer on each of them.

    GPUs are told apart by what they are, not by their number: where each rank sees one GPU alone
    (srun, Kubernetes) all have number 0.

    Raises:
        InputError: if ranks want different things, or all want `nccl` and it cannot work.
    """
    wanted = _wanted(means)
    if wanted == "gloo":
        return GLOO
    hindrance = _hindrance(means)
    if hindrance is None:
        return BackendChoice("nccl", f"{len(means)} ranks on GPUs of their own")
    if wanted == "nccl":
        raise InputError(
            f"backend: got nccl and {hindrance}, need NCCL and a model on a GPU of its own on each"
            " rank. Or use backend gloo, under which ranks can share a GPU."
        )
    return BackendChoice("gloo", hindrance)


def _wanted(means: Sequence[Means]) -> Wanted:
    first = means[0].wanted
    for rank, each in enumerate(means):
        if each.wanted != first:
            raise InputError(
                f"backend: got {first} on rank 0 and {each.wanted} on rank {rank}, need one for"
                " all. Start all ranks with the same --backend."
            )
    return first


def _hindrance(means: Sequence[Means]) -> str | None:
    """Why NCCL cannot carry messages; None if it can."""
    at: dict[str, int] = {}
    for rank, each in enumerate(means):
        if each.gpu is None:
            return f"the model of rank {rank} on {each.device}"
        if not each.has_nccl:
            return f"no NCCL in the torch of rank {rank}"
        if each.gpu in at:
            return f"ranks {at[each.gpu]} and {rank} on one GPU ({each.gpu})"
        at[each.gpu] = rank
    return None


def _identity(device: torch.device) -> str:
    """A name that no other GPU has and that does not depend on which GPUs a rank sees."""
    properties = torch.cuda.get_device_properties(device)
    uuid = getattr(properties, "uuid", None)
    if uuid is not None:
        return f"GPU-{uuid}"
    place = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    return f"GPU {place} of {machine() or platform.node()}"


QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
"""Queues of a GPU's hardware; read once, at a process's first use of CUDA."""
_MOST_QUEUES, _USUAL_QUEUES = 32, 8


def ask_for_queues() -> None:
    """Ask for as many queues as the hardware has, before the first use of CUDA.

    A receive that waits occupies one; what comes behind it in the same queue waits as well.
    """
    if not torch.cuda.is_initialized():
        os.environ.setdefault(QUEUES, str(_MOST_QUEUES))


def lacking_queues(said: str | None, communicators: int) -> str:
    """Advice to whoever has fewer queues than its communicators and the computing need; or empty.

    Args:
        said: the environment variable's value, None for none.
        communicators: that end at this rank.
    """
    have = int(said) if said is not None and said.isdecimal() else _USUAL_QUEUES
    need = min(communicators + 1, _MOST_QUEUES)
    if have >= need:
        return ""
    return (
        f"backend nccl: {QUEUES}: got {have}, need {need}: {communicators} receives and sends may"
        " wait at once, and kernels behind them in their queue, perhaps for each other. Set it to"
        f" {_MOST_QUEUES} before the first use of CUDA, in the shell or at the script's top."
    )


def take_gpu(place: TorchrunEnv, machine: Machine) -> None:
    """Let `cuda` mean this rank's GPU; call it before the task is loaded."""
    if machine.gpus:
        ask_for_queues()
        torch.cuda.set_device(place.local_rank % machine.gpus)


def device_of(split: SplitModel) -> torch.device:
    """Where the layers are; the processor for layers without tensors."""
    for layer in split.layers:
        for tensor in (*layer.parameters(), *layer.buffers()):
            if not tensor.is_meta:
                return tensor.device
    return torch.device(split.device)


def check_current(device: torch.device, where: str, step: str) -> None:
    """Refuse a model on another GPU than the current one, on which streams and waits would be.

    Args:
        device: of the model.
        where: who was given it.
        step: what to do, behind its first words.

    Raises:
        InputError: if it is.
    """
    if device.type != "cuda" or device.index is None:  # without a number it is the current one
        return
    if device.index != (current := torch.cuda.current_device()):
        raise InputError(
            f"{where}: model: got it on {device}, need it on cuda:{current}, the current GPU of"
            f" this process. {step}"
        )
