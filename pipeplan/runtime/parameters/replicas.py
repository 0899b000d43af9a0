"""Copies of the whole pipeline that train together: which data each has, how gradients become one.

D replicas of a plan of P GPUs are P x D ranks: rank = replica * P + GPU, as a device mesh of shape
(D, P) counts. Each replica walks the same program on micro-batches of its own. When the gradients
of a step of one stage are complete they are added in the order of the replicas, divided by D, and
all go on with the same ones: ((g_0 + g_1) + .. + g_{D-1}) / D, whatever the timing and the size of
messages. Source: ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeplan.runtime.parameters.gradient_buckets import (
    BUCKET_BYTES,
    Bucket,
    Inflow,
    Outflow,
    buckets,
)
from pipeplan.runtime.transport.base import PeerLostError, Pending, wait_all
from pipeplan.runtime.transport.gloo import GlooTransport


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
    """One rank's side of the averages.

    Sums go up from replica to replica, means come back down the same way, bucket by bucket: the
    mean of one travels while later ones are still added up. Every replica passes the same phases
    in the same order, and each phase waits for the same one, or an earlier one, of a neighbour; so
    nobody waits in a circle, also where a send blocks until its receive is posted.
    """

    def __init__(self, transport: GlooTransport, size: int = BUCKET_BYTES) -> None:
        """Messages are of up to `size` bytes."""
        here, self._last = transport.replica, transport.replicas - 1
        self._size = size
        self._aside = torch.cuda.Stream() if transport.queues else None
        """Where sums are made while the GPU goes on computing."""
        self._buckets: list[Bucket] = []
        """Those of all stages begun."""
        self._raised = 0
        """How many of them were sent up before `settle`, by the first replica."""
        below, above = here - 1, here + 1
        self._is_first, self._is_last = here == 0, here == self._last
        self._from_below = Inflow(_named(transport.receive_across, below))
        self._from_above = Inflow(_named(transport.receive_across, above))
        self._upwards = Outflow(_named(transport.send_across, above))
        self._downwards = Outflow(_named(transport.send_across, below))

    def begin(self, gradients: Sequence[Tensor]) -> None:
        """Say that `gradients` are complete here; all replicas call it in one order.

        They must stay as they are until `settle`. What need not be waited for begins to travel.
        """
        more = buckets(gradients, self._size)
        self._buckets += more
        with torch.no_grad(), self._beside():
            if not self._is_first:
                self._from_below.want(more)
            if not self._is_last:
                self._from_above.want(more)
            if self._aside is not None:
                self._run()
                return
            while self._is_first and self._raised < len(self._buckets):
                if self._upwards.is_full:
                    break
                self._raise(self._buckets[self._raised])
                self._raised += 1

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """On the stream of its own, if it has one, behind all that has been computed."""
        if self._aside is None:
            yield
            return
        self._aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._aside):
            yield

    def settle(self) -> None:
        """Replace all gradients begun by their means over the replicas.

        Raises:
            PeerLostError: if another replica is gone or silent for too long.
        """
        if self._aside is not None:
            torch.cuda.current_stream().wait_stream(self._aside)
        else:
            with torch.no_grad():
                self._run()

    def _run(self) -> None:
        count = len(self._buckets)
        trip = 2 * self._last
        """Phases until the mean of a bucket can be back where its sum began."""
        for phase in range(count + trip if count else 0):
            if self._raised <= phase < count:
                self._raise(self._buckets[phase])
            if phase >= trip:
                self._lower(self._buckets[phase - trip])
        self._upwards.settle()
        self._downwards.settle()
        self._buckets.clear()
        self._raised = 0

    def average(self, gradients: Sequence[Tensor]) -> None:
        """`begin` and `settle`."""
        self.begin(gradients)
        self.settle()

    def _raise(self, bucket: Bucket) -> None:
        """Add what is here to the sum of the replicas below, and hand it on."""
        if self._is_first:
            sums = bucket.gathered()
        else:
            sums = self._from_below.take()
            bucket.add_to(sums)
        if self._is_last:
            bucket.put(sums.div_(self._last + 1))
        else:
            self._upwards.put(sums)

    def _lower(self, bucket: Bucket) -> None:
        """Take the mean from above, and hand it on."""
        if self._is_last:
            means = bucket.gathered()
        else:
            means = self._from_above.take()
            bucket.put(means)
        if not self._is_first:
            self._downwards.put(means)


@dataclass(frozen=True, slots=True)
class _Named:
    """A message whose loss says which replica is missed."""

    carried: Pending
    replica: int

    def wait(self) -> None:
        """See `Pending`."""
        with _naming(self.replica):
            wait_all([self.carried])


def _named(move: Callable[[Tensor, int], Pending], replica: int) -> Callable[[Tensor], Pending]:
    """`move` to or from one replica."""

    def moved(tensor: Tensor) -> Pending:
        with _naming(replica):
            return _Named(move(tensor, replica), replica)

    return moved


@contextmanager
def _naming(replica: int) -> Iterator[None]:
    """Says which replica is missed."""
    try:
        yield
    except PeerLostError as error:
        raise PeerLostError(f"replica {replica}: {error}") from error
