"""A lower bound from bytes on plans that recompute: for every allocation and every k.

Take a plan of period T per micro-batch on P GPUs. Over time, the memories of all GPUs together
hold no more than their budgets in the mean, and all GPUs compute no longer than T each:

    sum over layers of H(l)  <=  T * (all budgets - states of all layers)
    sum over layers of forward(l) + backward(l) + again(l)  <=  P * T

H(l) are bytes times ns of one micro-batch (Little's law), again(l) what the layer's choice takes
longer. A layer keeps all or what one of its options keeps, for R(l) ns at least, the work of
layers l.. once. Or it is in a run that is computed again; the run's input is kept from R of its
first layer on until the run's B begins, and during B what the first layer saves of it (V4). Beside
that, F and B need what (M3) counts beyond what is kept, while they run.

Let p >= 0 be a price of memory, in ns for a byte times a ns. The first line times p, and the
second one, give

    T * (P + p * room)  >=  v(p),  the least of (time + p * bytes * time) over all choices,

and v(p) is a shortest path along the chain, since choices of layers meet only where one layer's
saved output is the next one's saved input. At the best price two choices are equally good, of
which one needs more memory than there is and one more time; it is found in a few steps (Eisner
and Severance 1976). Source: ours; it extends `bounds.load.residency_bound`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from typing import NamedTuple

from pipeplan.chain import Layer
from pipeplan.ilp.costs import CostModel


class TimeAndBytes(NamedTuple):
    """What all layers take together for one micro-batch."""

    time: int
    """Ns of computation."""
    held: int
    """Bytes times ns."""


class Price(NamedTuple):
    """Ns for a byte times a ns: `of_bytes` / `of_time`."""

    of_bytes: int
    of_time: int

    def of(self, choice: TimeAndBytes) -> int:
        """What a choice costs, times `of_time`."""
        return self.of_time * choice.time + self.of_bytes * choice.held


class _Way(NamedTuple):
    """How a layer that is in no run computes."""

    again: int
    held: int
    """Bytes times ns, but for what is kept of its input."""
    saved_input: int
    stays: int
    """Ns that its input is kept."""
    saved_output: int


class _Running(NamedTuple):
    """A layer in a run that is computed again."""

    again: int
    backward: int
    held: int
    given: int
    """Bytes of its input, which the run keeps until its B if it is its first layer."""
    saved_input: int
    """As much of it as is there during B."""
    stays: int


def average_bytes_bound(costs: CostModel) -> Fraction:
    """The least period per micro-batch by averages of time and bytes, whatever is recomputed.

    At other speeds than 1 a run's time is rounded differently: nothing is claimed there, and
    nothing where states leave no room, which is no matter of the period.
    """
    room = sum(costs.budgets) - sum(costs.segment(i, i).states for i in range(costs.layers))
    if room <= 0 or any(gpu.speed != 1 for gpu in costs.cluster.gpus):
        return Fraction(0)
    return _Averages(costs, room).bound()


@dataclass(frozen=True)
class _Averages:
    """All choices of one chain, and what there is for them."""

    costs: CostModel
    room: int

    def bound(self) -> Fraction:
        """The largest bound of any price."""
        paths = _Paths(self.costs)
        quick, small = paths.cheapest(Price(0, 1)), paths.cheapest(Price(1, 0))
        best = max(Fraction(quick.time, self.costs.gpus), Fraction(small.held, self.room))
        while self._lacks_room(quick) and not self._lacks_room(small):
            price = Price(small.time - quick.time, quick.held - small.held)
            found = paths.cheapest(price)
            capacity = price.of_time * self.costs.gpus + price.of_bytes * self.room
            best = max(best, Fraction(price.of(found), capacity))
            if price.of(found) == price.of(quick):
                break
            if self._lacks_room(found):
                quick = found
            else:
                small = found
        return best

    def _lacks_room(self, choice: TimeAndBytes) -> bool:
        """Whether memory is full at a period at which there is time."""
        return choice.held * self.costs.gpus > choice.time * self.room


class _Paths:
    """Choices of all layers as paths along the chain."""

    def __init__(self, costs: CostModel) -> None:
        chain = costs.chain
        work = [layer.forward_ns + layer.backward_ns for layer in chain.layers]
        stays = list(accumulate(reversed(work)))[::-1]
        self._work = stays[0]
        self._ways: list[list[_Way]] = []
        self._runs: list[_Running] = []
        for index, layer in enumerate(chain.layers):
            gradients = layer.gradient_of_output_bytes + chain.gradient_of_input(index)
            under = [layer, *(layer.under(option) for option in layer.options)]
            self._ways.append([_way(layer, one, stays[index], gradients) for one in under])
            light = layer.light_workspace_bytes + layer.output_bytes  # (V3)
            running = layer.forward_ns * (light + _ahead(layer))
            running += layer.backward_ns * (_kept(layer) + _back(layer, gradients))
            self._runs.append(
                _Running(
                    layer.forward_ns,
                    layer.backward_ns,
                    running,
                    chain.input_of(index),
                    min(chain.input_of(index), layer.saved_input_bytes),
                    stays[index],
                )
            )

    def cheapest(self, price: Price) -> TimeAndBytes:
        """The choice that costs least; of such the one that holds least, then the quickest."""

        def paid(found: TimeAndBytes) -> tuple[int, int, int]:
            return price.of(found), found.held, found.time

        ends = {0: TimeAndBytes(self._work, 0)}
        """By bytes that the layer before saves of its output."""
        inside: dict[int, TimeAndBytes] = {}
        """Runs that go on, by bytes of their input that are there until their B alone."""
        for ways, run in zip(self._ways, self._runs, strict=True):
            for gone, begun in _begun(ends, run):
                if gone not in inside or paid(begun) < paid(inside[gone]):
                    inside[gone] = begun
            inside = {
                gone: TimeAndBytes(
                    before.time + run.again, before.held + run.held - gone * run.backward
                )
                for gone, before in inside.items()
            }
            found = {0: min(inside.values(), key=paid)}
            for way in ways:
                begun = min(_entered(ends, way.saved_input, way.stays), key=paid)
                ended = TimeAndBytes(begun.time + way.again, begun.held + way.held)
                known = found.get(way.saved_output)
                if known is None or paid(ended) < paid(known):
                    found[way.saved_output] = ended
            ends = found
        return min(ends.values(), key=paid)


def _entered(ends: dict[int, TimeAndBytes], size: int, stays: int) -> list[TimeAndBytes]:
    """What lies before a piece, with the part of its input that the layer before does not save."""
    return [
        TimeAndBytes(before.time, before.held + max(0, size - saved) * stays)
        for saved, before in ends.items()
    ]


def _begun(ends: dict[int, TimeAndBytes], run: _Running) -> Iterator[tuple[int, TimeAndBytes]]:
    """What lies before a run, with the run's input: all of it until B, then what B finds there.

    The input counts as whole during the backwards, whose length is not known yet. With each answer
    comes how many bytes too many these are: each layer of the run takes them off for its backward.
    """
    for saved, before in ends.items():
        given, stay = (max(0, size - saved) for size in (run.given, run.saved_input))
        held = given * run.stays + stay * run.again
        yield given - stay, TimeAndBytes(before.time, before.held + held)


def _way(own: Layer, one: Layer, stays: int, gradients: int) -> _Way:
    """A layer that runs as `one`, itself or under an option, whose bytes stay for `stays` ns."""
    again = one.forward_ns + one.backward_ns - own.forward_ns - own.backward_ns
    stays += again
    held = _kept(one) * (stays - one.forward_ns) + one.forward_ns * _ahead(one)
    held += one.backward_ns * _back(one, gradients)
    return _Way(again, held, one.saved_input_bytes, stays, one.saved_output_bytes)


def _kept(layer: Layer) -> int:
    """Bytes from forward to backward, without the input."""
    return layer.saved_bytes + layer.saved_output_bytes


def _ahead(layer: Layer) -> int:
    """Bytes while the forward runs, without the input: (M3)."""
    return layer.saved_bytes + layer.forward_workspace_bytes + layer.output_bytes


def _back(layer: Layer, gradients: int) -> int:
    """Bytes while the backward runs, beyond what is kept: (M3)."""
    return layer.backward_workspace_bytes + gradients
