"""Copies of the whole pipeline that train together: which data each has, how gradients become one.

D replicas of a plan of P GPUs are P x D ranks: rank = replica * P + GPU, as a device mesh of shape
(D, P) counts. Each replica walks the same program on micro-batches of its own. When the gradients
of a step of one stage are complete they are added in the order of the replicas, divided by D, and
all go on with the same ones: ((g_0 + g_1) + .. + g_{D-1}) / D, whatever the timing. Source: ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeplan.runtime.peerloss import PeerLostError
from pipeplan.runtime.transport import GlooTransport, wait_all


@dataclass(slots=True)
class Shard:
    """Which micro-batches of the data one replica trains on: m of each m * D."""

    microbatches: int
    """m: per step and replica."""
    replica: int = 0
    replicas: int = 1
    first_step: int = 0
    drawn: int = 0
    """Micro-batches that all steps before `first_step` used, under any number of replicas."""

    def go_on(self, step: int, drawn: int) -> None:
        """Say that `drawn` micro-batches were used before `step`."""
        self.first_step, self.drawn = step, drawn

    def number(self, microbatch: int) -> int:
        """The number in the data of a micro-batch of the replica's own count."""
        step, index = divmod(microbatch, self.microbatches)
        return self.drawn_by(step) + self.replica * self.microbatches + index

    def drawn_by(self, step: int) -> int:
        """Micro-batches that all steps before `step` use."""
        return self.drawn + (step - self.first_step) * self.replicas * self.microbatches


class Replicas:
    """One rank's side of the averages."""

    def __init__(self, transport: GlooTransport) -> None:
        self._transport = transport

    def average(self, gradients: Sequence[Tensor]) -> None:
        """Replace `gradients` by their means over the replicas; all replicas call it in one order.

        The sum grows from replica to replica; the last one sends the mean back to all others.

        Raises:
            PeerLostError: if another replica is gone or silent for too long.
        """
        here, last = self._transport.replica, self._transport.replicas - 1
        sent = []
        with torch.no_grad():
            for gradient in gradients:
                if here:
                    before = torch.empty_like(gradient)
                    with _naming(here - 1):
                        wait_all([self._transport.receive_across(before, here - 1)])
                    gradient.copy_(before.add_(gradient))
                if here == last:
                    gradient.div_(last + 1)
                others = range(last) if here == last else (here + 1,)
                for other in others:
                    with _naming(other):
                        sent.append(self._transport.send_across(gradient, other))
        with _naming(here + 1 if here != last else None):
            wait_all(sent)
        if here != last:
            with _naming(last):
                wait_all([self._transport.receive_across(g, last) for g in gradients])


@contextmanager
def _naming(replica: int | None) -> Iterator[None]:
    """Says which replica is missed; None: one of those before the last."""
    try:
        yield
    except PeerLostError as error:
        who = "another replica" if replica is None else f"replica {replica}"
        raise PeerLostError(f"{who}: {error}") from error
