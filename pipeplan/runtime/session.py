"""One rank's training, as `launch` and `Pipeline` both hold it from joining the others to leaving.

A session makes the worker of a rank and counts its steps. It stops all ranks at numbers that are
not finite, writes and reads checkpoints, evaluates, and finds out which rank a failure came from.
What is printed, and what a failure ends, is left to the owner, who also owns the transport.
"""

from __future__ import annotations

import secrets
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore, Store

from pipeplan.errors import RankError
from pipeplan.runtime.build import Worker, build
from pipeplan.runtime.checkpoint.checkpoints import Checkpoints
from pipeplan.runtime.checkpoint.storage import CheckpointMeta
from pipeplan.runtime.data.batches import BatchFeed
from pipeplan.runtime.data.feed import Feed, TaskFeed, Uses
from pipeplan.runtime.evaluation import evaluate
from pipeplan.runtime.finite_guard import FiniteGuard, GuardedObserver, first_of
from pipeplan.runtime.instrument import CountedFeed, CountedTransport, states
from pipeplan.runtime.instrument.sampling import sampled
from pipeplan.runtime.instrument.storage_log import StorageLog
from pipeplan.runtime.interfaces import Observer
from pipeplan.runtime.job import SessionOptions, TrainingJob
from pipeplan.runtime.parameters.replicas import Replicas, Shard
from pipeplan.runtime.stages.random_state import kept_randomness
from pipeplan.runtime.stages.segment import Heard
from pipeplan.runtime.supervision.board import LocalBoard, StoreBoard
from pipeplan.runtime.supervision.failure_attribution import (
    FailureAttribution,
    activity_of,
)
from pipeplan.runtime.supervision.run_ahead import RunAhead
from pipeplan.runtime.supervision.stop_consensus import BoardConsensus
from pipeplan.runtime.supervision.stop_request import NoRequest, StopRequest
from pipeplan.runtime.transport.backend import device_of
from pipeplan.runtime.transport.base import Transport
from pipeplan.runtime.transport.gloo import GlooTransport, LocalTransport
from pipeplan.task import Task


class Session:
    """The training of one rank."""

    def __init__(
        self,
        job: TrainingJob,
        transport: Transport,
        observer: Observer,
        options: SessionOptions,
        request: StopRequest | None = None,
    ) -> None:
        """Takes over the hosted layers. All ranks make their sessions together.

        Args:
            job: what is trained.
            transport: to the other ranks; with one that is not pipeplan's own, or none but this
                rank, there is nobody to blame.
            observer: is told losses, backwards and updates.
            options: how it is trained.
            request: whether this rank wants to stop; None: it never does by itself.
        """
        self.job, self.transport, self.options = job, transport, options
        self.device = device_of(job.split)
        self.steps = options.first_step
        """Optimizer steps done."""
        self.wrong = ""
        """What is not finite, for people, once all ranks know; nothing more is saved then."""
        self._log = StorageLog() if options.counts_bytes or options.samples_bytes else None
        self.live = self._log if options.counts_bytes else None
        """Counts all bytes of the run."""
        self.sampled = sampled(self._log, job.plan.semantics, options)
        """Counts those of a step now and then, term by term."""
        here = (0, 1)
        if isinstance(transport, GlooTransport):
            here = transport.replica, transport.replicas
        self.shard = Shard(job.plan.microbatches, *here, options.first_step, options.drawn)
        self._store = _own_store(transport)
        self._consensus = self._make_consensus(request)
        self._stops: list[Callable[[], None]] = []
        """What ends this session's threads."""
        if self._consensus:
            self._stops.append(self._consensus.close)
        self.close_threads = weakref.finalize(self, _call_all, self._stops)
        self.guard = FiniteGuard(
            self._consensus.ask if self._consensus else lambda: None,
            ignores=options.allow_nonfinite,
            skips=job.task.loss_scale is not None,
        )
        self.source = self._make_source()
        """The data of this rank."""
        with kept_randomness(self.device):  # layers may run for trial
            self.worker: Worker = self._make_worker(observer)
        self.attribution: FailureAttribution | None = None
        """Finds out who is to blame, where there are several ranks."""
        if self._store and isinstance(transport, GlooTransport):
            of_replica = PrefixStore(f"watch{transport.replica}", self._store)
            doing = self.worker.executor.doing
            self.attribution = FailureAttribution(of_replica, transport.rank, doing)
            self._stops.append(self.attribution.close)
        self.checkpoints = Checkpoints(job, transport, self.worker, self._store, options)
        """Writes and reads them."""
        self._begun = self.steps

    def train(self, steps: int) -> int:
        """Do `steps` further steps, or fewer if the ranks stop; returns how many.

        A rank without stages does not ask when to stop: `agree` says what it has missed.

        Raises:
            RankError: if an action failed.
        """
        self._begun = self.steps
        counted = self.live or nullcontext(), self.sampled or nullcontext()
        with kept_randomness(self.device), counted[0], counted[1]:
            done = self.worker.executor.run(self.steps, steps)
        self.steps += done
        return done

    def agree(self, *, weights: bool) -> None:
        """Find out how many steps all ranks have done, and whether what they made is finite.

        All ranks call it, behind a run.

        Args:
            weights: whether to look at the newest weights, too.

        Raises:
            RankError: if another rank is gone.
        """
        if weights:
            self.guard.weights(max(self.steps - 1, self._begun), self.worker.stages.values())
        told = self.gather((self.steps, self.guard.found))
        self.wrong = first_of(found for _, found in told)
        self.steps = min(int(steps) for steps, _ in told)

    def evaluate(self, feed: Feed, count: int, heard: Heard | None = None) -> dict[int, float]:
        """The losses of micro-batches 0..count-1 of `feed`; empty where they are not known.

        On the rank of the last stage `heard` hears what each loss is given, in order.
        """
        worker = self.worker
        ends = worker.stages, worker.endpoints, self.source, self.transport
        with kept_randomness(self.device), self.source.replaced(feed):
            return evaluate(self.job.pattern, *ends, count, worker.executor.ahead, heard)

    def evaluate_numbers(
        self, numbers: Sequence[int], task: Task | None = None, heard: Heard | None = None
    ) -> dict[int, float]:
        """As `evaluate`, on micro-batches of the data of `task`; None: of the one that trains."""
        job = self.job
        uses = Uses.of(job.plan, job.split, self.transport.rank, trains=False)
        given = task or job.task, job.split, uses, numbers.__getitem__, self.device
        return self.evaluate(TaskFeed(*given, ahead=False), len(numbers), heard)

    def go_on(self, step: int, drawn: int) -> None:
        """Say that the stages are `step` steps on, which used `drawn` micro-batches."""
        self.shard.go_on(step, drawn)
        self.source.forget()
        if self._consensus:
            self._consensus.go_on(step)
        self.steps = step

    def save(self, out: Path, spared: Path | None = None) -> None:
        """Write a checkpoint into `out`; see `Checkpoints.save`."""
        self.checkpoints.save(out, self.steps, self.shard.drawn_by(self.steps), spared)

    def load(self, path: Path, meta: CheckpointMeta) -> None:
        """Go on from the checkpoint at `path`, made with `meta`, bit for bit.

        Raises:
            InputError: if it lacks something the stages need, or cannot be read.
        """
        self.checkpoints.load(path, meta)
        self.go_on(meta.step, meta.used)

    def gather(self, value: object, *, own: bool = False) -> list[Any]:
        """`value` of each rank of every replica, on all of them; everyone calls it.

        Args:
            value: of this rank.
            own: get those of this replica alone.

        Raises:
            RankError: if another rank is gone.
        """
        transport = self.transport
        try:
            if not own and isinstance(transport, GlooTransport | LocalTransport):
                return transport.gather_all(value)
            return transport.gather(value)
        except RuntimeError as error:
            lost = transport.lost_peers() if isinstance(transport, GlooTransport) else ()
            raise RankError(
                f"rank {transport.rank}: another rank was gone behind step {self.steps}: {error}",
                tuple(lost),
            ) from error

    def attributed(self, error: BaseException) -> RankError | None:
        """Tell all ranks that this one fails with `error`; the same with who is to blame.

        None if this rank's error says all there is to say.
        """
        transport = self.transport
        if self.attribution is None or not isinstance(transport, GlooTransport):
            return None
        activity = activity_of(error, transport.rank, transport)
        blamed = self.attribution.blame(activity)
        return RankError(f"{activity.text}; {blamed}", activity.peers) if blamed else None

    @property
    def dropped(self) -> int:
        """Steps that were begun and not finished, because they were too long."""
        return self._consensus.lost if self._consensus else 0

    def _make_consensus(self, request: StopRequest | None) -> BoardConsensus | None:
        """Where ranks say that they want to stop; None where nobody can."""
        transport, options = self.transport, self.options
        if request is None and options.allow_nonfinite:
            return None
        if self._store and isinstance(transport, GlooTransport):
            board: StoreBoard | LocalBoard = StoreBoard(PrefixStore("stop", self._store))
            rank, ranks = transport.number, transport.ranks
        elif isinstance(transport, LocalTransport):
            board, rank, ranks = LocalBoard(), 0, 1
        else:
            return None
        consensus = BoardConsensus(
            board,
            rank,
            ranks,
            request or NoRequest(),
            first=options.first_step,
            timeout_s=options.timeout_ns / 1e9,
        )
        if not options.drops:
            consensus.finish_all()
        return consensus

    def _make_source(self) -> BatchFeed:
        job = self.job
        uses = Uses.of(job.plan, job.split, self.transport.rank)
        feed = TaskFeed(job.task, job.split, uses, self.shard.number, self.device)
        self._stops.append(feed.close)
        own_loss = job.task.loss is None
        m = job.plan.microbatches
        return BatchFeed(feed, job.split, m, self.device, own_loss=own_loss)

    def _make_worker(self, observer: Observer) -> Worker:
        job, live, transport = self.job, self._log, self.transport
        averages, ahead = None, None
        if isinstance(transport, GlooTransport):
            averages = Replicas(transport) if transport.replicas > 1 else None
            ahead = RunAhead.of(self.device, transport.gone, self.options.timeout_ns)
        plan = job.plan
        worker = build(
            plan,
            job.pattern,
            job.split,
            job.task,
            CountedFeed(self.source, live) if live else self.source,
            CountedTransport(transport, live) if live else transport,
            GuardedObserver(observer, self.guard, plan.microbatches, len(plan.stages) - 1),
            seed=job.seed,
            consensus=self._consensus,
            nonfinite=self.guard.nonfinite,
            replicas=averages,
            shard=self.shard,
            ahead=ahead,
            reports=self.options.reports,
            uncounted=live.paused if live else nullcontext,
        )
        if self.live:
            self.live.count(states(worker))
        if self.sampled:
            self.sampled.watch(worker)
        return worker


def _own_store(transport: Transport) -> Store | None:
    """A part of the ranks' store that no session before has used; None where there is none."""
    if not isinstance(transport, GlooTransport):
        return None
    name = transport.gather_all(secrets.token_hex(8))[0]
    return PrefixStore(f"session{name}", transport.store)


def _call_all(calls: list[Callable[[], None]]) -> None:
    for call in calls:
        call()
    calls.clear()
