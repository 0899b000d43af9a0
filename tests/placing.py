"""Depth-first placement of the ops of a period: the inner loop of the oracle.

Along the chain, with one copy each transfer as soon as both of its ends are placed.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate, pairwise

from pipeplan.chain import Chain
from pipeplan.cluster import Cluster
from pipeplan.plan import OpKind, Plan
from pipeplan.verifier import Rule, audit, stage_bytes, verify
from pipeplan.verifier.stage_bytes import StageBytes
from tests import handmade

Stay = tuple[int, int, int, int, int]
"""(GPU, bytes, 1 if from the end of its first op on, last op, 1 if to the end of that)."""


class Placing:
    """Depth-first placement of all ops of one period."""

    def __init__(
        self,
        chain: Chain,
        cluster: Cluster,
        stages: list[tuple[int, int, int]],
        period: int,
        k: int,
        fields: Mapping[str, object],
    ) -> None:
        self.chain, self.cluster, self.stages = chain, cluster, stages
        self.period, self.k, self.fields = period, k, fields
        self.ops = [(kind, stage) for kind, stage in handmade.order(stages)]
        self.sends = [not kind.is_compute for kind, _ in self.ops]
        self.lengths = [handmade.length(chain, cluster, stages, *op) for op in self.ops]
        self.places = [self._place(*op) for op in self.ops]
        self.busy: dict[object, int] = {}
        self.times: dict[tuple[int, int], int] = {}
        self.passed = [0, *accumulate(self.lengths)]
        order = [self._inwards()] if k == 1 else self._apart()
        self.steps = [(copy, index) for part in order for copy in range(k) for index in part]
        self.free = [self._is_free(index) for index in range(len(self.ops))]
        self.spare = self._spare()
        self.sizes = self._sizes()
        self.stays = self._stays()

    def _inwards(self) -> list[int]:
        """All ops along the chain, but each transfer behind the compute that receives it."""
        order: list[int] = []
        for index in range(len(self.ops)):
            if not self.sends[index]:
                order += [index, index - 1] if index and self.sends[index - 1] else [index]
        return order

    def _apart(self) -> tuple[list[int], list[int]]:
        """Computes, then transfers: with several copies the computes refute more."""
        every = range(len(self.ops))
        sends = [index for index in every if self.sends[index]]
        return [index for index in every if not self.sends[index]], sends

    def possible(self) -> bool:
        """Whether some placement keeps every rule."""
        return min(self.spare) >= 0 and self._next(0)

    def work(self) -> dict[object, int]:
        """What one micro-batch keeps each GPU and link busy."""
        work: dict[object, int] = {}
        for place, length in zip(self.places, self.lengths, strict=True):
            work[place] = work.get(place, 0) + length
        return work

    def _is_free(self, index: int) -> bool:
        """Whether a transfer takes no time and carries no bytes: when it goes does not matter."""
        kind, stage = self.ops[index]
        if kind.is_compute or self.lengths[index]:
            return False
        first, last, _ = self.stages[stage]
        behind = self.chain.layers[last if kind is OpKind.SEND_F else first - 1]
        return not behind.output_bytes and not behind.gradient_of_output_bytes

    def one_at_a_time(self) -> bool:
        """Whether nothing waits in a schedule that fits; no schedule of these stages needs less.

        Whenever an op runs in any schedule, its own micro-batch's bytes are in memory.
        """
        if min(self.spare) < 0:
            return False
        time = 0
        for index, length in enumerate(self.lengths):
            self.times[index, 0] = time
            time += length
        fits = self._judge()
        self.times.clear()
        return fits

    def _place(self, kind: OpKind, stage: int) -> object:
        """What the op keeps busy."""
        gpu = self.stages[stage][2]
        if kind.is_compute:
            return gpu
        other = self.stages[stage + 1 if kind is OpKind.SEND_F else stage - 1][2]
        pair = (gpu, other)
        return pair if self.cluster.links.duplex == "full" else tuple(sorted(pair))

    def _spare(self) -> list[int]:
        """Memory of each GPU less parameters and what belongs to them."""
        spare = [gpu.memory_bytes for gpu in self.cluster.gpus]
        for first, last, gpu in self.stages:
            for layer in self.chain.layers[first : last + 1]:
                if self.fields["memory_model"] == "paper":
                    spare[gpu] -= 3 * layer.weight_bytes
                else:
                    versions = 2 if self.fields["semantics"] == "2bw" else 1
                    spare[gpu] -= versions * layer.weight_bytes
                    spare[gpu] -= layer.gradient_bytes + layer.optimizer_bytes
                    spare[gpu] -= (versions - 1) * layer.waiting_gradient_bytes
        if self.fields["memory_model"] == "paper":
            for (_, last, gpu), (_, _, other) in pairwise(self.stages):
                if gpu != other:
                    spare[gpu] -= 2 * self.chain.layers[last].output_bytes
                    spare[other] -= 2 * self.chain.layers[last].output_bytes
        return spare

    def _next(self, step: int) -> bool:
        """Place the op of this step and all that follow."""
        if step == len(self.steps):
            return self._judge()
        copy, index = self.steps[step]
        place = self.places[index]
        for time in self._window(copy, index):
            mask = self._mask(index, time) if self._in_order(index, copy, time) else None
            if mask is None or self.busy.get(place, 0) & mask:
                continue
            self.busy[place] = self.busy.get(place, 0) | mask
            self.times[index, copy] = time
            if self._room(index) and self._next(step + 1):
                return True
            del self.times[index, copy]
            self.busy[place] &= ~mask
        return False

    def _window(self, copy: int, index: int) -> range:
        """Starts to try: each op waits less than a period behind the one before it.

        All computes come first, so one behind a transfer may wait for both, the transfer for less.
        """
        if index == 0:
            return range(1) if copy == 0 else range(self.times[0, copy - 1], self.period)
        if self.sends[index]:
            ready = self.times[index - 1, copy] + self.lengths[index - 1]
            last = self.times[index + 1, copy] - self.lengths[index]
            if self.free[index]:
                return range(ready, ready + 1)
            return range(
                max(ready, last - self.period + 1), min(last, ready + self.period - 1) + 1
            )
        behind = self.sends[index - 1]
        waits = 2 if behind and not self.free[index - 1] else 1
        before = index - 1 - behind
        ready = self.times[before, copy] + self.passed[index] - self.passed[before]
        return range(ready, ready + waits * (self.period - 1) + 1)

    def _in_order(self, index: int, copy: int, time: int) -> bool:
        """Copies of an op in order, the next period's first behind the last."""
        length = self.lengths[index]
        if copy and time < self.times[index, copy - 1] + length:
            return False
        around = self.times.get((index, 0), time) + self.period
        return copy + 1 < self.k or time + length <= around

    def _mask(self, index: int, time: int) -> int | None:
        """The unit intervals of the period that the op fills; None if it is longer."""
        length = self.lengths[index]
        if length > self.period:
            return None
        filled = ((1 << length) - 1) << (time % self.period)
        return (filled | filled >> self.period) & ((1 << self.period) - 1)

    def _room(self, index: int) -> bool:
        """Whether what surely lies in memory fits, if nothing waits behind op `index`."""
        level = {gpu: [0] * self.period for gpu in {gpu for *_, gpu in self.stages}}
        for begin, stays in enumerate(self.stays):
            for gpu, size, start, end, stop in stays:
                for copy in range(self.k) if size else ():
                    since, until = self._since(copy, begin), self._until(index, copy, end)
                    if since is None or until is None:
                        continue
                    since += start * self.lengths[begin]
                    until += stop * self.lengths[end]
                    for time in range(since, until):
                        level[gpu][time % self.period] += size
        more = self._more_slots() if self.fields["memory_model"] == "paper" else {}
        return all(max(level[gpu]) + more.get(gpu, 0) <= self.spare[gpu] for gpu in level)

    def _more_slots(self) -> dict[int, int]:
        """(P5): bytes of the second and further slots of what waits longer than a period."""
        more: dict[int, int] = {}
        for (index, copy), start in self.times.items():
            if not self.sends[index] or copy:
                continue
            kind, stage = self.ops[index]
            first, last, _ = self.stages[stage]
            size = self.chain.input_of(last + 1 if kind is OpKind.SEND_F else first)
            sent = start + self.lengths[index] - self.times[index - 1, 0] - self.lengths[index - 1]
            stays = {index - 1: sent, index + 1: self.times[index + 1, 0] - start}
            for end, stay in stays.items():
                gpu = self.stages[self.ops[end][1]][2]
                more[gpu] = more.get(gpu, 0) + size * max(0, -(-stay // self.period) - 1)
        return more

    def _since(self, copy: int, begin: int) -> int | None:
        """When op `begin` starts; a transfer that is not placed yet at the latest."""
        placed = self.times.get((begin, copy))
        if placed is None and self.sends[begin] and (begin + 1, copy) in self.times:
            return self.times[begin + 1, copy] - self.lengths[begin]
        return placed

    def _until(self, index: int, copy: int, end: int) -> int | None:
        """When op `end` starts, at the earliest if it is not placed yet; None if not known."""
        placed = self.times.get((end, copy))
        if placed is not None:
            return placed
        if self.sends[end] and (end - 1, copy) in self.times:
            return self.times[end - 1, copy] + self.lengths[end - 1]
        if self.k == 1 and not self.sends[index] and index < end:
            return self.times[index, 0] + self.passed[end] - self.passed[index]
        return None

    def _stays(self) -> list[list[Stay]]:
        """By first op: all that is surely in memory from it on."""
        found: list[list[Stay]] = [[] for _ in self.ops]
        exact = self.fields["memory_model"] == "exact"
        for index, (kind, stage) in enumerate(self.ops):
            first, last, gpu = self.stages[stage]
            size = self.sizes[stage]
            if kind is OpKind.F:
                end = self.ops.index((OpKind.B, stage))
                found[index].append((gpu, size.kept, int(not exact), end, 1))
            if kind.is_compute:
                working = size.forward if kind is OpKind.F else size.backward
                found[index].append((gpu, working - (size.kept if exact else 0), 0, index, 1))
            if kind.is_compute or not exact:
                continue
            forward = kind is OpKind.SEND_F
            layer = self.chain.layers[last if forward else first - 1]
            full = layer.output_bytes if forward else layer.gradient_of_output_bytes
            stays = layer.saved_output_bytes + layer.saved_passing_bytes
            sent = full - (stays if forward else 0)
            target = self.stages[stage + 1 if forward else stage - 1][2]
            found[index - 1].append((gpu, sent, 1, index, 1))
            found[index].append((target, full, 0, index + 1, 0))
        return found

    def _sizes(self) -> list[StageBytes]:
        """What a micro-batch needs of each stage, in the verifier's words."""
        keeping = {"cluster": self.cluster, "memory": (), **self.fields}
        bare = handmade.plan(self.chain, self.stages, self.period, {"0F0": 0}, **keeping)
        count = stage_bytes.exact if self.fields["memory_model"] == "exact" else stage_bytes.paper
        return [count(bare, stage.id) for stage in bare.stages]

    def _judge(self) -> bool:
        """The verifier's word on the finished schedule; zero-length ops are judged here too."""
        return self._right(self._plan())

    def _right(self, built: Plan) -> bool:
        """Whether a plan with its own memory table keeps every rule."""
        fits = all(row.peak_bytes <= row.budget_bytes for row in built.memory)
        return fits and self._few_versions(built) and not self._broken(built)

    def _few_versions(self, built: Plan) -> bool:
        return self.fields["semantics"] == "flush" or max(audit(built).in_flight) <= 65

    def _plan(self) -> Plan:
        times = {
            f"{stage}{kind}{copy}": self.times[index, copy]
            for index, (kind, stage) in enumerate(self.ops)
            for copy in range(self.k)
        }
        return handmade.plan(
            self.chain,
            self.stages,
            self.period,
            times,
            cluster=self.cluster,
            k=self.k,
            **self.fields,
        )

    def _broken(self, built: Plan) -> bool:
        ignored = {Rule.BOUNDS, Rule.BUDGET}
        return any(violation.rule not in ignored for violation in verify(built))
