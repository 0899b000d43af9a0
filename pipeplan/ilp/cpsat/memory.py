"""Memory constraints of the periodic model, evaluated when each compute op starts.

With w[x, i] = 1 if x precedes i in the window of their GPU and K the shifts, the copies of a
tensor that lives from the end of x to the start of y, in memory when op i starts, number

    sum over copies c of  K[c, y] - K[c, x] + w[x, i] - w[y, i],       w[i, i] = 0.

Counts thus vary inside the period. Sent and received tensors end or begin at a transfer that has
no place in the GPU's window; integer variables count its shifts instead. Everything left out
(receives posted even earlier, the instants of posting and of updates) only adds bytes, and bytes
are rounded down: a proof of infeasibility holds for the true data, a solution is counted again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pipeplan.ilp.cpsat.precedence import SEND_B, SEND_F, B, F, compute_tasks, send_length
from pipeplan.ilp.cpsat.variables import Linear, Literal, Task, Variables
from pipeplan.plan import OpKind


@dataclass
class MemoryConstraints:
    """Adds the memory constraints of all compute ops to a model."""

    v: Variables
    budgets: tuple[int, ...]
    """Bytes of each GPU; at most its memory."""
    _slots: dict[tuple[OpKind, int, str], Linear] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Bytes of all items, in memory units, covered by a predecessor on the same GPU or not."""
        costs, items = self.v.instance.costs, self.v.instance.items
        self.covered = [costs.segment(first, last, True) for first, last in items]
        self.alone = [costs.segment(first, last, False) for first, last in items]

    def add(self) -> None:
        """One inequality per compute op."""
        for task in compute_tasks(self.v.instance):
            self._limit(task)
            if task[0] is F:
                self._update(task)
                self._versions(task)

    def _units(self, size: int) -> int:
        return size // self.v.instance.unit

    def _limit(self, task: Task) -> None:
        v, item = self.v, task[1]
        terms: list[Linear] = [self._own(task)]
        for n in range(len(v.instance.items)):
            together = v.same(item, n)
            if isinstance(together, int) and not together:
                continue
            states = self._units(self.covered[n].states)
            terms.append(states * together)
            terms += self._saved(task, n, together)
        for boundary in range(len(v.instance.items) - 1):
            terms += self._direct(task, boundary)
            terms += self._messages(task, boundary)
        v.model.add(sum(terms) <= self._room(item))

    def _room(self, item: int) -> Linear:
        """Memory units of the GPU that the item sits on."""
        room = [self._units(budget) for budget in self.budgets]
        return sum(size * here for size, here in zip(room, self.v.on[item], strict=True))

    def _own(self, task: Task) -> Linear:
        """Bytes of the running op beside what is saved; less if its predecessor covers some.

        Updates are told only where the item surely begins a stage, behind a cut: in the midst of
        one they come when all of the stage's bytes are gone, and late ones (M7) not at all.
        """
        kind, item, _ = task
        covered, alone = self.covered[item], self.alone[item]
        update = alone.optimizer - alone.saved if self._updates() else 0
        low, high = (
            (covered.forward, alone.running)
            if kind is F
            else (covered.backward, max(alone.backward, update))
        )
        low, high = self._units(low), self._units(high)
        if item == 0 or low == high:
            return high
        return low + (high - low) * self.v.cut(item - 1)

    def _updates(self) -> bool:
        """Whether an update may follow each backward, when its own saved bytes are gone."""
        costs = self.v.instance.costs
        long = all(layer.forward_ns and layer.backward_ns for layer in costs.chain.layers)
        late = any(layer.waiting_gradient_bytes for layer in costs.chain.layers)
        return costs.exact and costs.semantics == "2bw" and long and not late

    def _saved(self, task: Task, n: int, together: Literal) -> list[Linear]:
        """Micro-batches of item n in memory, times what each keeps."""
        v = self.v
        count = self.count(task, (F, n), (B, n), together)
        core = self._units(self.covered[n].saved)
        extra = self._units(self.alone[n].saved) - core
        terms: list[Linear] = [core * count]
        if extra and n:
            terms.append(extra * self.count(task, (F, n), (B, n), v.both(together, v.cut(n - 1))))
        elif extra:
            terms.append(extra * count)
        if v.instance.k == 1:
            self._latency(task, n, together, count)
        return terms

    def count(
        self,
        task: Task,
        begin: tuple[OpKind, int],
        end: tuple[OpKind, int],
        where: Literal,
        *,
        consumed: bool = False,
    ) -> Linear:
        """Copies alive between two ops of this GPU when `task` starts; 0 unless `where` holds.

        Args:
            task: The compute op that starts.
            begin: The op (kind, item) at whose end the tensor appears.
            end: The op at whose start it is consumed, or at whose end it is released.
            where: The condition.
            consumed: Whether it is gone when its own end op starts.
        """
        v = self.v
        if isinstance(where, int) and not where:
            return 0
        value: Linear = 0
        for copy in v.instance.copies:
            first, last = (*begin, copy), (*end, copy)
            value += v.shift[last] - v.shift[first] + self._precedes(first, task, 0)
            value -= self._precedes(last, task, int(consumed))
        return self._where(value, where)

    def _precedes(self, one: Task, task: Task, itself: int) -> Literal:
        return itself if one == task else self.v.before.get((one, task), 0)

    def _where(self, value: Linear, where: Literal) -> Linear:
        """A variable that is at least `value` where the condition holds."""
        if isinstance(where, int):
            return value
        most = (self.v.max_shift + 2) * self.v.instance.k
        variable = self.v.model.new_int_var(0, most, "count")
        self.v.model.add(variable >= value).only_enforce_if(where)
        return variable

    def _latency(self, task: Task, n: int, together: Literal, count: Linear) -> None:
        """Redundant: a stay of t ns is seen at least t / T times. Speeds up proofs, k = 1."""
        v, (kind, item, copy) = self.v, task
        if kind is B and n <= item:
            gone = v.time(task) - v.time((F, n, copy))
        elif kind is F and n < item:
            gone = v.time((B, n, copy)) + v.length((B, n, copy)) - v.time(task) - v.period + 1
        else:
            return
        v.require(v.period * count >= gone, together)

    def _direct(self, task: Task, boundary: int) -> list[Linear]:
        """(M4), (P4) of the tensors between items `boundary` and `boundary` + 1 on this GPU."""
        v = self.v
        where = v.both(v.same(task[1], boundary), v.same(boundary, boundary + 1))
        terms: list[Linear] = []
        for begin, end, backward in (
            ((F, boundary), (F, boundary + 1), False),
            ((B, boundary + 1), (B, boundary), True),
        ):
            layer = v.instance.items[boundary][1]
            size = self._units(v.instance.costs.unsaved_bytes(layer, backward=backward))
            if size:
                terms.append(size * self.count(task, begin, end, where, consumed=True))
        return terms

    def _messages(self, task: Task, boundary: int) -> list[Linear]:
        """(M5), (P5) of the tensors that cross this boundary to or from this GPU."""
        v, costs = self.v, self.v.instance.costs
        layer = v.instance.items[boundary][1]
        cut = v.cut(boundary)
        terms: list[Linear] = []
        for send, source, target in (
            ((SEND_F, boundary), boundary, boundary + 1),
            ((SEND_B, boundary + 1), boundary + 1, boundary),
        ):
            backward = send[0] is SEND_B
            sent = self._units(costs.unsaved_bytes(layer, backward=backward))
            received = self._units(costs.tensor_bytes(layer, backward=backward))
            for size, end, count in (
                (sent, source, self._sent),
                (received, target, self._received),
            ):
                where = v.both(v.same(task[1], end), cut)
                if size and (not isinstance(where, int) or where):
                    terms.append(size * count(task, send, boundary, end, where))
        return terms

    def _sent(
        self, task: Task, send: tuple[OpKind, int], boundary: int, item: int, where: Literal
    ) -> Linear:
        """Copies on the sender, from the end of the producer to the end of the transfer."""
        v, producer = self.v, B if send[0] is SEND_B else F
        if not v.instance.costs.exact:
            return self._reserved(send, boundary, (producer, item), where, sender=True)
        value: Linear = 0
        for copy in v.instance.copies:
            left = v.model.new_int_var(0, v.max_shift + 2, "left")
            end = v.position[(*send, copy)] + v.period * v.shift[(*send, copy)]
            end += send_length(v, (*send, copy), boundary)
            v.require(end <= v.position[task] + v.period * left, where)
            made = (producer, item, copy)
            value += left - 1 + self._precedes(made, task, 0) - v.shift[made]
        return self._where(value, where)

    def _received(
        self, task: Task, send: tuple[OpKind, int], boundary: int, item: int, where: Literal
    ) -> Linear:
        """Copies on the receiver, from the posting of the receive to the start of the consumer.

        A receive is posted before this op if its transfer starts before this op ends (O1)-(O3).
        """
        v, consumer = self.v, B if send[0] is SEND_B else F
        if not v.instance.costs.exact:
            return self._reserved(send, boundary, (consumer, item), where, sender=False)
        value: Linear = 0
        end = v.position[task] + v.length(task)
        for copy in v.instance.copies:
            posted = v.model.new_int_var(-2, v.max_shift + 2, "posted")
            start = v.time((*send, copy))
            v.require(start >= end + v.period * (posted - 1), where)
            used = (consumer, item, copy)
            value += v.shift[used] + 1 - self._precedes(used, task, 1) - posted
        return self._where(value, where)

    def _reserved(
        self,
        send: tuple[OpKind, int],
        boundary: int,
        end: tuple[OpKind, int],
        where: Literal,
        *,
        sender: bool,
    ) -> Linear:
        """(P5): one slot, or as many as a single message's stay spans periods."""
        v = self.v
        key = (*send, "sender" if sender else "receiver")
        if key not in self._slots:
            slots = v.model.new_int_var(1, v.max_shift + 2, f"slots_{key}")
            for copy in v.instance.copies:
                moving, other = v.time((*send, copy)), v.time((*end, copy))
                if sender:
                    stay = moving + send_length(v, (*send, copy), boundary)
                    stay -= other + v.length((*end, copy))
                else:
                    stay = other - moving
                v.require(v.period * slots >= stay, v.cut(boundary))
            self._slots[key] = slots
        return self._where(self._slots[key], where)

    def _update(self, task: Task) -> None:
        """The optimizer's workspace fits beside the states of the GPU."""
        v, item = self.v, task[1]
        if not self.covered[item].update:
            return
        states = [
            self._units(size.states) * v.same(item, n) for n, size in enumerate(self.covered)
        ]
        v.model.add(sum(states) + self._units(self.covered[item].update) <= self._room(item))

    def _versions(self, task: Task) -> None:
        """(R6): a forward that starts finds at most `most` - 1 of its item in memory."""
        item = task[1]
        most = self.v.instance.most
        if most is not None:
            self.v.model.add(self.count(task, (F, item), (B, item), 1) + 1 <= most)
