"""Which transfer a link, or a way to the host, takes next."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush

Resource = tuple[int | str, int]
"""A link by its two GPUs, or a GPU's way to the host by direction (`host`: both) and GPU."""


class LinkStates(ABC):
    """All links of a run, and the ways to the host, which carry like links.

    A transfer is offered once its SEND and RECV have both happened; an OFFLOAD when it is issued,
    a PREFETCH once it is posted and its OFFLOAD has ended.
    """

    @abstractmethod
    def offer(self, op: int, microbatch: int, ready: int) -> None:
        """The transfer can start at `ready`."""

    @abstractmethod
    def grant(self) -> Iterator[tuple[int, int, int]]:
        """(op, micro-batch, start) of transfers whose start is now certain."""

    @abstractmethod
    def idle(self) -> bool:
        """Whether nothing can be granted before something else is offered."""


@dataclass(frozen=True, slots=True)
class LateTransfer:
    """A transfer that could not start when the plan says."""

    op: int
    microbatch: int
    due: int
    ready: int
    reason: str


class PlannedLinks(LinkStates):
    """Each link takes its transfers in the plan's order.

    Args:
        queues: per link its transfers as (op, micro-batch), in that order.
        duration: per op, in ns.
        due: (op, micro-batch) -> planned start, or None for the eager clock.
    """

    def __init__(
        self,
        queues: dict[Resource, list[tuple[int, int]]],
        resource: dict[int, Resource],
        duration: tuple[int, ...],
        due: Callable[[int, int], int] | None = None,
    ) -> None:
        self.late: list[LateTransfer] = []
        self._queues, self._resource, self._duration, self._due = queues, resource, duration, due
        self._head = dict.fromkeys(queues, 0)
        self._free: dict[Resource, int] = {}
        self._offered: dict[tuple[int, int], int] = {}
        self._changed: set[Resource] = set()

    def offer(self, op: int, microbatch: int, ready: int) -> None:
        """See `LinkStates`."""
        self._offered[op, microbatch] = ready
        self._changed.add(self._resource[op])

    def idle(self) -> bool:
        """See `LinkStates`."""
        return not self._changed

    def grant(self) -> Iterator[tuple[int, int, int]]:
        """See `LinkStates`."""
        changed, self._changed = self._changed, set()
        for link in changed:
            queue = self._queues[link]
            while self._head[link] < len(queue) and queue[self._head[link]] in self._offered:
                op, microbatch = queue[self._head[link]]
                self._head[link] += 1
                yield op, microbatch, self._start(link, op, microbatch)

    def head(self, op: int) -> tuple[int, int]:
        """The (op, micro-batch) that must come next on the link of `op`."""
        link = self._resource[op]
        return self._queues[link][self._head[link]]

    def _start(self, link: Resource, op: int, microbatch: int) -> int:
        ready, free = self._offered.pop((op, microbatch)), self._free.get(link)
        start = ready if free is None else max(ready, free)
        if self._due is not None:
            due = self._due(op, microbatch)
            if due < start:
                reason = "both its ends are ready" if start == ready else "the link is free"
                self.late.append(LateTransfer(op, microbatch, due, start, reason))
            start = due
        self._free[link] = start + self._duration[op]
        return start


class QueueLinks(LinkStates):
    """Each link takes whatever is ready first: for programs without a plan's order.

    Asked for a grant only when no rank can move, it names the transfer that starts first of all
    offered ones; whatever is offered later follows from one granted before, so it is not earlier.
    """

    def __init__(self, resource: dict[int, Resource], duration: tuple[int, ...]) -> None:
        self._resource, self._duration = resource, duration
        self._free: dict[Resource, int] = defaultdict(int)
        self._heap: list[tuple[int, int, int, int]] = []
        """(earliest start, ready, micro-batch, op)."""

    def offer(self, op: int, microbatch: int, ready: int) -> None:
        """See `LinkStates`."""
        heappush(self._heap, (ready, ready, microbatch, op))

    def idle(self) -> bool:
        """See `LinkStates`."""
        return not self._heap

    def grant(self) -> Iterator[tuple[int, int, int]]:
        """See `LinkStates`."""
        while self._heap:
            start, ready, microbatch, op = heappop(self._heap)
            link = self._resource[op]
            if self._free[link] > start:
                heappush(self._heap, (self._free[link], ready, microbatch, op))
                continue
            self._free[link] = start + self._duration[op]
            yield op, microbatch, start
            return
