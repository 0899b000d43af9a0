"""Brute force for a few layers, one micro-batch per period: every choice, every integer start.

Shares no code with the solver. The period of each GPU is a wheel of slots of one ns. All forwards
and backwards are put on it along the chain, then the transfers between them. Bytes are added to
the slots they lie in as soon as it is sure that they do, and what exceeds a memory is given up;
what remains is judged by the verifier. Every layer (or run that is computed again) is placed by
itself: stages of several layers are schedules in which those stand back to back, tried when all
is placed.

Along the chain an op waits less than a period for the one before it, and a transfer lies less than
a period before what it is for: with the same places on the wheels all that follows could come a
period earlier, and every byte would lie in memory no longer.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise, product
from operator import add

from pipeplan.chain import Chain
from pipeplan.cluster import Cluster
from pipeplan.plan import OpKind
from pipeplan.verifier import Rule, stage_bytes, verify
from pipeplan.verifier.stage_bytes import StageBytes
from tests import handmade, oracle

BITS = 16
"""Of one slot: bytes in it stay below half of what they can tell."""

Homes = tuple[int, ...]
"""GPU of each layer of a chain in which runs are layers."""


class Machine:
    """A chain in which runs are layers, on a cluster whose stages have no overhead."""

    def __init__(self, chain: Chain, cluster: Cluster) -> None:
        self.chain, self.cluster, count = chain, cluster, len(chain.layers)
        assert not cluster.action_overhead_ns
        assert not cluster.links.pairs
        assert all(gpu.speed == 1 for gpu in cluster.gpus)
        self.layer = [*range(count), *reversed(range(count))]
        self.length = [x.forward_ns for x in chain.layers]
        self.length += [x.backward_ns for x in reversed(chain.layers)]
        latency, band = cluster.links.latency_ns, cluster.links.bandwidth_bytes_per_s
        sizes = [self.full(op) for op in range(2 * count - 1)]
        self.wire = [latency + (-(-size * 10**9 // band) if band else 0) for size in sizes]

    def full(self, op: int) -> int:
        """Bytes of what an op hands on."""
        layer = self.layer[op]
        if op < len(self.chain.layers):
            return self.chain.layers[layer].output_bytes
        return self.chain.gradient_of_input(layer)

    @cached_property
    def alone(self) -> list[StageBytes]:
        """(M2), (M3) of each layer whose predecessor sits on another GPU."""
        return self._sizes([layer % 2 for layer in range(len(self.chain.layers))])

    @cached_property
    def covered(self) -> list[StageBytes]:
        """The same where it sits on the same GPU."""
        return self._sizes([0] * len(self.chain.layers))

    def _sizes(self, homes: list[int]) -> list[StageBytes]:
        stages = [(layer, layer, gpu) for layer, gpu in enumerate(homes)]
        bare = handmade.plan(self.chain, stages, 1, {"0F0": 0}, memory=())
        return [stage_bytes.exact(bare, stage.id) for stage in bare.stages]


@lru_cache(maxsize=256)
def _runs(period: int) -> list[list[int]]:
    """[first slot][length < period] -> 1 in each of these slots."""
    return [
        [
            sum(1 << BITS * ((first + n) % period) for n in range(length))
            for length in range(period)
        ]
        for first in range(period)
    ]


@lru_cache(maxsize=256)
def _filled(period: int, value: int) -> int:
    """`value` in each slot."""
    return sum(value << BITS * slot for slot in range(period))


class Case:
    """One allocation of a chain: its ops, which of them need what, and what they need it for."""

    def __init__(self, machine: Machine, homes: Homes) -> None:
        self.machine, self.homes = machine, homes
        self.layer, self.length = machine.layer, machine.length
        self.gpu = [*homes, *reversed(homes)]
        self.crosses = [one != other for one, other in pairwise(self.gpu)]
        self.wire = [wire * cut for wire, cut in zip(machine.wire, self.crosses, strict=True)]

    @cached_property
    def size(self) -> list[StageBytes]:
        """Of each layer."""
        homes, machine = self.homes, self.machine
        return [
            machine.covered[n] if n and homes[n - 1] == homes[n] else machine.alone[n]
            for n in range(len(homes))
        ]

    @cached_property
    def begins(self) -> list[int]:
        """When each op would begin, and the last one end, if nothing waited."""
        lasting = map(add, self.length, [*self.wire, 0])
        return list(accumulate(lasting, initial=0))

    def unsaved(self, op: int) -> int:
        """Those that its own layer does not keep anyway (M4), (M5)."""
        layer = self.machine.chain.layers[self.layer[op]]
        assert not layer.saved_passing_bytes
        return self.machine.full(op) - (layer.saved_output_bytes if op < len(self.homes) else 0)

    def link(self, op: int) -> tuple[int, int]:
        """What the transfer behind an op keeps busy."""
        pair = (self.gpu[op], self.gpu[op + 1])
        full = self.machine.cluster.links.duplex == "full"
        return pair if full else (min(pair), max(pair))

    @cached_property
    def spare(self) -> list[int]:
        """Memory beside weights and what belongs to them, two versions of them (M1)."""
        spare = [gpu.memory_bytes for gpu in self.machine.cluster.gpus]
        for layer, gpu in zip(self.machine.chain.layers, self.homes, strict=True):
            spare[gpu] -= 2 * layer.weight_bytes + layer.gradient_bytes
            spare[gpu] -= layer.waiting_gradient_bytes + layer.optimizer_bytes
        return spare

    @cached_property
    def area(self) -> list[int]:
        """Bytes times ns of a micro-batch that never waits, on each GPU, without messages."""
        area, last = [0 for _ in self.spare], 2 * len(self.homes) - 1
        for layer, (gpu, size) in enumerate(zip(self.homes, self.size, strict=True)):
            back, whole = last - layer, self.begins[last - layer] - self.begins[layer]
            area[gpu] += size.kept * (whole + self.length[back])
            area[gpu] += (size.forward - size.kept) * self.length[layer]
            area[gpu] += (size.backward - size.kept) * self.length[back]
        return area

    @cached_property
    def load(self) -> int:
        """Work of the busiest GPU or link."""
        busy: dict[object, int] = {}
        for op, length in enumerate(self.length):
            busy[self.gpu[op]] = busy.get(self.gpu[op], 0) + length
        for op, length in enumerate(self.wire):
            busy[self.link(op)] = busy.get(self.link(op), 0) + length
        return max(busy.values())

    def possible(self, period: int) -> bool:
        """Whether some schedule of this period keeps every rule."""
        return self.load <= period and self.fits and Wheels(self, period).possible()

    @cached_property
    def fits(self) -> bool:
        """Whether a single micro-batch that never waits fits; no schedule needs less.

        Whenever an op runs in any schedule, its own micro-batch's bytes are in memory.
        """
        return min(self.spare) >= 0 and Wheels(self, self.begins[-1], waits=False).possible()


class Wheels:
    """Depth-first placement of the ops of one period of a case."""

    def __init__(self, case: Case, period: int, *, waits: bool = True) -> None:
        self.case, self.period, self.waits = case, period, waits
        gpus = range(len(case.spare))
        self.busy: dict[object, int] = {}
        self.level = [0 for _ in gpus]
        half = 1 << BITS - 1
        self.left = [period * case.spare[gpu] - case.area[gpu] for gpu in gpus]
        self.high = _filled(period, half)
        self.guard = [_filled(period, half - 1 - case.spare[gpu]) for gpu in gpus]
        self.starts: list[int] = []
        self.sent: dict[int, int] = {}
        most = sum(size.kept + size.forward + size.backward for size in case.size)
        assert (4 * len(case.length) + 4) * most < half

    def possible(self) -> bool:
        """Whether some placement keeps every rule."""
        return min(self.left) >= 0 and self._compute(0, 0)

    def _mask(self, start: int, length: int) -> int:
        """One bit for each of the period's slots that the op fills."""
        filled = ((1 << length) - 1) << (start % self.period)
        return (filled | filled >> self.period) & ((1 << self.period) - 1)

    def _stay(self, start: int, length: int) -> int:
        """How often each slot is in [start, start + length)."""
        full, part = divmod(length, self.period)
        row = _runs(self.period)[start % self.period]
        return _filled(self.period, full) + row[part]

    def _fits(self, gpu: int) -> bool:
        return not (self.level[gpu] + self.guard[gpu]) & self.high

    def _compute(self, op: int, ready: int) -> bool:
        """Place this op and all that follow; it can start at `ready` at the earliest."""
        case = self.case
        if op == len(case.length):
            cuts = [before for before, cut in enumerate(case.crosses) if cut]
            return self._transfers({before: self._choices(before) for before in cuts})
        gpu, length = case.gpu[op], case.length[op]
        level, left = list(self.level), list(self.left)
        for start in self._starts(op, ready):
            if start > ready and not self._wait(op, start - 1):
                break
            mask = self._mask(start, length)
            if self.busy.get(gpu, 0) & mask:
                continue
            before = self.level[gpu]
            self.level[gpu] += self._own(op, start)
            self.busy[gpu] = self.busy.get(gpu, 0) | mask
            self.starts.append(start)
            follows = start + length + (case.wire[op] if op < len(case.wire) else 0)
            crossed = op > 0 and case.crosses[op - 1]
            fits = self._fits(gpu) and (not crossed or bool(self._choices(op - 1)))
            if fits and self._compute(op + 1, follows):
                return True
            self.starts.pop()
            self.busy[gpu] ^= mask
            self.level[gpu] = before
        self.level, self.left = level, left
        return False

    def _starts(self, op: int, ready: int) -> range:
        """What to try: behind a transfer that takes time both may wait nearly a period."""
        if op == 0 or not self.waits:
            return range(ready, ready + 1)
        waits = 2 if self.case.wire[op - 1] else 1
        return range(ready, ready + waits * (self.period - 1) + 1)

    def _wait(self, op: int, slot: int) -> bool:
        """All whose backward has not been stays a slot longer; whether that fits.

        Each is counted to the end of its backward as if nothing behind this op had to wait; all
        together, with what is not placed yet, must be room for on average too.
        """
        case, count = self.case, len(self.case.homes)
        touched = set()
        for layer in range(min(op, 2 * count - op)):
            end = slot + case.begins[2 * count - 1 - layer] - case.begins[op]
            end += case.length[2 * count - 1 - layer]
            gpu, kept = case.homes[layer], case.size[layer].kept
            self.level[gpu] += kept << BITS * (end % self.period)
            self.left[gpu] -= kept
            touched.add(gpu)
        if not case.crosses[op - 1] and op != count:
            self.level[case.gpu[op]] += case.unsaved(op - 1) << BITS * (slot % self.period)
            touched.add(case.gpu[op])
        return all(self.left[gpu] >= 0 and self._fits(gpu) for gpu in touched)

    def _own(self, op: int, start: int) -> int:
        """What an op adds to its GPU: its working bytes, and what its forward keeps."""
        case, last = self.case, 2 * len(self.case.homes) - 1
        size, length = case.size[case.layer[op]], case.length[op]
        forward = op <= last - op
        running = (size.forward if forward else size.backward) - size.kept
        added = running * self._stay(start, length)
        if forward:
            whole = case.begins[last - op] - case.begins[op] + case.length[last - op]
            added += size.kept * self._stay(start, whole)
        return added

    def _choices(self, op: int) -> list[tuple[int, int, int]]:
        """Of the transfer behind an op: (start, bytes on the sender, on the receiver) that fit.

        As far as ops are placed: with more of them it is posted no later, and less fits.
        """
        case, found = self.case, []
        end, use = self.starts[op] + case.length[op], self.starts[op + 1]
        here, there, wire = case.gpu[op], case.gpu[op + 1], case.wire[op]
        first = max(end, use - wire - self.period + 1)
        last = min(use - wire, end + self.period - 1)
        for start in range(first, last + 1):
            post = self._held(there, self._held(here, start))
            sent = case.unsaved(op) * self._stay(end, start + wire - end)
            received = case.machine.full(op) * self._stay(post, use - post)
            if self._with(here, sent) and self._with(there, received):
                found.append((start, sent, received))
        return found

    def _with(self, gpu: int, more: int) -> bool:
        return not (self.level[gpu] + more + self.guard[gpu]) & self.high

    def _held(self, gpu: int, time: int) -> int:
        """(O1): back to the start of the compute op that this time lies strictly inside of."""
        for op, start in enumerate(self.starts):
            inside = (time - start) % self.period
            if self.case.gpu[op] == gpu and 0 < inside < self.case.length[op]:
                return time - inside
        return time

    def _transfers(self, left: dict[int, list[tuple[int, int, int]]]) -> bool:
        """Place the transfers that are left, that of the fewest choices first."""
        if not left:
            return self._judge()
        op = min(left, key=lambda each: len(left[each]))
        rest = {each: choices for each, choices in left.items() if each != op}
        link, (here, there) = self.case.link(op), self.case.gpu[op : op + 2]
        for start, sent, received in left[op]:
            mask = self._mask(start, self.case.wire[op])
            if self.busy.get(link, 0) & mask:
                continue
            if not self._with(here, sent) or not self._with(there, received):
                continue
            self.busy[link] = self.busy.get(link, 0) | mask
            self.level[here] += sent
            self.level[there] += received
            self.sent[op] = start
            if self._transfers(rest):
                return True
            self.level[here] -= sent
            self.level[there] -= received
            self.busy[link] ^= mask
        return False

    def _judge(self) -> bool:
        """Whether the verifier takes it, with some of the neighbours that can be as one stage."""
        homes = self.case.homes
        joints = [self._together(layer) for layer in range(len(homes) - 1)]
        splits = product(*[(True, False) if joint else (True,) for joint in joints])
        return any(self._taken(each) for each in splits)

    def _together(self, layer: int) -> bool:
        """Whether this layer and the next stand back to back, forward and backward."""
        if self.case.crosses[layer]:
            return False
        back = 2 * len(self.case.homes) - 2 - layer
        return all(
            self.starts[op] + self.case.length[op] == self.starts[op + 1] for op in (layer, back)
        )

    def _taken(self, splits: tuple[bool, ...]) -> bool:
        stages = [(0, 0, self.case.homes[0])]
        for layer, split in enumerate(splits, start=1):
            if split:
                stages.append((layer, layer, self.case.homes[layer]))
            else:
                stages[-1] = (stages[-1][0], layer, self.case.homes[layer])
        chain, cluster, last = self.case.machine.chain, self.case.machine.cluster, len(self.starts)
        times = {}
        for kind, stage in handmade.order(stages):
            begin, end, _ = stages[stage]
            op = end if kind in (OpKind.F, OpKind.SEND_F) else last - 1 - begin
            if kind.is_compute:
                first = begin if kind is OpKind.F else last - 1 - end
                times[f"{stage}{kind}0"] = self.starts[first]
            else:
                times[f"{stage}{kind}0"] = self.sent[op]
        plan = handmade.plan(
            chain, stages, self.period, times, cluster=cluster, microbatches=64, semantics="2bw"
        )
        return all(violation.rule is Rule.BOUNDS for violation in verify(plan))


def every_case(chain: Chain, cluster: Cluster) -> Iterator[Case]:
    """Every set of runs on every allocation, of equal GPUs only the first new one."""
    assert len({gpu.memory_bytes for gpu in cluster.gpus}) == 1
    for one in oracle.every_chain(chain):
        machine = Machine(one, cluster)
        for homes in _every_homes(len(one.layers), len(cluster.gpus)):
            yield Case(machine, homes)


def _every_homes(layers: int, gpus: int) -> Iterator[Homes]:
    if not layers:
        yield ()
        return
    for start in _every_homes(layers - 1, gpus):
        for gpu in range(min(gpus, max(start, default=-1) + 2)):
            yield (*start, gpu)


def optimum(chain: Chain, cluster: Cluster) -> int | None:
    """The shortest period of one micro-batch, whatever is computed again; None if none fits.

    Args:
        chain: Up to about six layers of a few ns, none of zero ns, without shared parameters.
        cluster: Up to about three equal GPUs.
    """
    cases, period = list(every_case(chain, cluster)), 1
    longest = max(case.load for case in cases)
    while not any(case.possible(period) for case in cases):
        if period >= longest and not any(case.fits for case in cases):
            return None
        period += 1
    return period
