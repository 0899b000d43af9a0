"""Rockmate: options per distinct block, RK-Rotor over the chain, one order for the whole graph."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from pipeplan.operator_graph import OperatorGraph
from pipeplan.remat.graph.blocks.block import GraphBlock, average
from pipeplan.remat.graph.blocks.compose import compose
from pipeplan.remat.graph.blocks.options import BlockOption, OptionSet, solve_grid
from pipeplan.remat.graph.blocks.partition import MOST_OPERATIONS, partition
from pipeplan.remat.graph.blocks.rk_rotor import ChainBlock, RkRotor
from pipeplan.remat.graph.intervals.search import SearchLimits
from pipeplan.remat.graph.ledger import END_F, START, Ledger, Order
from pipeplan.remat.graph.orders import bytes_during, fits, peak_bytes, time_of

HEADROOM = 1.25
"""Of a budget, up to where the table goes: sums of blocks' peaks are above what is used."""
_TRIES = 12


@dataclass
class BlockChain:
    """A graph as blocks with options.

    Attributes:
        ledger: the whole graph.
        most: operations of a block that is joined from smaller ones.
        count: peaks, and saved bytes per peak, for which a block is solved.
        runs: how often a forward may run inside a block.
    """

    ledger: Ledger
    most: int = MOST_OPERATIONS
    count: int = 6
    runs: int = 2

    @cached_property
    def blocks(self) -> list[GraphBlock]:
        """The chain."""
        return partition(self.ledger, self.most)

    @cached_property
    def sets(self) -> dict[str, OptionSet]:
        """What is known of each distinct block, with mean times of identical ones."""
        alike: dict[str, list[OperatorGraph]] = {}
        for each in self.blocks:
            alike.setdefault(each.key, []).append(each.graph)
        return {key: OptionSet(average(graphs), self.runs) for key, graphs in alike.items()}

    def solve_options(self, limits: SearchLimits, deadline: float) -> None:
        """Fills the option sets until the deadline on `time.monotonic`, small blocks first."""
        waiting = sorted(self.sets.values(), key=lambda each: len(each.graph.operations))
        for index, each in enumerate(waiting):
            left = deadline - time.monotonic()
            share = time.monotonic() + left / (len(waiting) - index)
            solve_grid(each, self.count, limits, share)

    def options(self, keep_all: bool = False) -> list[list[BlockOption]]:
        """Per block what it may do; with `keep_all` only to run every operation once (Rotor)."""
        return [
            [self.sets[each.key].first] if keep_all else self.sets[each.key].options
            for each in self.blocks
        ]

    def order(self, peak: int, saved: int | None = None, keep_all: bool = False) -> Order | None:
        """The best order found within a peak, static bytes included, and saved bytes.

        None where none is found.
        """
        return self.orders([peak], saved, keep_all)[0]

    def orders(
        self, peaks: Sequence[int], saved: int | None = None, keep_all: bool = False
    ) -> list[Order | None]:
        """The same for several peaks, from one table where saved bytes have no limit."""
        options = self.options(keep_all)
        chain = self.priced(options)
        room = [peak - self.ledger.constant for peak in peaks]
        found: list[Order | None] = []
        table: RkRotor | None = None
        for each in room:
            if each <= 0:
                found.append(None)
                continue
            if saved is not None:
                reserve = max(0, each - saved)
                table = RkRotor(chain, int(HEADROOM * each), reserve=reserve)
            elif table is None:
                table = RkRotor(chain, int(HEADROOM * max(room)))
            found.append(self._order(table, options, each, saved))
        return found

    def smallest(self) -> Order:
        """The order of least peak among those for memories from the least one of the table on."""
        best = self.ledger.first_order()
        options, high = self.options(), peak_bytes(self.ledger, best) - self.ledger.constant
        table = RkRotor(self.priced(options), int(HEADROOM * max(1, high)))
        low = table.least_memory
        if low is None:
            return best
        for memory in range(low, 2 * low, max(1, low // _TRIES)):
            steps = table.steps(memory)
            if steps is not None:
                order = compose(self.ledger, self.blocks, options, steps)
                best = min(best, order, key=lambda each: peak_bytes(self.ledger, each))
        return best

    def priced(self, options: Sequence[Sequence[BlockOption]]) -> list[ChainBlock]:
        """The chain as RK-Rotor sees it, with these options of each block."""
        alone = {key: _forward_alone(each.ledger) for key, each in self.sets.items()}
        return [
            ChainBlock(ways, block.value_bytes, block.gradient_bytes, *alone[block.key])
            for block, ways in zip(self.blocks, options, strict=True)
        ]

    def _order(
        self,
        table: RkRotor,
        options: Sequence[Sequence[BlockOption]],
        room: int,
        saved: int | None,
    ) -> Order | None:
        """The fastest of the orders for memories around `room` whose bytes are within it.

        Blocks' peaks do not fall together in time, so that the sums of the table are above what
        the order uses: the largest memory is searched whose order keeps the budget.
        """
        best: Order | None = None
        low, high = 0.5 * room, HEADROOM * room
        memory = float(room)
        for _ in range(_TRIES):
            steps = table.steps(int(memory))
            if steps is None:
                low = memory
            else:
                order = compose(self.ledger, self.blocks, options, steps)
                if fits(self.ledger, order, room + self.ledger.constant, saved):
                    low = memory
                    if best is None or time_of(self.ledger, order) < time_of(self.ledger, best):
                        best = order
                else:
                    high = memory
            memory = (low + high) / 2
        return best


def _forward_alone(ledger: Ledger) -> tuple[int, int]:
    """Time and peak of a forward that keeps nothing but what it hands on, inputs not counted."""
    order = tuple(at for at in ledger.first_order() if START < at < ledger.graph.forwards)
    order = order[: order.index(END_F) + 1] if END_F in order else order
    used = bytes_during(ledger, order)[:-1]
    return time_of(ledger, order), max(used, default=ledger.constant) - ledger.constant
