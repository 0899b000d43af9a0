"""A graph as a join: options per distinct block, one table over all branches, one order."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from functools import cached_property

import networkx as nx

from pipeplan.remat.graph.blocks.block import GraphBlock
from pipeplan.remat.graph.blocks.chain import HEADROOM, BlockChain
from pipeplan.remat.graph.blocks.options import BlockOption
from pipeplan.remat.graph.blocks.partition import MOST_OPERATIONS
from pipeplan.remat.graph.hierarchy.data_flow import forward_flow
from pipeplan.remat.graph.intervals.search import SearchLimits
from pipeplan.remat.graph.joins.split import GraphJoin
from pipeplan.remat.graph.joins.table import JoinTable, PartStep, Position
from pipeplan.remat.graph.ledger import END_F, START, Ledger, Order
from pipeplan.remat.graph.orders import fits, tidy, time_of

_TRIES = 12


@dataclass
class JoinChains:
    """Branches and tail of a graph as chains of blocks with options.

    Attributes:
        ledger: the whole graph.
        join: its parts.
        most: operations of a block that is joined from smaller ones.
        runs: how often a forward may run inside a block.
    """

    ledger: Ledger
    join: GraphJoin
    most: int = MOST_OPERATIONS
    runs: int = 2

    @cached_property
    def parts(self) -> tuple[GraphBlock, ...]:
        """The branches, then the tail."""
        return (*self.join.branches, self.join.tail)

    @cached_property
    def _flow(self) -> nx.DiGraph[int]:
        """Forwards, with an edge to each from what must run before it."""
        return forward_flow(self.ledger).graph

    @cached_property
    def chains(self) -> list[BlockChain]:
        """Each part as blocks; those that are identical share what is known of them."""
        found = [BlockChain(Ledger(each.graph), self.most, runs=self.runs) for each in self.parts]
        shared = {key: each for chain in found for key, each in chain.sets.items()}
        for chain in found:
            chain.sets.update((key, shared[key]) for key in chain.sets)
        return found

    def solve_options(self, limits: SearchLimits, deadline: float) -> None:
        """Options of all blocks until the deadline on `time.monotonic`."""
        for index, chain in enumerate(self.chains):
            now = time.monotonic()
            chain.solve_options(limits, now + (deadline - now) / (len(self.chains) - index))

    def orders(self, peaks: Sequence[int], saved: int | None = None) -> list[Order | None]:
        """The best order found within each peak, static bytes included, and saved bytes."""
        rooms = [peak - self.ledger.constant for peak in peaks]
        if max(rooms) <= 0:
            return [None] * len(rooms)
        options = [chain.options() for chain in self.chains]
        *branches, tail = (
            chain.priced(each) for chain, each in zip(self.chains, options, strict=True)
        )
        most = int(HEADROOM * max(rooms))
        table = JoinTable(branches, tail, most, needs=self._needs())
        return [self._order(table, options, room, saved) for room in rooms]

    def _order(
        self,
        table: JoinTable,
        options: Sequence[Sequence[Sequence[BlockOption]]],
        room: int,
        saved: int | None,
    ) -> Order | None:
        """The fastest of the orders for memories around `room` whose bytes are within it."""
        first = self.ledger.first_order()
        if fits(self.ledger, first, room + self.ledger.constant, saved):
            return first
        best: Order | None = None
        low, high = 0.5 * room, HEADROOM * room
        memory = float(room)
        for _ in range(_TRIES if room > 0 else 0):
            steps = table.steps(int(memory))
            order = None if steps is None else self.compose(options, steps)
            if order is None or fits(self.ledger, order, room + self.ledger.constant, saved):
                low = memory
                if order is not None and (
                    best is None or time_of(self.ledger, order) < time_of(self.ledger, best)
                ):
                    best = order
            else:
                high = memory
            memory = (low + high) / 2
        return best

    def compose(
        self, options: Sequence[Sequence[Sequence[BlockOption]]], steps: Sequence[PartStep]
    ) -> Order:
        """The order of all operations; loose ones run as soon as what they read is there."""
        order: list[int] = []
        made: set[int] = set()
        ran: set[int] = set()
        waiting = list(self.join.loose)

        def run(at: int) -> None:
            order.append(at)
            ran.add(at)
            made.update(self.ledger.made(at))

        def run_loose() -> None:
            nonlocal waiting
            while ready := [each for each in waiting if self._ready(each, ran, made)]:
                for each in ready:
                    run(each)
                waiting = [each for each in waiting if each not in ready]

        if not self.ledger.received:  # else nothing runs before START
            run_loose()
        for at in self._operations(options, steps):
            run(at)
            run_loose()
        return tidy(self.ledger, tuple(order))

    def _ready(self, at: int, ran: Set[int], made: Set[int]) -> bool:
        """Whether a loose operation may run: a backward only behind the end of the forward."""
        before = self._flow.predecessors(at) if at in self._flow else (END_F,)
        return ran >= set(before) and made >= set(self.ledger.reads[at])

    def _operations(
        self, options: Sequence[Sequence[Sequence[BlockOption]]], steps: Sequence[PartStep]
    ) -> Iterator[int]:
        if self.ledger.received:
            yield START
        ended = False
        for each in steps:
            part, step, chain = self.parts[each.part], each.step, self.chains[each.part]
            block = chain.blocks[step.block]
            if step.option is None:
                runs: tuple[int, ...] = tuple(range(block.graph.forwards))
            elif step.backward:
                runs = options[each.part][step.block][step.option].backward
            else:
                runs = options[each.part][step.block][step.option].forward
            yield from (part.operations[block.operations[at]] for at in runs)
            last = each.part == len(self.parts) - 1 and step.block == len(chain.blocks) - 1
            if last and step.option is not None and not ended:
                yield END_F
                ended = True

    def _needs(self) -> list[list[Position]]:
        """Per branch and number of its blocks: where the others are, at least, before."""
        count = len(self.join.branches)
        place: dict[int, tuple[int, int]] = {}
        for branch, (part, chain) in enumerate(
            zip(self.join.branches, self.chains[:count], strict=True)
        ):
            for index, block in enumerate(chain.blocks):
                forwards = block.operations[: block.graph.forwards]
                place.update((part.operations[at], (branch, index + 1)) for at in forwards)
        sizes = [len(chain.blocks) for chain in self.chains[:count]]
        found = [[[0] * count for _ in range(size + 1)] for size in sizes]
        for before, behind in self._pairs():
            if before in place and behind in place:
                (branch, least), (other, index) = place[before], place[behind]
                if branch != other:
                    found[other][index][branch] = max(found[other][index][branch], least)
        for rows in found:
            for at in range(1, len(rows)):
                rows[at] = [max(pair) for pair in zip(rows[at - 1], rows[at], strict=True)]
        return [[tuple(row) for row in rows] for rows in found]

    def _pairs(self) -> Iterator[tuple[int, int]]:
        """Forwards of which the first runs before the second, loose ones between them left out."""
        loose = set(self.join.loose)
        for at in self._flow:
            open_, seen = list(self._flow.predecessors(at)), set[int]()
            while open_:
                before = open_.pop()
                if before in seen:
                    continue
                seen.add(before)
                if before in loose:
                    open_.extend(self._flow.predecessors(before))
                else:
                    yield before, at
