"""Weights and gradients on the host, and updates of them there: (U1) to (U6).

An update takes the gradients of a step to the host, steps there what optimizers keep there, and
brings the weights back, in this order (Ren et al. 2021, ZeRO-Offload, section 4). A worker's
thread does it all: what an optimizer makes for a while is no part of the device's bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from pipeplan.pinned import PinnedPool


class HostUpdate:
    """Copies of some parameters and of their gradients, for as long as a training lasts."""

    def __init__(self, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor]) -> None:
        """Copies the parameters as they are now.

        Args:
            parameters: at least one, on the device; a copy has all attributes that the user gave
                to its parameter, which optimizers may look at.
            gradients: one per parameter, of its shape.

        Raises:
            RankError: if the host has no such memory, or does not lock it.
        """
        self._pinned = PinnedPool()
        self._worker = ThreadPoolExecutor(
            1,
            thread_name_prefix="pipeplan-update",
            initializer=torch.set_num_threads,
            initargs=(torch.get_num_threads(),),
        )
        self.weights = [nn.Parameter(self._room(each.detach())) for each in parameters]
        self.gradients = [self._room(gradient) for gradient in gradients]
        for copy, parameter in zip(self.weights, parameters, strict=True):
            vars(copy).update(vars(parameter))
        self.take(parameters)

    def _room(self, like: Tensor) -> Tensor:
        if like.is_cuda:
            return self._pinned.empty_like(like)
        return torch.empty_like(like, device="cpu")

    def take(self, newest: Sequence[Tensor]) -> None:
        """Let the copies of weights hold what `newest`, on the device, do."""
        self._run(newest, lambda: _copy(self.weights, newest))

    def update(
        self, gradients: Sequence[Tensor], weights: Sequence[Tensor], step: Callable[[], None]
    ) -> None:
        """Gradients come, `step` updates the copies, the weights go back; returns behind it.

        Args:
            gradients: on the device, one per parameter; stay as they are.
            weights: on the device, overwritten.
            step: makes the newest copies out of the copies of gradients, or leaves them.
        """

        def work() -> None:
            _copy(self.gradients, gradients)
            _settle(gradients)
            step()
            _copy(weights, self.weights)

        self._run(weights, work)

    def _run(self, on_device: Sequence[Tensor], work: Callable[[], None]) -> None:
        """Does `work` in the worker, on the caller's stream, behind all that was issued."""
        device = on_device[0].device
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._worker.submit(_work, stream, work).result()


def _work(stream: Any, work: Callable[[], None]) -> None:
    """What is not of the thread but of its caller: that nothing is recorded, and the stream."""
    with torch.no_grad(), nullcontext() if stream is None else torch.cuda.stream(stream):
        work()


def _settle(tensors: Sequence[Tensor]) -> None:
    """Copies from the device have ended."""
    if tensors and tensors[0].is_cuda:
        torch.cuda.current_stream(tensors[0].device).synchronize()


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=True)
