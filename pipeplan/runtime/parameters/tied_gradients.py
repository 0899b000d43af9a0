"""The gradients of shared parameters on their way: to the owner, and as one sum back to copies.

An owner posts its receives as soon as it can; a layer elsewhere sends its sum when its
last backward of the step is over and then waits for the total in the same buffer, which the owner
cannot have sent before it has all of the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pipeplan.runtime.parameters.slots import ParameterSlots
from pipeplan.runtime.parameters.tied_parameters import Tie, Use, check_hooks, tags_of
from pipeplan.runtime.transport.base import Pending, Transport, wait_all

Holder = Callable[[Use], ParameterSlots]
"""Who has the gradient of a use of this rank."""


@dataclass(slots=True)
class _Inbox:
    """What the owner gets from one copy elsewhere, and later sends back from."""

    buffer: Tensor
    pending: list[Pending] = field(default_factory=list)
    posted: bool = False
    """Whether the receive of the open step is posted."""

    def settle(self) -> None:
        """Wait for what is under way."""
        wait_all(self.pending)
        self.pending.clear()


class TiedGradients:
    """One rank's side of all shared parameters."""

    def __init__(
        self, ties: Sequence[Tie], holder: Holder, transport: Transport, first_tag: int
    ) -> None:
        """Tags are those of `tags_of`."""
        self._ties = ties
        self._holder = holder
        self._transport = transport
        self._tags = tags_of(ties, first_tag)
        here = transport.rank
        self._inboxes = {
            id(use): _Inbox(torch.empty_like(self._gradient(tie.owner, 0)))
            for tie in ties
            if tie.owner.rank == here
            for use in tie.uses
            if use.rank != here
        }
        self._totals: dict[tuple[int, int], list[Pending]] = {}

    def tensors(self) -> list[Tensor]:
        """Everything that lives for the whole run."""
        return [inbox.buffer for inbox in self._inboxes.values()]

    def inboxes(self) -> Iterator[tuple[int, Tensor]]:
        """(stage of the owner, what it has room for) of each copy elsewhere."""
        for tie in self._ties:
            found = (self._inboxes.get(id(use)) for use in tie.uses)
            yield from ((tie.owner.stage, inbox.buffer) for inbox in found if inbox)

    def check_hooks(self) -> None:
        """Refuse hooks on shared parameters.

        Raises:
            InputError: if there is one.
        """
        for tie in self._ties:
            check_hooks(tie)

    def has(self, stage: int) -> bool:
        """Whether `stage` uses a shared parameter."""
        return any(use.stage == stage for tie in self._ties for use in tie.uses)

    def post(self, stage: int) -> None:
        """Post the receives of the parameters that `stage` owns, once per step."""
        for _, use in self._elsewhere(stage):
            inbox = self._inboxes[id(use)]
            if not inbox.posted:
                inbox.settle()
                tag = self._tags[id(use)]
                inbox.pending.append(self._transport.receive(inbox.buffer, use.rank, tag))
                inbox.posted = True

    def _elsewhere(self, stage: int) -> Iterator[tuple[Tie, Use]]:
        """Copies on other ranks of what `stage` owns."""
        for tie in self._ties:
            if tie.owner.stage == stage:
                for use in tie.uses[1:]:
                    if use.rank != self._transport.rank:
                        yield tie, use

    def offer(self, stage: int, step: int) -> None:
        """Send the sums of `stage` to owners elsewhere."""
        here = self._transport.rank
        for tie in self._ties:
            for use in tie.uses[1:]:
                if use.stage == stage and tie.owner.rank != here:
                    buffer, tag = self._gradient(use, step), self._tags[id(use)]
                    sent = self._transport.send(buffer, tie.owner.rank, tag)
                    total = self._transport.receive(buffer, tie.owner.rank, tag)
                    self._totals.setdefault((stage, step), []).extend([sent, total])

    def collect(self, stage: int, step: int) -> None:
        """Add what other layers have summed to the gradients that `stage` owns, in chain order."""
        self.post(stage)
        for tie in self._ties:
            for use in tie.uses[1:] if tie.owner.stage == stage else ():
                total = self._gradient(tie.owner, step)
                if use.rank != self._transport.rank:
                    inbox = self._inboxes[id(use)]
                    inbox.settle()
                    inbox.posted = False
                    total.add_(inbox.buffer)
                else:
                    part = self._gradient(use, step)
                    total.add_(part)
                    part.zero_()

    def share(self, stage: int, step: int) -> None:
        """Give copies the finished gradients of the parameters that `stage` owns."""
        for tie, use in self._elsewhere(stage):
            inbox = self._inboxes[id(use)]
            inbox.buffer.copy_(self._gradient(tie.owner, step))
            tag = self._tags[id(use)]
            inbox.pending.append(self._transport.send(inbox.buffer, use.rank, tag))
        for tie in self._ties:
            for use in tie.uses[1:] if tie.owner.stage == stage else ():
                if use.rank == tie.owner.rank and use.parameter is not tie.owner.parameter:
                    self._gradient(use, step).copy_(self._gradient(tie.owner, step))

    def await_totals(self, stage: int, step: int) -> None:
        """Return once the copies of `stage` have their gradients of `step`."""
        wait_all(self._totals.pop((stage, step), []))

    def finish(self) -> None:
        """Wait until everything sent has left."""
        for inbox in self._inboxes.values():
            inbox.settle()

    def _gradient(self, use: Use, step: int) -> Tensor:
        return self._holder(use).gradient(use.parameter, step)
