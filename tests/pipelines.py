"""Small models and hand-made pipelines for tests of the runtime."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from pipeplan import cluster
from pipeplan.chain import Chain, Layer
from pipeplan.plan import Plan, Semantics, Stage
from pipeplan.program import ActionKind, Pattern, PeriodicAction
from pipeplan.runtime.build import Worker, build
from pipeplan.runtime.data.feed import TaskFeed, Uses
from pipeplan.runtime.interfaces import Observer
from pipeplan.runtime.supervision.board import LocalBoard
from pipeplan.runtime.supervision.stop_consensus import BoardConsensus
from pipeplan.runtime.supervision.stop_request import NoRequest
from pipeplan.runtime.transport.base import Transport
from pipeplan.split_model import SplitModel, TensorSpec
from pipeplan.task import Task, Tied
from pipeplan.testing.in_process import run_ranks

torch.set_num_threads(1)
K = ActionKind


class SkipOut(nn.Module):
    """x -> (f(x), x, an integer tensor): a boundary of three tensors, one without gradient."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return torch.tanh(self.linear(x)), x, torch.arange(x.shape[0])


class PassOn(nn.Module):
    """Works on the first tensor and lets the others ride along."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor, skip: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.dropout(self.linear(x)), skip, rows


class SkipIn(nn.Module):
    """Joins what `SkipOut` parted."""

    def forward(self, x: Tensor, skip: Tensor, rows: Tensor) -> Tensor:
        return (x + skip) * (rows[:, None] + 1)


def layers_of(width: int) -> list[nn.Module]:
    """Eight layers: dropout, an in-place activation, batch norm, scale by a parameter, a skip."""
    return [
        nn.Sequential(nn.Linear(width, width), nn.Dropout(0.1)),
        nn.ReLU(inplace=True),
        nn.LayerNorm(width),
        SkipOut(width),
        PassOn(width),
        SkipIn(),
        nn.BatchNorm1d(width),
        nn.Sequential(nn.Dropout(0.1), nn.Linear(width, 3)),
    ]


OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
}


def data(microbatch: int) -> tuple[Tensor, Tensor]:
    """Deterministic random rows and classes."""
    generator = torch.Generator().manual_seed(microbatch)
    rows = torch.randn(5, 6, generator=generator)
    return rows, torch.randint(0, 3, (5,), generator=generator)


def toy(optimizer: str = "sgd") -> tuple[SplitModel, Task]:
    """The eight layers, split, with initial weights that are always the same."""
    torch.manual_seed(7)
    return split_by_hand(layers_of(6), optimizer)


def tied(*, clip: bool, how: Tied, optimizer: str = "adamw") -> tuple[SplitModel, Task]:
    """Five layers: the outer two share a weight, the inner two a bias."""
    torch.manual_seed(1)
    layers = [nn.Linear(6, 6), nn.Linear(6, 6), nn.Dropout(0.1), nn.Linear(6, 6), nn.Linear(6, 6)]
    layers[4].weight = layers[0].weight
    layers[3].bias = layers[1].bias
    split, task = split_by_hand(layers, optimizer)
    return split, replace(task, tied=how, clip_norm=0.2 if clip else None)


def split_by_hand(
    layers: Sequence[nn.Module],
    optimizer: str,
    *,
    data: Callable[[int], tuple[Tensor, Tensor]] = data,
    loss: Callable[[Tensor, Tensor], Tensor] = nn.functional.cross_entropy,
    fed: Sequence[int] = (),
) -> tuple[SplitModel, Task]:
    """A split of `layers` whose boundaries are found by running a copy of them once.

    Layers `fed` get the model's input behind their boundary.
    """
    task = Task(model=list(layers), loss=loss, optimizer=OPTIMIZERS[optimizer], data=data)
    source = data(0)[0]
    boundary: tuple[Tensor, ...] = (source,)
    boundaries = []
    for index, layer in enumerate(copy.deepcopy(list(layers))):
        boundaries.append(tuple(_spec(tensor, index > 0) for tensor in boundary))
        result = layer(*boundary, *([source] if index in fed else []))
        boundary = result if isinstance(result, tuple) else (result,)
    owners: dict[Tensor, str] = {}
    fqns = []
    for index, layer in enumerate(layers):
        tensors = [*layer.named_parameters(), *layer.named_buffers()]
        fqns.append({n: owners.setdefault(t, f"{index}.{n}") for n, t in tensors})
    names = tuple(f"layer{i}" for i in range(len(layers)))
    return SplitModel(
        layers=tuple(layers),
        names=names,
        fqns=tuple(fqns),
        boundaries=tuple(boundaries),
        microbatch_size=len(source),
        fed=tuple((0,) if index in fed else () for index in range(len(layers))),
    ), task


def _spec(tensor: Tensor, inner: bool) -> TensorSpec:
    return TensorSpec(tuple(tensor.shape), str(tensor.dtype), inner and tensor.is_floating_point())


def plan_of(
    cuts: Sequence[int],
    gpus: Sequence[int],
    semantics: Semantics,
    microbatches: int,
    layers: int = 8,
    k: int = 1,
) -> Plan:
    """A plan without times: stages cut before layers `cuts`, stage i on `gpus[i]`."""
    chain = Chain(
        name="toy",
        layers=tuple(
            Layer(name=f"layer{i}", forward_ns=1, backward_ns=1, output_bytes=0)
            for i in range(layers)
        ),
    )
    edges = [0, *cuts, layers]
    return Plan(
        chain=chain,
        chain_digest=chain.digest(),
        cluster=cluster.uniform(max(gpus) + 1, 2**30),
        semantics=semantics,
        microbatches=microbatches,
        k=k,
        period_ns=1,
        step_ns=1,
        stages=tuple(
            Stage(id=i, layers=(edges[i], edges[i + 1] - 1), gpu=gpu) for i, gpu in enumerate(gpus)
        ),
        ops=(),
        memory=(),
    )


def split_backwards(plan: Plan, stages: Sequence[int] | None = None) -> Plan:
    """`plan` with the backwards of `stages` in two halves; of all but the first by default."""
    chosen = range(1, len(plan.stages)) if stages is None else stages

    def halved(stage: Stage) -> Stage:
        return stage.model_copy(update={"split_backward": stage.id in chosen})

    return plan.model_copy(update={"stages": tuple(map(halved, plan.stages))})


def without_first_in_place(plan: Plan) -> Plan:
    """`plan` with no run that begins at layer 1 of the toy, which works in place on its input."""

    def kept(stage: Stage) -> Stage:
        if not stage.remat or all(first != 1 for first, _ in stage.remat.recompute):
            return stage
        remat = stage.remat.model_copy(update={"recompute": ()})
        left = remat.offloads or remat.programs
        return stage.model_copy(update={"remat": remat if left else None})

    return plan.model_copy(update={"stages": tuple(map(kept, plan.stages))})


def pattern_of(plan: Plan, period: int) -> Pattern:
    """A pattern in which the ops of a micro-batch start one time unit apart, every `period` units.

    Copy c starts c * period later, and k periods are one. A small one: many in flight. Where a
    backward is split, W comes four units after I.
    """
    stages, k = plan.stages, plan.k
    last = len(stages) - 1
    timed: dict[int, list[tuple[int, int, PeriodicAction]]] = {
        rank: [] for rank in range(len(plan.cluster.gpus))
    }

    def put(rank: int, time: int, order: int, kind: ActionKind, stage: int, copy_: int) -> None:
        start = time + copy_ * period
        shift, at = divmod(start, period * k)
        timed[rank].append((at, order, PeriodicAction(kind, stage, copy_, shift)))

    def message(time: int, source: int, target: int, forward: bool, copy_: int) -> None:
        sender, receiver = stages[source].gpu, stages[target].gpu
        if sender == receiver:
            return
        send, receive, free = (
            (K.SEND_F, K.RECV_F, K.FREE_F) if forward else (K.SEND_B, K.RECV_B, K.FREE_B)
        )
        put(receiver, 10 * time + 2, 0, receive, target, copy_)
        put(sender, 10 * time + 3, 0, send, source, copy_)
        put(sender, 10 * time + 5, 0, free, source, copy_)

    period *= 10
    for copy_ in range(k):
        for stage in stages:
            begin, back = stage.id, 2 * last + 1 - stage.id
            put(stage.gpu, 10 * begin, 1, K.F, stage.id, copy_)
            if stage.split_backward:
                put(stage.gpu, 10 * back, 1, K.I, stage.id, copy_)
                put(stage.gpu, 10 * (back + 4), 3, K.W, stage.id, copy_)
            else:
                put(stage.gpu, 10 * back, 1, K.B, stage.id, copy_)
            if plan.semantics == "2bw":
                put(stage.gpu, 10 * back, 2, K.OPT, stage.id, copy_)
            if stage.id < last:
                message(begin, stage.id, stage.id + 1, True, copy_)
            if stage.id:
                message(back, stage.id, stage.id - 1, False, copy_)
    return Pattern(
        k,
        plan.semantics,
        plan.microbatches,
        tuple(tuple(a for _, _, a in sorted(rank, key=_order)) for rank in timed.values()),
        tuple(tuple(s.id for s in plan.hosted(rank)) for rank in timed),
    )


def _order(entry: tuple[int, int, PeriodicAction]) -> tuple[int, int, int, int]:
    at, order, action = entry
    return (at, -action.shift, action.stage, order)


class Listener(Observer):
    """Collects what the executor tells."""

    def __init__(self) -> None:
        self.losses: dict[int, float] = {}
        self.backwards: list[int] = []
        self.updates: list[tuple[int, int]] = []
        self.steps: dict[int, tuple[float, tuple[float, ...]]] = {}

    def loss(self, microbatch: int, value: float) -> None:
        self.losses[microbatch] = value

    def backward(self, microbatch: int, end_ns: int) -> None:
        self.backwards.append(microbatch)

    def updated(self, stage: int, step: int) -> None:
        self.updates.append((stage, step))

    def stepped(self, step: int, norm: float, rates: tuple[float, ...]) -> None:
        assert step == len(self.steps), "steps come in order"
        self.steps[step] = norm, rates


@dataclass(frozen=True)
class Outcome:
    """What came of a run."""

    losses: list[float]
    """In order."""
    weights: dict[str, Tensor]
    """The last ones, by name."""
    steps: int
    """Done."""
    norms: list[float]
    """Of the gradient of each step, before clipping."""
    rates: list[tuple[float, ...]]
    """Learning rates of each step."""


class _Asking(BoardConsensus):
    """Asks before one step."""

    at: int | None = None

    def begin_step(self, step: int) -> bool:
        if step == self.at:
            self.ask()
        return super().begin_step(step)


def train(
    plan: Plan,
    pattern: Pattern,
    split: SplitModel,
    task: Task,
    steps: int,
    *,
    seed: int = 3,
    stop_at: Mapping[int, int] | None = None,
) -> Outcome:
    """A pipelined run of all ranks in this process.

    Args:
        plan: stages and semantics.
        pattern: what the ranks do.
        split: trained in place.
        task: loss, optimizer, data.
        steps: in total.
        seed: of dropout.
        stop_at: rank -> the step before which it wants all ranks to stop.
    """
    board, ranks = LocalBoard(), len(plan.cluster.gpus)
    consensuses: list[BoardConsensus] = []

    def work(transport: Transport) -> tuple[Listener, dict[str, Tensor], int]:
        listener = Listener()
        feed = TaskFeed(task, split, Uses.of(plan, split, transport.rank))
        consensus = _Asking(board, transport.rank, ranks, NoRequest(), first=0, timeout_s=60)
        consensus.at = (stop_at or {}).get(transport.rank)
        consensuses.append(consensus)
        ends = plan, pattern, split, task, feed, transport, listener
        worker = build(*ends, seed=seed, consensus=consensus, reports=True)
        done = worker.executor.run(0, steps)
        return listener, weights_of(worker), done

    results = run_ranks(ranks, work)
    for consensus in consensuses:
        consensus.close()
    losses = {number: value for each, _, _ in results for number, value in each.losses.items()}
    told = next((each.steps for each, _, _ in results if each.steps), {})
    weights = {name: value for _, found, _ in results for name, value in found.items()}
    (done,) = {results[stage.gpu][2] for stage in plan.stages}
    norms, rates = zip(*told.values(), strict=True) if told else ((), ())
    return Outcome([losses[i] for i in sorted(losses)], weights, done, list(norms), list(rates))


def weights_of(worker: Worker) -> dict[str, Tensor]:
    """Newest weights and buffers of the hosted stages, by name in the user's model."""
    return {
        name: value.clone()
        for stage in worker.stages.values()
        for name, value in stage.state().items()
    }
