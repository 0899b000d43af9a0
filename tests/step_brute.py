"""The shortest step of a tiny chain by trying every placement, every split and every order.

Shares nothing with the solver. Without a limit on memory a step is shortest if each op starts as
soon as its GPU has done all ops before it and its input is there, so orders are all there is.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, product

from pipeplan.chain import Chain

Op = tuple[str, int]
"""(kind, stage)."""


def shortest_step(chain: Chain, gpus: int, microbatches: int, latency: int) -> int:
    """Ns from the first start to the last end, without updates; links carry one message a time."""
    best = None
    layers = range(len(chain.layers))
    for cut in product((False, True), repeat=len(layers) - 1):
        borders = [0, *(index + 1 for index, is_cut in enumerate(cut) if is_cut), len(layers)]
        spans = list(pairwise(borders))
        for homes in product(range(gpus), repeat=len(spans)):
            for split in product((False, True), repeat=len(spans) - 1):
                search = _Orders(chain, spans, homes, (False, *split), microbatches, latency)
                found = search.shortest(best)
                best = found if best is None else min(best, found)
    assert best is not None
    return best


class _Orders:
    """All orders of one placement, branch and bound."""

    def __init__(
        self,
        chain: Chain,
        spans: list[tuple[int, int]],
        homes: tuple[int, ...],
        split: tuple[bool, ...],
        microbatches: int,
        latency: int,
    ) -> None:
        self.homes, self.latency, self.microbatches = homes, latency, microbatches
        self.lasts: dict[Op, int] = {}
        for stage, (first, behind) in enumerate(spans):
            layers = chain.layers[first:behind]
            self.lasts["F", stage] = sum(x.forward_ns for x in layers)
            self.lasts["B", stage] = sum(x.backward_ns for x in layers)
            if split[stage]:
                self.lasts["F", stage] = sum(x.forward_split_ns or 0 for x in layers)
                self.lasts["B", stage] = sum(x.backward_input_ns or 0 for x in layers)
                self.lasts["W", stage] = sum(x.backward_weight_ns or 0 for x in layers)
        self.best = 10**18

    def shortest(self, known: int | None) -> int:
        """The shortest step, or something no shorter than `known`."""
        self.best = 10**18 if known is None else known
        self.seen: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        self._extend(dict.fromkeys(self.lasts, 0), {}, {}, {})
        return self.best

    def _extend(
        self,
        done: dict[Op, int],
        free: dict[int, int],
        ends: dict[tuple[str, int, int], int],
        links: dict[tuple[int, int], int],
    ) -> None:
        now = max(free.values(), default=0)
        if now >= self.best:
            return
        left = [op for op in self.lasts if done[op] < self.microbatches]
        if not left:
            self.best = now
            return
        for gpu in set(self.homes):
            rest = sum(
                (self.microbatches - done[op]) * self.lasts[op]
                for op in left
                if self.homes[op[1]] == gpu
            )
            if free.get(gpu, 0) + rest >= self.best:
                return
        if self._is_dominated(done, free, ends, links):
            return
        for op in left:
            for ready, carried in self._inputs(op, done, ends, links):
                gpu = self.homes[op[1]]
                end = max(free.get(gpu, 0), ready) + self.lasts[op]
                self._extend(
                    done | {op: done[op] + 1},
                    free | {gpu: end},
                    ends | {(*op, done[op]): end},
                    links | carried,
                )

    def _inputs(
        self,
        op: Op,
        done: dict[Op, int],
        ends: dict[tuple[str, int, int], int],
        links: dict[tuple[int, int], int],
    ) -> Iterator[tuple[int, dict[tuple[int, int], int]]]:
        """When the op's input can be there, and what the link did for it; nothing if never yet."""
        kind, stage = op
        last, number = len(self.homes) - 1, done[op]
        if kind == "F":
            before = ("F", stage - 1) if stage else None
        elif kind == "W":
            before = ("B", stage)
        else:
            before = ("B", stage + 1) if stage < last else ("F", stage)
        if before is None:
            yield 0, {}
        elif done[before] > number:
            ready = ends[*before, number]
            source, target = self.homes[before[1]], self.homes[stage]
            if source == target:
                yield ready, {}
            else:
                arrives = max(ready, links.get((source, target), 0)) + self.latency
                yield arrives, {(source, target): arrives}

    def _is_dominated(
        self,
        done: dict[Op, int],
        free: dict[int, int],
        ends: dict[tuple[str, int, int], int],
        links: dict[tuple[int, int], int],
    ) -> bool:
        """Whether the same ops were done before with nothing later."""
        key = tuple(done.values())
        times = (
            *(free.get(gpu, 0) for gpu in sorted(set(self.homes))),
            *(ends.get((*op, number), 0) for op in self.lasts for number in range(done[op])),
            *(links.get(pair, 0) for pair in product(sorted(set(self.homes)), repeat=2)),
        )
        known = self.seen.setdefault(key, [])
        if any(all(a <= b for a, b in zip(other, times, strict=True)) for other in known):
            return True
        known.append(times)
        return False
