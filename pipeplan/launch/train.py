"""One rank's run from the first step to the final checkpoint."""

from __future__ import annotations

import shlex
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException

from pipeplan import taskref
from pipeplan.action_times import ActionTimes
from pipeplan.callbacks import EndReason, RunEnd, RunStart, SavedCheckpoint, ValidationResult
from pipeplan.errors import DisagreementError
from pipeplan.launch import action_times, ending, export, results, terms
from pipeplan.launch.checks import Setup
from pipeplan.launch.elsewhere import chain_facts, remark
from pipeplan.launch.following import Followers, followers_of
from pipeplan.launch.progress import Progress, resident_bytes
from pipeplan.launch.stop_signal import StopSignal
from pipeplan.launch.validating import Validator
from pipeplan.runtime.checkpoint import storage
from pipeplan.runtime.instrument.sampling import SETTLED
from pipeplan.runtime.job import SessionOptions, TrainingJob
from pipeplan.runtime.session import Session
from pipeplan.runtime.startup.gpu_memory import GpuMemoryUse
from pipeplan.runtime.startup.process_group import Training, join
from pipeplan.runtime.transport.gloo import GlooTransport, LocalTransport
from pipeplan.runtime.transport.torchrun_env import TorchrunEnv

_STALE = "2bw: gradients are one step stale; --semantics flush trains exactly as one process would"
_ADAM = (
    "warning: {name} divides by a running size of the gradients, which 2bw applies one step late:"
    " expect to need a smaller learning rate or a longer warm-up than under flush"
)


def run(setup: Setup, place: TorchrunEnv) -> int:
    """Train as `setup` says; returns the exit code, or ends the process if anything fails."""
    with ExitStack() as listening:
        return _run(setup, place, listening)


def _run(setup: Setup, place: TorchrunEnv, listening: ExitStack) -> int:
    begun: LaunchedRun | None = None
    try:
        begun = LaunchedRun(setup, place)
        begun.announce()
        done = begun.train(listening)
        if begun.session.wrong:
            begun.give_up()
        else:
            begun.finish(done)
    except DisagreementError as error:
        return ending.part(error, place)
    except (Exception, CheckpointException) as error:
        out = setup.options.out
        if begun is None:
            ending.fail(error, place, None, out)
        session = begun.session
        recorder = session.worker.executor.recorder
        ending.fail(error, place, recorder, out, begun.transport, session.attribution)
    if begun.session.wrong:
        return 1
    return 128 + begun.stop.number if begun.stop.number else 0


class LaunchedRun:
    """A session that prints what it does, keeps what it made, and ends on a signal."""

    def __init__(self, setup: Setup, place: TorchrunEnv) -> None:
        """Joins the other ranks, takes the hosted layers over and forgets the rest."""
        self.setup = setup
        self._here = place.local_size
        self.out = setup.options.out
        self.stop = StopSignal()
        training = Training(setup.plan, setup.split, setup.options.backend)
        options = setup.options
        self.transport = join(
            place, options.timeout_ns, options.replicas, training, terms.of(setup)
        )
        self.leads = isinstance(self.transport, LocalTransport) or self.transport.replica == 0
        if isinstance(self.transport, GlooTransport):
            self.transport.if_stuck(lambda why: ending.give_up(self.transport.rank, why))
        self.model = export.UserModel(setup.task.model, setup.split) if self._speaks else None
        teller = self.leads and self.transport.rank == setup.plan.stages[-1].gpu
        self.follower = followers_of(setup) if teller else Followers()
        self.progress = Progress(
            setup.plan,
            units_per_microbatch=options.replicas
            * (setup.task.units_per_microbatch or setup.split.microbatch_size),
            waits=setup.task.updates_wait,
            follower=self.follower if teller else None,
            taken=partial(GpuMemoryUse.since_start, setup.device),
        )
        job = TrainingJob(
            plan=setup.plan,
            pattern=setup.pattern,
            task=setup.task,
            split=setup.split,
            seed=setup.seed,
        )
        self.session = Session(
            job,
            self.transport,
            self.progress,
            SessionOptions(
                timeout_ns=options.timeout_ns,
                first_step=setup.first_step,
                drawn=setup.drawn,
                out=self.out,
                background=options.save_in_background,
                keep=options.keep,
                allow_nonfinite=options.allow_nonfinite,
                counts_bytes=options.instrument,
                reports=self.leads,
                samples_bytes=_samples(setup),
            ),
            self.stop,
        )
        if setup.checkpoint:
            self.session.load(setup.checkpoint, storage.read_meta(setup.checkpoint))
        self.validator = Validator(setup, self.session, self.follower)
        GpuMemoryUse.start(setup.device)

    @property
    def _speaks(self) -> bool:
        return self.transport.rank == 0 and self.leads

    def announce(self) -> None:
        """Make the output directory and say what is about to happen."""
        if self.out and self._speaks:
            self.out.mkdir(parents=True, exist_ok=True)
        optimizers = {
            type(optimizer).__name__
            for stage in self.session.worker.stages.values()
            for optimizer in stage.weights.optimizers.each
        }
        names = set().union(*self.transport.gather(optimizers))
        elsewhere = remark(self.setup.plan, self.transport.gather(chain_facts(self.setup.device)))
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

    def train(self, listening: ExitStack) -> int:
        """All remaining steps, saved at the end and every --save-every; returns the steps done.

        From the first one on the run is `listening` to signals: until it has written its results.
        """
        options, session, stopped = self.setup.options, self.session, False
        self.validator.try_out()
        self.follower.start(self._started())
        listening.enter_context(self.stop.listening())
        while session.steps < options.steps and not stopped:
            end = self._next_pause()
            self.progress.resume_clock()
            session.train(end - session.steps)
            session.agree(weights=True)
            stopped = session.steps < end
            if session.wrong:
                break
            validated = None if stopped else self.validator.validated()
            due = stopped or session.steps == options.steps or self._is_due(options.save_every)
            if due or (validated and validated.best):
                self._save(validated)
        return session.steps

    def _is_due(self, every: int | None) -> bool:
        return every is not None and self.session.steps % every == 0

    def _next_pause(self) -> int:
        """The next step after which something else than training may be due."""
        options, done = self.setup.options, self.session.steps
        rhythms = filter(None, (options.save_every, options.validate_every))
        return min([options.steps, *(done - done % every + every for every in rhythms)])

    def _save(self, validated: ValidationResult | None) -> None:
        if self.out is None:
            return
        step, best = self.session.steps, self.validator.best
        path = storage.step_folder(self.out, step)
        if not storage.is_complete(path):
            self.session.save(self.out, spared=best.path if best else None)
            told = validated.best if validated else None
            self.follower.checkpoint(SavedCheckpoint(step=step, path=str(path), best=told))

    def _ended(self, reason: EndReason) -> None:
        self.follower.end(RunEnd(step=self.session.steps, reason=reason))

    def give_up(self) -> None:
        """Leave together without saving, after what is wrong has been said."""
        self.session.checkpoints.finish()
        self._ended("not finite")
        if self._speaks:
            out = self.out
            kept = out is not None and storage.has_checkpoint(out)
            _say(
                f"error: {self.session.wrong}. Nothing was saved after it. Try a smaller learning"
                " rate, or --allow-nonfinite to train on"
                + (f"; the checkpoint before is kept: --resume {out}" if kept else "")
            )
        self._leave()

    def finish(self, step: int) -> None:
        """Write model.pt and run.json, and leave together."""
        self.session.checkpoints.finish()
        result = results.RankResult(
            self.progress.measured(),
            self.session.live.peak if self.session.live else None,
            resident_bytes(),
            GpuMemoryUse.since_start(self.setup.device),
            self.session.sampled.memory() if self.session.sampled else None,
        )
        ranks = self.transport.gather(result)
        times = self._action_times()
        self._ended("complete" if step == self.setup.options.steps else "stopped")
        if self.model and self.out:
            self.model.write(storage.step_folder(self.out, step), self.out / "model.pt")
            best = self.validator.best
            if best and best.path:
                self.model.write(best.path, self.out / "best.pt")
            results.write(
                self.out / "run.json",
                results.run_document(self.setup, ranks, step, self._here, best),
            )
            for line in results.write_memory(self.out, self.setup, ranks):
                _say(f"warning: {line}")
            results.write_times(self.out, self.setup.plan, times)
            if step < self.setup.options.steps:
                lost = "; the steps behind it are too long to be finished" * (
                    self.session.dropped > 0
                )
                _say(f"stopped after step {step}{lost}; go on with --resume {self.out}")
            else:
                named = self.setup.options.task or self.setup.plan.chain.task
                then = what_is_next(named, self.out)
                _say(f"saved: {self.out}{then * (step > self.setup.first_step)}")
        self._leave()

    def _action_times(self) -> ActionTimes | None:
        """What all ranks did in one step; on GPUs nobody knows when, the processes are ahead."""
        setup = self.setup
        if self.out is None or setup.device.type != "cpu":
            return None
        plan, recorder = setup.plan, self.session.worker.executor.recorder
        settled = setup.first_step + SETTLED[plan.semantics] + 1
        gather = self.transport.gather
        return action_times.gathered(plan, self.transport.rank, recorder.last(), gather, settled)

    def _leave(self) -> None:
        self.session.close_threads()
        self.transport.close()

    def _started(self) -> RunStart:
        setup = self.setup
        plan, options = setup.plan, setup.options
        return RunStart(
            steps=options.steps,
            first_step=setup.first_step,
            semantics=plan.semantics,
            microbatches=plan.microbatches,
            gpus=len(plan.cluster.gpus),
            replicas=options.replicas,
            seed=setup.seed,
            task=options.task or plan.chain.task,
            plan_digest=plan.digest(),
            out=str(self.out) if self.out else None,
        )


def _samples(setup: Setup) -> bool:
    """Whether steps are sampled: results are kept, and all that takes bytes can be seen."""
    options = setup.options
    return options.sample and options.out is not None and setup.split.compile is None


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def what_is_next(task: str | None, out: Path) -> str:
    """What to do with the folder of a run of `task`, as lines behind others."""
    of = taskref.parsed(task) if task else None
    told = f"\nnext: pipeplan report {shlex.quote(str(out))}"
    if of is None or not of.own or of.name != "transformers":
        return told
    given = dict(of.arguments)
    values = [repr(str(out)), repr(given.get("name_or_folder")), "'trained'"]
    values += [f"head={given['head']!r}"] if "head" in given else []
    text = f"from pipeplan.tasks import save_pretrained; save_pretrained({', '.join(values)})"
    return f"{told}\nfor from_pretrained: python -c {shlex.quote(text)}"
