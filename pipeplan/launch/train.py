"""One rank's run from the first step to the final checkpoint."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.distributed_c10d import PrefixStore

from pipeplan.errors import DisagreementError
from pipeplan.launch import ending, export, guard, results, terms
from pipeplan.launch.checks import Setup
from pipeplan.launch.elsewhere import facts_of, remark
from pipeplan.launch.guard import Guard
from pipeplan.launch.progress import Progress, resident_bytes, trim
from pipeplan.livebytes import LiveBytes
from pipeplan.runtime.build import Worker, build
from pipeplan.runtime.checkpoint import named_state, storage
from pipeplan.runtime.checkpoint.writer import CheckpointWriter
from pipeplan.runtime.data.feed import TaskFeed, Uses
from pipeplan.runtime.instrument import CountedFeed, CountedTransport, states
from pipeplan.runtime.parameters.replicas import Replicas, Shard
from pipeplan.runtime.startup.gpu_memory import GpuMemoryUse
from pipeplan.runtime.startup.process_group import Training, join
from pipeplan.runtime.supervision.board import Board, LocalBoard, StoreBoard
from pipeplan.runtime.supervision.failure_attribution import attribution_between
from pipeplan.runtime.supervision.run_ahead import RunAhead
from pipeplan.runtime.supervision.stop_consensus import BoardConsensus
from pipeplan.runtime.transport.gloo import GlooTransport, LocalTransport
from pipeplan.runtime.transport.torchrun_env import TorchrunEnv

_STALE = "2bw: gradients are one step stale; --semantics flush trains exactly as one process would"
_ADAM = (
    "warning: {name} divides by a running size of the gradients, which 2bw applies one step late:"
    " expect to need a smaller learning rate or a longer warm-up than under flush"
)


def run(setup: Setup, place: TorchrunEnv) -> int:
    """Train as `setup` says; returns the exit code, or ends the process if anything fails."""
    session: Session | None = None
    try:
        session = Session(setup, place)
        session.announce()
        done = session.train()
        if session.wrong:
            session.give_up()
        else:
            session.finish(done)
    except DisagreementError as error:
        return ending.part(error, place)
    except (Exception, CheckpointException) as error:
        recorder = session.worker.executor.recorder if session else None
        transport, attribution = (
            (session.transport, session.attribution) if session else (None, None)
        )
        ending.fail(error, place, recorder, setup.options.out, transport, attribution)
    if session.wrong:
        return 1
    return 128 + session.stop.number if session.stop.number else 0


class Session:
    """What one rank holds between joining the others and leaving them."""

    def __init__(self, setup: Setup, place: TorchrunEnv) -> None:
        """Joins the other ranks, takes the hosted layers over and forgets the rest."""
        self.setup = setup
        self._here = place.local_size
        self.out = setup.options.out
        self.stop = ending.StopSignal()
        training = Training(setup.plan, setup.split, setup.options.backend)
        options = setup.options
        self.transport = join(
            place, options.timeout_ns, options.replicas, training, terms.of(setup)
        )
        self.leads = isinstance(self.transport, LocalTransport) or self.transport.replica == 0
        self.writer = CheckpointWriter(
            self.transport, background=options.save_in_background, keep=options.keep
        )
        self.consensus = self._make_consensus(place)
        self.guard = Guard(
            self.consensus.ask,
            ignores=setup.options.allow_nonfinite,
            skips=setup.task.loss_scale is not None,
        )
        self.wrong = ""
        """Why nothing more is saved, for people."""
        self.live = LiveBytes() if setup.options.instrument else None
        self.model = export.UserModel(setup.task.model, setup.split) if self._speaks else None
        self.progress = self._make_progress()
        self.worker = self._make_worker()
        if setup.checkpoint:
            named_state.load(setup.checkpoint, setup.first_step, self.worker)
        self.attribution = attribution_between(self.transport, self.worker.executor.doing)
        GpuMemoryUse.start(setup.device)

    @property
    def shard(self) -> Shard:
        """The data of this rank's replica."""
        setup, transport = self.setup, self.transport
        return Shard(
            setup.plan.microbatches,
            replica=0 if isinstance(transport, LocalTransport) else transport.replica,
            replicas=setup.options.replicas,
            first_step=setup.first_step,
            drawn=setup.drawn,
        )

    @property
    def _speaks(self) -> bool:
        return self.transport.rank == 0 and self.leads

    def announce(self) -> None:
        """Make the output directory and say what is about to happen."""
        if self.out and self._speaks:
            self.out.mkdir(parents=True, exist_ok=True)
        optimizers = {
            type(optimizer).__name__
            for stage in self.worker.stages.values()
            for optimizer in stage.weights.optimizers.each
        }
        names = set().union(*self.transport.gather(optimizers))
        elsewhere = remark(self.setup.plan, self.transport.gather(facts_of(self.setup.device)))
        if not self._speaks:
            return
        for note in self.setup.split.notes:
            _say(f"note: {note}")
        if self.setup.plan.semantics == "2bw":
            _say(_STALE)
            for name in sorted(name for name in names if "adam" in name.lower()):
                _say(_ADAM.format(name=name))
        for told in (*self.setup.remarks, elsewhere):
            if told:
                _say(told)
        if isinstance(self.transport, GlooTransport):
            choice = self.transport.choice
            _say(f"messages between ranks: {choice.backend}, {choice.why}")
        if self.out is None:
            _say("no --out: nothing of this run will be kept")

    def train(self) -> int:
        """All remaining steps, saved at the end and every --save-every; returns the steps done."""
        options = self.setup.options
        step, stopped = self.setup.first_step, False
        with self.stop.listening():
            while step < options.steps and not stopped:
                wanted = min(options.save_every or options.steps, options.steps - step)
                self.progress.resume_clock()
                with self.live or nullcontext():
                    done = self.worker.executor.run(step, wanted)
                reached = self._agreed(step, step + done)
                step, stopped = reached, reached < step + wanted
                if self.wrong:
                    break
                self._save(step)
        return step

    def _agreed(self, first: int, done: int) -> int:
        """The steps that all ranks have done; says so if what they made shall not be saved.

        A rank without stages has not asked when to stop.
        """
        self.guard.weights(max(done - 1, first), self.worker.stages.values())
        told = self.transport.gather_all((done, self.guard.found))
        self.wrong = guard.told(found for _, found in told)
        return min(int(steps) for steps, _ in told)

    def give_up(self) -> None:
        """Leave together without saving, after what is wrong has been said."""
        self.writer.finish()
        if self._speaks:
            out = self.out
            kept = out is not None and any(map(storage.is_complete, storage.folders(out)))
            _say(
                f"error: {self.wrong}. Nothing was saved after it. Try a smaller learning rate, or"
                " --allow-nonfinite to train on"
                + (f"; the checkpoint before is kept: --resume {out}" if kept else "")
            )
        self._leave()

    def finish(self, step: int) -> None:
        """Write model.pt and run.json, and leave together."""
        self.writer.finish()
        result = results.RankResult(
            self.progress.measured(),
            self.live.peak if self.live else None,
            resident_bytes(),
            GpuMemoryUse.since_start(self.setup.device),
        )
        ranks = self.transport.gather(result)
        if self.model and self.out:
            self.model.write(storage.folder(self.out, step), self.out / "model.pt")
            results.write(
                self.out / "run.json", results.describe(self.setup, ranks, step, self._here)
            )
            if step < self.setup.options.steps:
                lost = "; the steps behind it are too long to be finished" * (
                    self.consensus.lost > 0
                )
                _say(f"stopped after step {step}{lost}; go on with --resume {self.out}")
            else:
                _say(f"saved: {self.out}\nnext: pipeplan report {self.out}")
        self._leave()

    def _leave(self) -> None:
        self.consensus.close()
        if self.attribution:
            self.attribution.close()
        self.transport.close()

    def _make_consensus(self, place: TorchrunEnv) -> BoardConsensus:
        board: Board = LocalBoard()
        if isinstance(self.transport, GlooTransport):
            board = StoreBoard(PrefixStore("stop", self.transport.store))
        return BoardConsensus(
            board,
            place.rank,
            place.size,
            self.stop,
            first=self.setup.first_step,
            timeout_s=self.setup.options.timeout_ns / 1e9,
        )

    def _make_progress(self) -> Progress:
        setup = self.setup
        metrics: Path | None = None
        if self.out and self.leads and self.transport.rank == setup.plan.stages[-1].gpu:
            metrics = self.out / "metrics.jsonl"
            trim(metrics, setup.first_step)
        return Progress(
            setup.plan,
            total_steps=setup.options.steps,
            unit=setup.task.unit,
            units_per_microbatch=setup.options.replicas
            * (setup.task.units_per_microbatch or setup.split.microbatch_size),
            metrics=metrics,
            as_json=setup.options.json,
            guard=self.guard,
            silent=not self.leads,
            taken=partial(GpuMemoryUse.since_start, setup.device),
        )

    def _make_worker(self) -> Worker:
        setup = self.setup
        uses = Uses.of(setup.plan, setup.split, self.transport.rank)
        feed = TaskFeed(setup.task, setup.split, uses, self.shard.number, setup.device)
        replicas, ahead = None, None
        if isinstance(self.transport, GlooTransport):
            ahead = RunAhead.of(setup.device, self.transport.gone, setup.options.timeout_ns)
            self.transport.if_stuck(lambda why: ending.give_up(self.transport.rank, why))
            if setup.options.replicas > 1:
                replicas = Replicas(self.transport)
        worker = build(
            setup.plan,
            setup.pattern,
            setup.split,
            setup.task,
            CountedFeed(feed, self.live) if self.live else feed,
            CountedTransport(self.transport, self.live) if self.live else self.transport,
            self.progress,
            seed=setup.seed,
            consensus=self.consensus,
            nonfinite=self.guard.nonfinite,
            replicas=replicas,
            shard=self.shard,
            ahead=ahead,
        )
        if self.live:
            self.live.count(states(worker))
        return worker

    def _save(self, step: int) -> None:
        if self.out is None or storage.is_complete(storage.folder(self.out, step)):
            return
        setup = self.setup
        scales, good_steps = self.worker.scales(step)
        meta = storage.CheckpointMeta(
            step=step,
            seed=setup.seed,
            semantics=setup.plan.semantics,
            microbatches=setup.plan.microbatches,
            task_digest=setup.task_digest,
            plan_digest=setup.plan.digest(),
            scales=scales,
            good_steps=good_steps,
            drawn=self.shard.drawn_by(step),
        )
        self.writer.save(storage.folder(self.out, step), meta, self.worker.stages.values())


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
