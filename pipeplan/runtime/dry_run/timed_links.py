"""Links that take their planned time, as the model has them: docs/reference/model.md (O8).

A transfer starts when its SEND is issued, its RECV posted, and its link has carried every transfer
that the plan has before it there; under half duplex both directions are one link. The sender knows
the first moment, the receiver the second; each tells the other with a real message, and both keep
the same account of the link. Whoever waits for a transfer waits for its end. On the virtual clock
nothing depends on when a real message arrives, only on what it says; on the sleeping clock, which
all ranks of a machine share, moments are real. A way to the host is one rank's alone; the one here
is for the virtual clock.

Source: ours; the idea of time that travels with messages is Lamport's (1978).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from heapq import merge
from itertools import count
from typing import Protocol

import torch
from torch import Tensor

from pipeplan.errors import InternalError
from pipeplan.plan import Op, OpKind, Plan
from pipeplan.runtime.dry_run.clock import RankClock
from pipeplan.runtime.transport.base import Pending, Transport, WrappedTransport

STAMP_TAGS = 1 << 20
"""Added to a message's tag for the stamp that says when it was sent."""
_POST_TAGS = 2 * STAMP_TAGS
"""Added to a message's tag for the stamp that says when its receive was posted."""

_Link = Hashable
_Key = tuple[int, int]
"""(tag, or position of a transfer to or from the host; micro-batch)."""


@dataclass(frozen=True, slots=True)
class Crossing:
    """The planned transfers of one boundary and direction, or of one stage to or from the host."""

    link: _Link
    ops: tuple[Op, ...]
    """By copy."""
    position: int
    """(T1), (H5)."""


class LinkTimeline:
    """When each transfer of one link starts and ends, in the plan's order."""

    def __init__(self, order: Iterator[tuple[_Key, int]]) -> None:
        """Takes (transfer, duration in ns) in the order in which the link carries them."""
        self._order = order
        self._free = 0
        self._known: dict[_Key, _Moment] = {}
        self._ends: dict[_Key, int] = {}

    def add(self, key: _Key, moment: _Moment) -> None:
        """Say that this rank has done its part of a transfer."""
        self._known[key] = moment

    def end(self, key: _Key) -> int:
        """When the transfer ends; waits for what the other rank has to say about it.

        Raises:
            InternalError: if a transfer that comes before it is not known here: a wrong program.
        """
        while key not in self._ends:
            head, duration = next(self._order)
            moment = self._known.pop(head, None)
            if moment is None:
                raise InternalError(
                    f"link: transfer {key} ends before {head} begins, which the plan has"
                    " before it on their link. Report this plan."
                )
            self._free = max(moment.ready(), self._free) + duration
            self._ends[head] = self._free
        return self._ends.pop(key)


class _Moment(Protocol):
    """From when on a transfer may start."""

    def ready(self) -> int:
        """The time in ns, once it is known."""


@dataclass(frozen=True, slots=True)
class _Own:
    """What this rank alone decides."""

    time: int

    def ready(self) -> int:
        return self.time


@dataclass(frozen=True, slots=True)
class _Stamps:
    """This rank's own moment of a transfer, and the one that the other rank sends."""

    own: int
    other: Tensor
    pending: Pending

    def ready(self) -> int:
        self.pending.wait()
        return max(self.own, int(self.other))


class TimedTransport(WrappedTransport):
    """Carries messages that know the time."""

    def __init__(
        self,
        transport: Transport,
        clock: RankClock,
        crossings: Mapping[int, Crossing],
        plan: Plan,
        microbatches: int,
    ) -> None:
        """Wraps a transport for one run.

        Args:
            transport: what really moves the messages.
            clock: this rank's.
            crossings: by tag.
            plan: gives the order of transfers on each link.
            microbatches: of the whole run, counted from 0.
        """
        super().__init__(transport)
        self._clock = clock
        self._links = {tag: crossing.link for tag, crossing in crossings.items()}
        self._accounts = _accounts(plan, crossings, microbatches)
        self._next: dict[int, Iterator[int]] = defaultdict(count)
        """By tag, the micro-batch of the next message here."""

    def send(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        """See `Transport`; complete when the link has carried it."""
        return self._exchange(
            self._transport.send(tensor, peer, tag), peer, tag, STAMP_TAGS, _POST_TAGS
        )

    def receive(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        """See `Transport`; complete when the link has carried it."""
        return self._exchange(
            self._transport.receive(tensor, peer, tag), peer, tag, _POST_TAGS, STAMP_TAGS
        )

    def _exchange(self, carried: Pending, peer: int, tag: int, tell: int, ask: int) -> Pending:
        """Tell the other end this end's moment, and ask for its moment."""
        own, other = torch.tensor([self._clock.now()]), torch.zeros(1, dtype=torch.int64)
        told = self._transport.send(own, peer, tell + tag)
        asked = self._transport.receive(other, peer, ask + tag)
        key, account = (tag, next(self._next[tag])), self._accounts[self._links[tag]]
        account.add(key, _Stamps(self._clock.now(), other, asked))
        return _Transfer(account, key, (carried, told), own, self._clock)


class _Transfer:
    def __init__(
        self,
        account: LinkTimeline,
        key: _Key,
        parts: tuple[Pending, ...],
        own: Tensor,
        clock: RankClock,
    ) -> None:
        self._account, self._key, self._parts, self._clock = account, key, parts, clock
        self._own = own  # lives until it is sent

    def wait(self) -> None:
        end = self._account.end(self._key)
        for part in self._parts:
            part.wait()
        self._clock.until(end)


class VirtualHostLinks:
    """The way between one rank and its host."""

    def __init__(self, plan: Plan, rank: int, clock: RankClock, microbatches: int) -> None:
        """Begins with nothing under way.

        Args:
            plan: gives the transfers, their times and their order.
            rank: whose way it is.
            clock: this rank's.
            microbatches: of the whole run, counted from 0.
        """
        host = plan.cluster.host
        crossings = {
            _position(plan, *named): Crossing(
                named[0] if host and host.duplex == "full" else None,
                tuple(op for op in plan.ops if (op.kind, op.stage) == named),
                _position(plan, *named),
            )
            for named in {(op.kind, op.stage) for op in plan.ops if op.kind.is_host}
            if plan.stages[named[1]].gpu == rank
        }
        self._plan = plan
        self._clock = clock
        self._links = {position: crossing.link for position, crossing in crossings.items()}
        self._accounts = _accounts(plan, crossings, microbatches)

    def start(self, kind: OpKind, stage: int, microbatch: int) -> Pending:
        """See `sleeping.HostLinks`; complete at the virtual time when the way has carried it."""
        position = _position(self._plan, kind, stage)
        account = self._accounts[self._links[position]]
        account.add((position, microbatch), _Own(self._clock.now()))
        return _OwnTransfer(account, (position, microbatch), self._clock)


class _OwnTransfer:
    def __init__(self, account: LinkTimeline, key: _Key, clock: RankClock) -> None:
        self._account, self._key, self._clock = account, key, clock

    def wait(self) -> None:
        self._clock.until(self._account.end(self._key))


def _position(plan: Plan, kind: OpKind, stage: int) -> int:
    """(H5)."""
    return 4 * len(plan.stages) + 2 * stage + (kind is OpKind.PREFETCH)


def _accounts(
    plan: Plan, crossings: Mapping[int, Crossing], microbatches: int
) -> dict[_Link, LinkTimeline]:
    flow = plan.microbatches if plan.semantics == "flush" else microbatches
    return {
        link: LinkTimeline(_carried(plan, link, crossings, flow, microbatches))
        for link in {crossing.link for crossing in crossings.values()}
    }


def _carried(
    plan: Plan, link: _Link, crossings: Mapping[int, Crossing], flow: int, microbatches: int
) -> Iterator[tuple[_Key, int]]:
    """The transfers of a link in the plan's order: by planned time; see (O8) for equal times.

    Micro-batches flow in groups of `flow`, each group behind the one before it: steps of a flush.
    """
    for first in range(0, microbatches, flow):
        streams = [
            _stream(plan, tag, crossing, op, first, min(flow, microbatches - first))
            for tag, crossing in crossings.items()
            if crossing.link == link
            for op in crossing.ops
        ]
        for _, duration, _, _, key in merge(*streams):
            yield key, duration


def _stream(
    plan: Plan, tag: int, crossing: Crossing, op: Op, first: int, flow: int
) -> Iterator[tuple[int, int, int, int, _Key]]:
    """(T4) of one op: planned time, duration, micro-batch, position, name."""
    for local in range(op.copy_, flow, plan.k):
        due = (local // plan.k + op.shift) * plan.period_ns + op.start_ns
        yield due, op.duration_ns, first + local, crossing.position, (tag, first + local)
