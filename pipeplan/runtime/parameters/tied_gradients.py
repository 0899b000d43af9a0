"""The gradients of shared parameters on their way: to the owner, and as one sum back to copies.

An owner posts its receives as soon as it can; a layer elsewhere sends its sum when its
last backward of the step is over and then waits for the total in the same buffer, which the owner
cannot have sent before it has all of the sum.

Behind each of these messages comes one of a byte: whether anything has reached the gradient it is
of. Memory does not tell, as a gradient of zeros is one too; and what no gradient has reached in
any layer must stay as it is in every copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pipeplan.runtime.parameters.slots import ParameterSlots
from pipeplan.runtime.parameters.tied_parameters import Tie, Use, check_hooks, tags_of
from pipeplan.runtime.transport.base import Pending, Transport, wait_for

Holder = Callable[[Use], ParameterSlots]
"""Who has the gradient of a use of this rank."""


class _Flag:
    """A byte that travels: on the host, so that nobody waits for a GPU, and not of torch's memory.

    It must live until it has left or arrived, as every message.
    """

    __slots__ = ("_byte", "message")

    def __init__(self, *, raised: bool = False) -> None:
        self._byte = bytearray([raised])
        self.message = torch.frombuffer(self._byte, dtype=torch.uint8)
        """The same byte, for a transport."""

    @property
    def raised(self) -> bool:
        """What it says."""
        return bool(self._byte[0])

    def set(self, *, raised: bool) -> None:
        """Let it say this."""
        self._byte[0] = raised


@dataclass(slots=True)
class _Inbox:
    """What the owner gets from one copy elsewhere, and later sends back from."""

    buffer: Tensor
    rank: int
    """Of the copy."""
    flag: _Flag = field(default_factory=_Flag)
    """Whether anything has reached what is in the buffer."""
    pending: list[Pending] = field(default_factory=list)
    posted: bool = False
    """Whether the receive of the open step is posted."""

    def settle(self) -> None:
        """Wait for what is under way."""
        wait_for(self.rank, self.pending)
        self.pending.clear()


@dataclass(frozen=True, slots=True)
class _Total:
    """What a copy elsewhere waits for, and what it has sent meanwhile."""

    use: Use
    owner: int
    """Its rank."""
    pending: tuple[Pending, ...]
    sent: _Flag
    received: _Flag


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
            id(use): _Inbox(torch.empty_like(self._gradient(tie.owner, 0)), use.rank)
            for tie in ties
            if tie.owner.rank == here
            for use in tie.uses
            if use.rank != here
        }
        self._totals: dict[tuple[int, int], list[_Total]] = {}

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
                for tensor in (inbox.buffer, inbox.flag.message):
                    inbox.pending.append(self._transport.receive(tensor, use.rank, tag))
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
                    total = self._exchanged(use, tie.owner.rank, step)
                    self._totals.setdefault((stage, step), []).append(total)

    def _exchanged(self, use: Use, owner: int, step: int) -> _Total:
        """The sum of `use` goes to `owner`, the total comes back into its place."""
        buffer, tag, carrier = self._gradient(use, step), self._tags[id(use)], self._transport
        sent, received = _Flag(raised=self._reached(use, step)), _Flag()
        pending = (
            carrier.send(buffer, owner, tag),
            carrier.send(sent.message, owner, tag),
            carrier.receive(buffer, owner, tag),
            carrier.receive(received.message, owner, tag),
        )
        return _Total(use, owner, pending, sent, received)

    def collect(self, stage: int, step: int) -> None:
        """Add what other layers have summed to the gradients that `stage` owns, in chain order.

        Only what anything has reached: zeros that are added would be a gradient, too.
        """
        self.post(stage)
        for tie in self._ties:
            for use in tie.uses[1:] if tie.owner.stage == stage else ():
                total = self._gradient(tie.owner, step)
                if use.rank != self._transport.rank:
                    inbox = self._inboxes[id(use)]
                    inbox.settle()
                    inbox.posted = False
                    if inbox.flag.raised:
                        total.add_(inbox.buffer)
                elif self._reached(use, step):
                    part = self._gradient(use, step)
                    total.add_(part)
                    part.zero_()
                    self._say_reached(use, step, reached=False)

    def share(self, stage: int, step: int) -> None:
        """Give copies the finished gradients of the parameters that `stage` owns."""
        for tie, use in self._elsewhere(stage):
            inbox = self._inboxes[id(use)]
            inbox.buffer.copy_(self._gradient(tie.owner, step))
            inbox.flag.set(raised=self._reached(tie.owner, step))
            for tensor in (inbox.buffer, inbox.flag.message):
                sent = self._transport.send(tensor, use.rank, self._tags[id(use)])
                inbox.pending.append(sent)
        for tie in self._ties:
            for use in tie.uses[1:] if tie.owner.stage == stage else ():
                if use.rank == tie.owner.rank and use.parameter is not tie.owner.parameter:
                    self._gradient(use, step).copy_(self._gradient(tie.owner, step))
                    self._say_reached(use, step, reached=self._reached(tie.owner, step))

    def await_totals(self, stage: int, step: int) -> None:
        """Return once the copies of `stage` have their gradients of `step`."""
        for total in self._totals.pop((stage, step), []):
            wait_for(total.owner, total.pending)
            self._say_reached(total.use, step, reached=total.received.raised)

    def finish(self) -> None:
        """Wait until everything sent has left."""
        for inbox in self._inboxes.values():
            inbox.settle()

    def _gradient(self, use: Use, step: int) -> Tensor:
        return self._holder(use).gradient(use.parameter, step)

    def _reached(self, use: Use, step: int) -> bool:
        return self._holder(use).has_reached(use.parameter, step)

    def _say_reached(self, use: Use, step: int, *, reached: bool) -> None:
        self._holder(use).say_has_reached(use.parameter, step, reached=reached)
