"""An oracle for small plans: a window of many periods, written down micro-batch by micro-batch.

It knows nothing of folding, bases or counts: it lists intervals and events of each micro-batch
with their (O5) keys and adds up what is alive; rules are tried on all pairs of ops.
"""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise
from typing import Self

from pipeplan.plan import OpKind, Plan
from tests import handmade_greedy, split_bytes

F, B, W = OpKind.F, OpKind.B, OpKind.W
OFFLOAD, PREFETCH = OpKind.OFFLOAD, OpKind.PREFETCH
Key = tuple[int, ...]


class Unrolled:
    """Intervals (alloc key, release key, term, bytes) and event keys of each GPU."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.T, self.S = plan, plan.period_ns, len(plan.stages)
        self.ops = {(op.kind, op.stage, op.copy_): op for op in plan.ops}
        reach = 3 + max(op.shift for op in plan.ops)
        self.window = range(-reach * plan.k, (reach + 1) * plan.k)
        self.held: list[list[tuple[Key, Key, str, int]]] = [[] for _ in plan.cluster.gpus]
        self.events: list[set[Key]] = [set() for _ in plan.cluster.gpus]
        self.hosted: list[list[tuple[Key, Key, int]]] = [[] for _ in plan.cluster.gpus]

    def filled(self) -> Self:
        """With every micro-batch's intervals and events; needs an order on each GPU."""
        for m in self.window:
            for stage in range(self.S):
                self.add_stage(m, stage)
        return self

    def back(self, stage: int) -> OpKind:
        """B, or I."""
        return OpKind.I if self.plan.stages[stage].split_backward else B

    def has(self, kind: OpKind, stage: int, m: int) -> bool:
        """Whether micro-batch m has this op: not all have those of (H2)."""
        return (kind, stage, m % self.plan.k) in self.ops

    def time(self, kind: OpKind, stage: int, m: int) -> tuple[int, int]:
        """(T4): start and end of an op of micro-batch m."""
        op = self.ops[kind, stage, m % self.plan.k]
        start = (m // self.plan.k + op.shift) * self.T + op.start_ns
        return start, start + op.duration_ns

    def pos(self, kind: OpKind, stage: int) -> int:
        """(T1), (H5), (S1)."""
        if kind is W:
            return 6 * self.S + stage
        if kind.is_host:
            return 4 * self.S + 2 * stage + (kind is PREFETCH)
        forward = kind in (F, OpKind.SEND_F)
        place = 2 * stage if forward else 4 * self.S - 3 - 2 * stage
        return place + (not kind.is_compute)

    def start(self, kind: OpKind, stage: int, m: int) -> Key:
        """(O5) of the start of a compute op."""
        begin, end = self.time(kind, stage, m)
        return (begin, 4 if end > begin else 2, m, self.pos(kind, stage), 0, 0)

    def end(self, kind: OpKind, stage: int, m: int) -> Key:
        """(O5) of its end."""
        begin, end = self.time(kind, stage, m)
        if end > begin:
            return (end, 0, m, self.pos(kind, stage), 0, 0)
        return (end, 2, m, self.pos(kind, stage), 0, 1)

    def hold(self, gpu: int, x: int) -> int:
        """(O1), by looking at every compute op."""
        return next((begin for begin, end in self.computes[gpu] if begin < x < end), x)

    @cached_property
    def computes(self) -> list[list[tuple[int, int]]]:
        """Start and end of every compute op of the window, by GPU: `hold` asks often."""
        found: list[list[tuple[int, int]]] = [[] for _ in self.plan.cluster.gpus]
        for (kind, stage, copy), op in self.ops.items():
            if kind.is_compute:
                for m in self.window:
                    if m % self.plan.k == copy:
                        begin, end = self.time(kind, stage, m)
                        assert end - begin == op.duration_ns
                        found[self.plan.stages[stage].gpu].append((begin, end))
        return found

    def keep(self, gpu: int, term: str, size: int, alloc: Key, release: Key) -> None:
        """Notes one interval."""
        assert alloc < release
        self.held[gpu].append((alloc, release, term, size))
        self.events[gpu] |= {alloc, release}

    def add_stage(self, m: int, s: int) -> None:
        """(M2), (M3), optimizer instants, and what leaves the stage."""
        plan, stage = self.plan, self.plan.stages[s]
        layers, gpu = plan.chain.layers[stage.first : stage.last + 1], stage.gpu
        kept, forward, backward = stage_bytes(plan, s)
        back = self.back(s)
        if back is OpKind.I:
            backward = split_bytes.inputs(plan, s)
            self.add_weights(m, s)
        if plan.memory_model == "paper":
            self.keep(gpu, "saved", kept, self.end(F, s, m), self.end(back, s, m))
        else:
            self.keep(gpu, "saved", kept, self.start(F, s, m), self.end(back, s, m))
            forward, backward = forward - kept, backward - kept
        self.keep(gpu, "working", forward, self.start(F, s, m), self.end(F, s, m))
        self.keep(gpu, "working", backward, self.start(back, s, m), self.end(back, s, m))
        if plan.semantics == "2bw" and plan.memory_model == "exact":
            at = (self.time(B, s, m)[1], 3, m, self.pos(B, s), 0)
            size = max(x.optimizer_workspace_bytes for x in layers)
            self.keep(gpu, "working", size, (*at, 0), (*at, 1))
        if self.has(OFFLOAD, s, m):
            self.add_away(m, s)
        if s + 1 < self.S:
            out = layers[-1].output_bytes
            paper = plan.memory_model == "paper"
            unsaved = out if paper else out - layers[-1].saved_output_bytes
            self.add_edge(m, (F, s), (F, s + 1), unsaved, out)
            gradient = out if paper else layers[-1].gradient_of_output_bytes
            self.add_edge(m, (self.back(s + 1), s + 1), (back, s), gradient, gradient)

    def add_weights(self, m: int, s: int) -> None:
        """(S3), (S5)."""
        kept, running, shared = split_bytes.weights(self.plan, s)
        gpu, done = self.plan.stages[s].gpu, self.end(OpKind.I, s, m)
        begin, end = self.start(W, s, m), self.end(W, s, m)
        self.keep(gpu, "saved", kept, done, end)
        self.keep(gpu, "working", running - kept, begin, end)
        if shared:
            self.keep(
                gpu, "saved", -shared, done, min(end, self.start(self.back(s - 1), s - 1, m))
            )

    def add_away(self, m: int, s: int) -> None:
        """(H5) to (H7)."""
        gpu, size = self.plan.stages[s].gpu, away_bytes(self.plan, s)
        (there, gone), (back, _) = (self.time(kind, s, m) for kind in (OFFLOAD, PREFETCH))
        issue = (self.hold(gpu, there), 2, m, self.pos(OFFLOAD, s), 0, 0)
        free = (max(gone, self.time(F, s, m)[1]), 0, m, self.pos(OFFLOAD, s), 0, 0)
        post = (self.hold(gpu, back), 1, m, self.pos(PREFETCH, s), 0, 0)
        assert issue < free < post < self.start(self.back(s), s, m)
        self.keep(gpu, "saved", -size, free, post)
        self.events[gpu].add(issue)
        self.hosted[gpu].append((issue, self.start(self.back(s), s, m), size))

    def host_bytes(self, gpu: int) -> int:
        """(H7), instant by instant."""
        return max(
            (
                sum(size for begin, end, size in self.hosted[gpu] if begin <= key < end)
                for key in self.events[gpu]
                if 0 <= key[0] < self.T
            ),
            default=0,
        )

    def add_edge(
        self, m: int, before: tuple[OpKind, int], after: tuple[OpKind, int], sent: int, got: int
    ) -> None:
        """(M4), (M5)."""
        source, target = (self.plan.stages[s].gpu for _, s in (before, after))
        done, used = self.end(*before, m), self.start(*after, m)
        if source == target:
            self.keep(source, "direct", sent, done, used)
        elif self.plan.memory_model == "exact":
            kind = OpKind.SEND_F if before[0] is F else OpKind.SEND_B
            begin, end = self.time(kind, before[1], m)
            place = self.pos(kind, before[1])
            free = (end, 0, m, place, 0, 0) if end > begin else (end, 2, m, place, 1, 0)
            issue = self.hold(source, begin)
            post = self.hold(target, issue)
            assert post <= issue <= begin
            self.keep(source, "message", sent, done, free)
            self.events[source].add((issue, 2, m, place, 0, 0))
            self.keep(target, "message", got, (post, 1, m, place, 0, 0), used)

    def peak(self, gpu: int) -> dict[str, int]:
        """The terms after the first event of period 0 that reaches the largest total."""
        best = dict.fromkeys(("saved", "working", "direct", "message"), 0)
        for key in sorted(key for key in self.events[gpu] if 0 <= key[0] < self.T):
            if self.plan.memory_model == "paper" and not self.is_start(gpu, key):
                continue
            alive = dict.fromkeys(best, 0)
            for alloc, release, term, size in self.held[gpu]:
                alive[term] += size if alloc <= key < release else 0
            if sum(alive.values()) > sum(best.values()):
                best = alive
        return best

    def is_start(self, gpu: int, key: Key) -> bool:
        """Whether an event is the start of a compute op."""
        return any(
            key == self.start(kind, stage.id, m)
            for stage in self.plan.hosted(gpu)
            for kind in (F, B)
            for m in self.window
        )


def stage_bytes(plan: Plan, s: int) -> tuple[int, int, int]:
    """(M2), (M3) or (P2), (P3), sum by sum."""
    stage, chain = plan.stages[s], plan.chain
    a, b, L = stage.first, stage.last, chain.layers
    x = {i: chain.input_of(i) for i in range(a, b + 1)}
    if plan.memory_model == "paper":
        st_ = {i: L[i].saved_input_bytes + L[i].saved_bytes + L[i].saved_output_bytes for i in x}
        forward = [
            sum(st_[j] for j in range(a, i)) + max(st_[i], x[i]) + L[i].output_bytes for i in x
        ]
        backward = [L[i].output_bytes + x[i] - sum(st_[j] for j in range(i + 1, b + 1)) for i in x]
        return sum(st_.values()), max(forward), max(backward)
    shared = s > 0 and plan.stages[s - 1].gpu == stage.gpu
    u = L[a - 1].saved_output_bytes if shared else 0
    si, xa = max(0, L[a].saved_input_bytes - u), max(0, x[a] - u)
    K = {i: max(L[i].saved_output_bytes, L[i + 1].saved_input_bytes) for i in range(a, b)}
    kept = si + sum(L[i].saved_bytes for i in x) + sum(K.values()) + L[b].saved_output_bytes
    forward, backward = [], []
    for i in x:
        first = max(si, xa) if i == a else max(K[i - 1], x[i])
        earlier = 0 if i == a else si + sum(K[j] for j in range(a, i - 1))
        rest = sum(L[j].saved_bytes for j in range(a, i + 1))
        forward.append(first + earlier + rest + L[i].forward_workspace_bytes + L[i].output_bytes)
        gx = L[i - 1].gradient_of_output_bytes if i else 0
        behind = si + rest + sum(K[j] for j in range(a, i)) + L[i].saved_output_bytes
        gradients = L[i].gradient_of_output_bytes + gx
        backward.append(behind + L[i].backward_workspace_bytes + gradients)
    return kept, max(forward), max(backward)


def away_bytes(plan: Plan, s: int) -> int:
    """(H1), sum by sum."""
    remat, L = plan.stages[s].remat, plan.chain.layers
    enters, a = remat is not None and remat.offload_input, plan.stages[s].first
    shared = s > 0 and plan.stages[s - 1].gpu == plan.stages[s].gpu
    u = L[a - 1].saved_output_bytes if shared else 0
    return enters * max(L[a].saved_input_bytes, u) + sum(
        sum(L[i].saved_bytes for i in range(a, b + 1))
        + sum(max(L[i].saved_output_bytes, L[i + 1].saved_input_bytes) for i in range(a, b))
        for a, b in (remat.offload if remat else ())
    )


def buffers(plan: Plan, gpu: int) -> int:
    """(P5): slots counted instant by instant, half-open, over micro-batches of many periods."""
    if plan.memory_model == "exact":
        return 0
    grid, total = Unrolled(plan), 0
    for s in range(len(plan.stages) - 1):
        source, target = plan.stages[s].gpu, plan.stages[s + 1].gpu
        if source == target or gpu not in (source, target):
            continue
        size = plan.chain.layers[plan.stages[s].last].output_bytes
        for before, kind, after in (
            ((F, s), OpKind.SEND_F, (F, s + 1)),
            ((B, s + 1), OpKind.SEND_B, (B, s)),
        ):
            sends = plan.stages[before[1]].gpu == gpu
            spans = []
            for m in grid.window:
                begin, end = grid.time(kind, before[1], m)
                done, used = grid.time(*before, m)[1], grid.time(*after, m)[0]
                spans.append((done, end) if sends else (begin, used))
            counts = [sum(a <= x < b for a, b in spans) for x in range(plan.period_ns)]
            total += size * max(1, *counts)
    return total


def states(plan: Plan, gpu: int) -> int:
    """(M1) or (P1)."""
    layers = [
        layer
        for stage in plan.hosted(gpu)
        for layer in plan.chain.layers[stage.first : stage.last + 1]
    ]
    if plan.memory_model == "paper":
        return 3 * sum(layer.weight_bytes for layer in layers)
    versions = 2 if plan.semantics == "2bw" else 1
    return sum(
        versions * layer.weight_bytes + layer.gradient_bytes + layer.optimizer_bytes
        for layer in layers
    )


def broken(grid: Unrolled) -> set[str]:
    """Rules (R1) to (R5), (H3), (H4), (S1) straight from their text, on all pairs of a window."""
    plan, found = grid.plan, set[str]()
    reach = (3 + shifts(plan)) * plan.k
    if min(op.shift for op in plan.ops):
        found.add("shifts")
    kinds = sorted({(k, s) for k, s, _ in grid.ops}, key=lambda op: grid.pos(*op))
    if any(late(grid, kinds, m) for m in range(plan.k)):
        found.add("precedence")
    for u in kinds:
        for m in (m for m in range(plan.k) if grid.has(*u, m)):
            after = next(n for n in range(m + 1, m + plan.k + 1) if grid.has(*u, n))
            if grid.time(*u, m)[1] > grid.time(*u, after)[0]:
                found.add("fifo")
        for v in kinds:
            where_u, where_v = (resource(plan, *op) for op in (u, v))
            if where_u == where_v and any(
                (u, m) != (v, n) and overlap(grid.time(*u, m), grid.time(*v, n))
                for m in range(plan.k)
                for n in range(m - reach, m + reach + 1)
                if grid.has(*u, m) and grid.has(*v, n)
            ):
                found.add("gpu" if u[0].is_compute else "link")
    return found


def late(grid: Unrolled, kinds: list[tuple[OpKind, int]], m: int) -> bool:
    """Whether micro-batch m breaks (R2), (H3) or (S1)."""
    chain = [op for op in kinds if not op[0].is_host and op[0] is not W]
    halves = [s for kind, s in kinds if kind is W]
    if any(grid.time(OpKind.I, s, m)[1] > grid.time(W, s, m)[0] for s in halves):
        return True
    if any(grid.time(*u, m)[1] > grid.time(*v, m)[0] for u, v in pairwise(chain)):
        return True
    for s in (s for kind, s in kinds if kind is OFFLOAD and grid.has(kind, s, m)):
        (begin, gone), (back, there) = (grid.time(kind, s, m) for kind in (OFFLOAD, PREFETCH))
        (starts, done), (used, _) = (grid.time(kind, s, m) for kind in (F, grid.back(s)))
        since = starts if whole_input(grid.plan, s) else done
        if since > begin or gone > grid.hold(grid.plan.stages[s].gpu, back) or there > used:
            return True
    return False


def whole_input(plan: Plan, s: int) -> bool:
    """Whether a stage sends all of its input and nothing else: then it may begin with F."""
    remat, first = plan.stages[s].remat, plan.stages[s].first
    whole = plan.chain.layers[first - 1].output_bytes if first else plan.chain.input_bytes
    return bool(remat and not remat.offload) and away_bytes(plan, s) == whole


def shifts(plan: Plan) -> int:
    """The largest shift."""
    return max(op.shift for op in plan.ops)


def resource(plan: Plan, kind: OpKind, stage: int) -> object:
    """What an op excludes others on."""
    if kind.is_host:
        assert plan.cluster.host is not None
        both = plan.cluster.host.duplex == "half"
        return (plan.stages[stage].gpu, "host" if both else kind)
    stages = [(s.first, s.last, s.gpu) for s in plan.stages]
    return handmade_greedy.resource(plan.cluster, stages, kind, stage)


def overlap(u: tuple[int, int], v: tuple[int, int]) -> bool:
    """(R4): half-open intervals meet; one without length meets only the inside of another."""
    (a, b), (c, d) = u, v
    if a == b or c == d:
        return (a < c < b) or (c < a < d)
    return a < d and c < b
