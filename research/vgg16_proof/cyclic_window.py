"""A bound on one allocation, or on all that begin alike: c micro-batches go round and round.

By `entrance` the GPU of the first layers lets micro-batch n + c go D after it took up n again, in
turn. Let b(n) be when the work begins that ends with n going out; n is back before b(n + c). Its
round lasts b(n + c) - b(n), on average c T if T is the period per micro-batch, whatever k. What
differs from one to the next by c T on average, f(n) = b(n) + .. + b(n + c - 1) with
f(n + 1) - f(n) = b(n + c) - b(n), is furthest ahead of its average at some n of the plan, so from
there on

    f(n + j) - f(n) <= j c T                                    for every j > 0.

If CP-SAT proves that no N micro-batches in a row go round like that, each op of the other GPUs and
links once, one at a time, in order (R2)-(R5), no plan has a period up to T. What is left out only
makes it easier: other memories, what came before, and what is not known of the layers behind a
beginning, whose work passes without a GPU. Single layers stand for stages of any length: paper
memory model only (`entrance`). Source: ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Final, NamedTuple

from ortools.sat.python import cp_model

from pipeplan.ilp.costs import CostModel
from research.vgg16_proof.admission import Entrance

TICKS: Final = 1 << 23
"""All ops of a model in a row take at most about this many ticks."""


class Leg(NamedTuple):
    """One op of the way of a micro-batch from the first GPU back to it."""

    length: int
    """Nanoseconds."""
    place: tuple[object, ...] | None
    """The GPU or link that does nothing else meanwhile; None if that is not known."""


@dataclass(frozen=True)
class Loop:
    """The way of every micro-batch, and how many go round at once."""

    gate: Entrance
    legs: tuple[Leg, ...]

    @classmethod
    def of(cls, costs: CostModel, home: Sequence[int], gate: Entrance) -> Loop:
        """The way where layers 0.. sit on `home`, what is behind them anywhere.

        Args:
            costs: Durations.
            home: GPU of the first layers; those of the first run are on GPU 0.
            gate: What that run lets through.
        """
        forward, backward = costs.compute_sums(0)
        there: list[Leg] = []
        back: list[Leg] = []
        first = next(layer for layer, gpu in enumerate(home) if gpu != home[0])
        for layer in range(first, len(home)):
            here, before = home[layer], home[layer - 1]
            if here != before:
                send = costs.send_forward_ns(layer - 1, before, here)
                there.append(Leg(send, ("link", costs.cluster.links.resource(before, here))))
                send = costs.send_backward_ns(layer - 1, here, before)
                back.append(Leg(send, ("link", costs.cluster.links.resource(here, before))))
            place = ("gpu", here) if here != home[0] else None  # its work is in the gate
            there.append(Leg(forward[layer + 1] - forward[layer], place))
            back.append(Leg(backward[layer + 1] - backward[layer], place))
        rest = forward[-1] - forward[len(home)] + backward[-1] - backward[len(home)]
        return cls(gate, (*there, Leg(rest, None), *reversed(back)))

    @property
    def way_ns(self) -> int:
        """A round where nothing waits."""
        return self.gate.work_ns + sum(leg.length for leg in self.legs)

    def model(self, period: Fraction, count: int) -> cp_model.CpModel:
        """`count` micro-batches in a row whose rounds keep up with `period`; infeasible: none can.

        Times are ticks, rounded down, as durations are; f is a sum of c of them, so it may gain c.

        Args:
            period: Nanoseconds per micro-batch.
            count: N.
        """
        copies = self.gate.copies
        tick = max(1, (count + copies) * self.way_ns // TICKS)
        lengths = [leg.length // tick for leg in self.legs]
        work = self.gate.work_ns // tick
        model = cp_model.CpModel()
        # b(n + c - 1) is one of the sum f(n) <= f(0) + n c T, and f(0) is at most c times c T.
        latest = int(copies * (copies + count) * period / tick) + 2 * copies**2
        begun = [model.new_int_var(0, latest, f"b{n}") for n in range(count + copies)]
        starts = [
            [model.new_int_var(0, latest, f"{index}_{n}") for index in range(len(lengths))]
            for n in range(count)
        ]
        model.add(begun[0] == 0)
        for one, other in pairwise(begun):
            model.add(other >= one + work)
        for n, row in enumerate(starts):
            times = [begun[n], *row, begun[n + copies]]
            for time, length, following in zip(times, [work, *lengths], times[1:], strict=False):
                model.add(following >= time + length)
        self._one_at_a_time(model, starts, lengths)
        for steps in range(1, count + 1):
            ahead = sum(begun[steps : steps + copies]) - sum(begun[:copies])
            model.add(ahead <= int(steps * copies * period / tick) + copies)
        return model

    def _one_at_a_time(
        self, model: cp_model.CpModel, starts: list[list[cp_model.IntVar]], lengths: list[int]
    ) -> None:
        """(R3)-(R5). Of two micro-batches an order is open only where the later one is behind.

        Those c or more apart never meet: the first of them is back before the other goes.
        """
        places: dict[tuple[object, ...], list[int]] = {}
        for index, leg in enumerate(self.legs):
            if leg.place is not None:
                places.setdefault(leg.place, []).append(index)
        for earlier, later in pairwise(starts):
            for index, leg in enumerate(self.legs):
                gone = lengths[index] if leg.place is not None else 0
                model.add(later[index] >= earlier[index] + gone)
        for shared in places.values():
            for n, row in enumerate(starts):
                for other in starts[n + 1 : n + self.gate.copies]:
                    for late in shared:
                        for early in (index for index in shared if index < late):
                            first = model.new_bool_var("first")
                            _follows(model, row[late], lengths[late], other[early], first)
                            _follows(model, other[early], lengths[early], row[late], ~first)
            model.add_no_overlap(
                model.new_fixed_size_interval_var(row[index], lengths[index], "op")
                for row in starts
                for index in shared
            )


def _follows(
    model: cp_model.CpModel,
    start: cp_model.IntVar,
    length: int,
    following: cp_model.IntVar,
    where: cp_model.LiteralT,
) -> None:
    model.add(following >= start + length).only_enforce_if(where)
