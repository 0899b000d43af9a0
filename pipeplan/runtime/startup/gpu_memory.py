"""The memory of a rank's GPU: whether it has what the plan may use, and what a run took of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pipeplan.errors import InputError
from pipeplan.plan import Plan
from pipeplan.units import format_bytes


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """The memory of one GPU, in bytes, as one process finds it."""

    name: str
    total: int
    free: int
    """Of the whole GPU: nobody has it."""
    held: int
    """What torch's allocator has taken for this process already, used or not."""

    @classmethod
    def of(cls, device: torch.device) -> GpuMemory | None:
        """That of `device`, with the context of this process in it; None for the processor."""
        if device.type != "cuda":
            return None
        free, total = torch.cuda.mem_get_info(device)
        held = torch.cuda.memory_reserved(device)
        return cls(torch.cuda.get_device_name(device), total, free, held)

    def check(self, plan: Plan, gpu: int) -> None:
        """Refuse to be GPU `gpu` of a plan that may use more than there is.

        Raises:
            InputError: if the budget exceeds what this process has and can get.
        """
        device, there = plan.cluster.gpus[gpu], self.free + self.held
        budget = device.memory_bytes - device.reserve_bytes
        if budget > there:
            gone = self.total - there
            raise InputError(
                f"plan: cluster.gpus[{gpu}]: got a budget of {budget} bytes, need at most {there},"
                f" which this process has or can get of {self.name}: {gone} of its {self.total}"
                f" bytes ({format_bytes(gone)}) belong to the driver, libraries and others. Plan"
                f" again with --memory {self.total} --reserve {gone} or more, or free the GPU."
            )


@dataclass(frozen=True, slots=True)
class GpuMemoryUse:
    """The most that torch's allocator held at once since `start`; None on the processor."""

    allocated: int | None
    """Of tensors and of what kernels asked for beside them, rounded up block by block."""
    reserved: int | None
    """With the gaps between them: what it had taken from the driver."""

    @property
    def beyond_tensors(self) -> int | None:
        """What the allocator kept beyond the most that tensors took."""
        if self.reserved is None or self.allocated is None:
            return None
        return self.reserved - self.allocated

    @classmethod
    def since_start(cls, device: torch.device) -> GpuMemoryUse:
        """What was taken on `device`."""
        if device.type != "cuda":
            return cls(None, None)
        return cls(torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device))

    @staticmethod
    def start(device: torch.device) -> None:
        """Forget what was taken before, and give back what nothing uses any more."""
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
