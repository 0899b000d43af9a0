"""The shortest 1F1B period of a tiny chain by trying every integer schedule.

Shares nothing with the solver: bytes are counted from (P1)-(P5), op by op.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from pipeplan.chain import Chain


@dataclass
class Brute:
    """All integer 1F1B schedules of one chain on one allocation, op after op in chain order.

    Counts bytes from the definition (P1)-(P5): how many micro-batches are between two events at
    the start of a compute op. Chain order lets each op start within a period of its input.
    """

    chain: Chain
    gpu: tuple[int, ...]
    memory: int
    bandwidth: int | None
    period: int
    used: dict[frozenset[int], int] = field(default_factory=dict)
    start: dict[int, int] = field(default_factory=dict)
    sent: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        layers = self.chain.layers
        self.layer = [*range(len(layers)), *reversed(range(len(layers)))]
        self.length = [x.forward_ns for x in layers] + [x.backward_ns for x in reversed(layers)]
        self.place = [frozenset([self.gpu[layer]]) for layer in self.layer]

    def feasible(self) -> bool:
        """Whether some schedule has this period and fits."""
        return self._compute(0, range(1))

    def fits_one_by_one(self) -> bool:
        """Whether one micro-batch at a time fits: every wait only adds bytes to that."""
        now = 0
        for task, length in enumerate(self.length):
            self.start[task], now = now, now + length
            if task + 1 < len(self.length) and self.place[task] != self.place[task + 1]:
                self.sent[task], now = now, now + self._wire(task)
        return all(self._bytes(task) <= self.memory for task in self.start)

    def _compute(self, task: int, starts: range) -> bool:
        if task == len(self.layer):
            return all(self._bytes(q) <= self.memory for q in range(task))
        for begin in self._free(self.place[task], self.length[task], starts):
            self.start[task] = begin
            end = begin + self.length[task]
            crosses = task + 1 < len(self.layer) and self.place[task] != self.place[task + 1]
            go = self._transfer if crosses else self._compute
            following = task if crosses else task + 1
            if self._occupied(self.place[task], begin, self.length[task], go, following, end):
                return True
        return False

    def _transfer(self, task: int, starts: range) -> bool:
        link, length = self.place[task] | self.place[task + 1], self._wire(task)
        if not length:  # leaving at once is best: neither buffer can need a second slot
            starts = starts[:1]
        for begin in self._free(link, length, starts):
            self.sent[task] = begin
            if self._occupied(link, begin, length, self._compute, task + 1, begin + length):
                return True
        return False

    def _mask(self, begin: int, length: int) -> int:
        return sum(1 << ((begin + tick) % self.period) for tick in range(length))

    def _free(self, place: frozenset[int], length: int, starts: range) -> Iterator[int]:
        if length > self.period:
            return
        for begin in starts:
            if not self.used.get(place, 0) & self._mask(begin, length):
                yield begin

    def _occupied(
        self, place: frozenset[int], begin: int, length: int, go: Any, following: int, end: int
    ) -> bool:
        mask = self._mask(begin, length)
        self.used[place] = self.used.get(place, 0) | mask
        found: bool = go(following, range(end, end + self.period))
        self.used[place] ^= mask
        return found

    def _size(self, task: int) -> int:
        """Bytes of what the task produces."""
        forward = task < len(self.chain.layers)
        return self.chain.input_of(self.layer[task] + forward)

    def _wire(self, task: int) -> int:
        return -(-self._size(task) * 10**9 // self.bandwidth) if self.bandwidth else 0

    def _alive(self, since: int, until: int, now: int) -> int:
        """Micro-batches m with since + m T <= now < until + m T."""
        return (now - since) // self.period - (now - until) // self.period

    def _bytes(self, task: int) -> int:
        here, now, last = self.place[task], self.start[task], len(self.layer) - 1
        total = 0
        for index, layer in enumerate(self.chain.layers):
            if here != self.place[index]:
                continue
            back = self.start[last - index] + self.length[last - index]
            copies = self._alive(self.start[index] + self.length[index], back, now)
            total += 3 * layer.weight_bytes + copies * layer.saved_bytes
        for q in range(last):
            until, end = self.start[q + 1], self.start[q] + self.length[q]
            if self.layer[q] == self.layer[q + 1]:
                continue
            if self.place[q] == self.place[q + 1]:
                waiting = self._alive(end, until, now) if self.place[q] == here else 0
                total += self._size(q) * waiting
            else:
                out = max(1, -((end - self.sent[q] - self._wire(q)) // self.period))
                into = max(1, -((self.sent[q] - until) // self.period))
                slots = out * (self.place[q] == here) + into * (self.place[q + 1] == here)
                total += self._size(q) * slots
        source = self.chain.input_of(self.layer[task])
        layer = self.chain.layers[self.layer[task]]
        if task < len(self.chain.layers):
            return total + max(layer.saved_bytes, source) + layer.output_bytes
        return total + source + layer.output_bytes


def allocations(layers: int, gpus: int) -> Iterator[tuple[int, ...]]:
    """Every way to share `layers` between at most `gpus` equal GPUs, once."""
    if not layers:
        yield ()
        return
    for head in allocations(layers - 1, gpus):
        yield from (((*head, gpu)) for gpu in range(min(gpus, max(head, default=-1) + 2)))


def brute_period(
    chain: Chain, gpus: int, memory: int, bandwidth: int | None, least: int = 1
) -> int | None:
    """The shortest integer 1F1B period; None if not even one micro-batch at a time fits.

    It is known to be `least` or more, as that of more memory is.
    """
    loads = [layer.forward_ns + layer.backward_ns for layer in chain.layers]
    sizes = [layer.output_bytes for layer in chain.layers[:-1]]
    longest = sum(loads) + (2 * sum(sizes) if bandwidth else 0)
    fitting = [
        gpu
        for gpu in allocations(len(loads), gpus)
        if Brute(chain, gpu, memory, bandwidth, longest).fits_one_by_one()
    ]
    for period in range(max(least, *loads), longest + 1) if fitting else ():
        for gpu in fitting:
            busiest = max(sum(loads[i] for i, g in enumerate(gpu) if g == p) for p in set(gpu))
            if busiest <= period and Brute(chain, gpu, memory, bandwidth, period).feasible():
                return period
    return None
