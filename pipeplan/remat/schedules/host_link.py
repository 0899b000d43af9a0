"""The way between a device and its host, and the transfers that wait on it.

One transfer at a time for both directions together, or, where the way is full duplex, one each.
Transfers run in order of issue, so a `wait` for one is a wait for all before it: (T2), (R4) of
docs/reference/remat-rules.md.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from pipeplan.units import ceil_div

_SECOND = 10**9


@dataclass(frozen=True)
class HostLink:
    """Bytes per second (None: transfers take no time), and how directions share the way.

    Attributes:
        duplex: whether they are independent.
        between: whether memory is taken and given back between computes only, so that what comes
            back cannot take the place of what leaves during the same compute.
    """

    bandwidth: int | None = None
    duplex: bool = False
    between: bool = False

    def time_ns(self, size: int) -> int:
        """Time of a transfer of `size` bytes."""
        return 0 if self.bandwidth is None else ceil_div(size * _SECOND, self.bandwidth)


@dataclass(frozen=True)
class Transfer:
    """One copy of a unit: to the host, or back."""

    unit: int
    out: bool


@dataclass
class TransferQueue:
    """Transfers that were issued and are not known to have ended, in order of issue."""

    duplex: bool
    pending: list[Transfer] = field(default_factory=list)

    def issue(self, transfer: Transfer) -> None:
        """Put `transfer` behind all others."""
        self.pending.append(transfer)

    def end(self, unit: int) -> list[Transfer]:
        """Take out all that has ended once the last transfer of `unit` has."""
        last = max(i for i, each in enumerate(self.pending) if each.unit == unit)
        over = {last}
        for index in range(last, -1, -1):
            # A later one that has ended started after this one, or after its own way out.
            behind = [self.pending[other] for other in over]
            if any(self._follows(each, self.pending[index]) for each in behind):
                over.add(index)
        ended = [each for index, each in enumerate(self.pending) if index in over]
        self.pending = [each for index, each in enumerate(self.pending) if index not in over]
        return ended

    def _follows(self, later: Transfer, earlier: Transfer) -> bool:
        return not self.duplex or later.out == earlier.out or later.unit == earlier.unit

    def most(self, size: Callable[[int], int], used: Collection[int] = ()) -> int:
        """The most bytes that queued units can hold on the device, however far the queue is (R4).

        A unit on its way out holds its bytes until its copy has ended (and while it is `used`),
        one on its way back from the begin of its copy. In one direction at a time, what comes
        takes the place of what left before it; with independent directions nothing is known.
        """
        if self.duplex:
            return sum(size(unit) for unit in {each.unit for each in self.pending})
        now = most = sum(size(each.unit) for each in self.pending if each.out)
        for each in self.pending:
            if each.unit not in used:
                now += -size(each.unit) if each.out else size(each.unit)
                most = max(most, now)
        return most


class Lanes:
    """When the device's computes, the ways to the host and back, and the host are free (ns)."""

    def __init__(self, link: HostLink) -> None:
        self.compute = 0
        self._link = link
        self._free = [0, 0]
        self._host = 0
        self._done: dict[int, int] = {}

    @property
    def end(self) -> int:
        """When all that was issued has ended."""
        return max(self.compute, self._host, *self._free)

    def run(self, time_ns: int) -> tuple[int, int]:
        """Start and end of a computation behind all others (T1)."""
        start = self.compute
        self.compute += time_ns
        return start, self.compute

    def host(self, time_ns: int, reads: Iterable[int], writes: Iterable[int]) -> tuple[int, int]:
        """Start and end of what the host computes: behind copies of what it reads (T5)."""
        start = max([self.compute, self._host, *(self._done.get(each, 0) for each in reads)])
        self._host = start + time_ns
        self._done.update(dict.fromkeys(writes, self._host))
        return start, self._host

    def wait(self, unit: int) -> tuple[int, int]:
        """From now to the end of the last transfer of `unit` (T4)."""
        start = self.compute
        self.compute = max(start, self._done[unit])
        return start, self.compute

    def transfer(self, transfer: Transfer, size: int) -> tuple[int, int]:
        """Start and end of a copy of `size` bytes (T2), (T3)."""
        way = int(self._link.duplex and not transfer.out)
        # A unit comes back no earlier than it has left; on one way that follows from the order.
        start = max(self.compute, self._free[way], self._done.get(transfer.unit, 0))
        end = start + self._link.time_ns(size)
        self._free[way] = self._done[transfer.unit] = end
        return start, end
