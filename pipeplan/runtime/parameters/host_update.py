"""Weights and gradients on the host, and updates of them there: (U1) to (U7).

An update takes the gradients of a step to the host, steps there what optimizers keep there, and
brings the weights back, in this order (Ren et al. 2021, ZeRO-Offload, section 4). What is behind
the gradients may run beside what the rank does next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipeplan.host_copy import thread_of_caller
from pipeplan.pinned import PinnedPool
from pipeplan.plan import Plan, Stage


def runs_beside(plan: Plan, stage: Stage) -> bool:
    """(U7): whether a rank goes on while the host makes the weights of its `stage`."""
    layers = plan.chain.layers[stage.first : stage.last + 1]
    waits = plan.semantics == "flush" or any(layer.waiting_gradient_bytes for layer in layers)
    return not waits and not any(each.offloads for each in plan.hosted(stage.gpu))


class HostQueue:
    """The host of one rank, which makes the weights of one stage after the other (U7).

    Threads of its own do everything: copies that are there for a whole training, and what an
    optimizer makes for a while, are no part of the device's bytes.
    """

    def __init__(self) -> None:
        self._fetching, self._updating = thread_of_caller("fetch"), thread_of_caller("update")

    def fetch(self, work: Callable[[], None]) -> None:
        """Do `work` at once, whatever was begun; returns when it is done."""
        self._fetching.submit(work).result()

    def begin(self, work: Callable[[], None]) -> Future[None]:
        """Do `work` behind what was begun before."""
        return self._updating.submit(work)


class HostUpdate:
    """Copies of some parameters and of their gradients, for as long as a training lasts."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor], queue: HostQueue
    ) -> None:
        """Copies the parameters as they are now.

        Args:
            parameters: at least one, on the device; a copy has all attributes that the user gave
                to its parameter, which optimizers may look at.
            gradients: one per parameter, of its shape.
            queue: the rank's.

        Raises:
            RankError: if the host has no such memory, or does not lock it.
        """
        self._pinned = PinnedPool()
        self._queue = queue
        self._begun: Future[None] | None = None
        device = parameters[0].device
        self._back = torch.cuda.Stream(device) if device.type == "cuda" else None
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
        self.settle()
        self._copied(self.weights, newest)

    def begin(
        self, gradients: Sequence[Tensor], weights: Sequence[Tensor], step: Callable[[], None]
    ) -> None:
        """Gradients come; returns when they are here, and goes on behind that until `settle`.

        Then `step` updates the copies, and the weights go back. The update before has ended.

        Args:
            gradients: on the device, one per parameter; theirs again when this returns.
            weights: on the device, overwritten until `settle`; no graph uses them.
            step: makes the newest copies out of the copies of gradients, or leaves them.
        """
        self.settle()
        self._copied(self.gradients, gradients)

        def work() -> None:
            step()
            _copy(weights, self.weights)
            if self._back is not None:
                self._back.synchronize()

        self._begun = self._queue.begin(partial(_work, self._back, work))

    def settle(self) -> None:
        """Wait for the update that has begun, if one has; what it raised is raised here."""
        begun, self._begun = self._begun, None
        if begun is not None:
            begun.result()

    def _copied(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Copies from the device, behind all that was issued there; returns when they are here."""
        device = sources[0].device
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

        def work() -> None:
            _copy(targets, sources)
            if stream is not None:
                stream.synchronize()

        self._queue.fetch(partial(_work, stream, work))


def _work(stream: Any, work: Callable[[], None]) -> None:
    """What is not of the thread: that nothing is recorded, and the stream."""
    with torch.no_grad(), nullcontext() if stream is None else torch.cuda.stream(stream):
        work()


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=True)
