"""`Pipeline`: a plan and a model as one object that trains, from Python.

Habits of torch.distributed.pipelining: every rank runs the same script and makes the same calls;
losses are known on the rank of the last stage and None elsewhere.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from pipeplan import lowering, verifier
from pipeplan.errors import DisagreementError, InputError
from pipeplan.filling import fill
from pipeplan.gradients import check_recorded
from pipeplan.hosting import Draft
from pipeplan.memory_terms import MemoryReport
from pipeplan.pipeline.as_made import AsMade
from pipeplan.pipeline.ending import Ending
from pipeplan.pipeline.given import Given, drafted
from pipeplan.plan import Plan
from pipeplan.precision import around, check_around
from pipeplan.program import Pattern
from pipeplan.repeat import check_data
from pipeplan.report.memory import memory_of_run
from pipeplan.runtime.arguments import SavedProgress, check_ranks, numbers_of, whole
from pipeplan.runtime.checkpoint import completeness, named_state, storage
from pipeplan.runtime.data.batches import Inputs
from pipeplan.runtime.interfaces import LossRecord
from pipeplan.runtime.job import SessionOptions, TrainingJob
from pipeplan.runtime.session import Session
from pipeplan.runtime.startup.facts import trained
from pipeplan.runtime.startup.gpu_memory import GpuMemory, GpuMemoryUse
from pipeplan.runtime.startup.process_group import JoinTerms, Training, for_pipeline, gpu_of
from pipeplan.runtime.transport.backend import Wanted, check_current, device_of
from pipeplan.runtime.transport.base import Transport
from pipeplan.runtime.transport.gloo import GlooTransport, LocalTransport
from pipeplan.units import parse_wait_ns

_log = logging.getLogger(__name__)


class Pipeline:
    """One rank of a pipelined training."""

    def __init__(
        self,
        model: Given | Callable[[], Given],
        plan: Plan | str | Path,
        *,
        loss: Callable[[Any, Any], Tensor] | None = None,
        optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | None = None,
        sample: Any = None,
        seed: int = 0,
        timeout: str = "600s",
        replicas: int = 1,
        mesh: DeviceMesh | None = None,
        backend: Wanted = "auto",
        allow_nonfinite: bool = False,
        sample_memory: bool = True,
        transport: Transport | None = None,
        **options: Any,
    ) -> None:
        """Verifies and lowers the plan, splits the model, joins the other ranks.

        The model must have the same initial weights on every rank: seed torch before making it.

        Args:
            model: a task, or a model as `Task` takes it; or a function that makes one or the
                other, the same at every call: then a rank builds only what it hosts.
            plan: the plan or its file.
            loss: as in `Task`; not with a task, and not where the model computes its own.
            optimizer: parameters -> optimizer; called once per layer; not with a task.
            sample: one micro-batch as `Task.data` gives it, for shapes; not with a task.
            seed: of dropout and all else that layers draw.
            timeout: longest wait for another rank.
            replicas: pipelines side by side, whose gradients are averaged.
            mesh: which rank is which replica and GPU, with dimensions `dp` and `pp`; None: those
                that torchrun started, rank = replica * GPUs + GPU.
            backend: what carries messages: nccl between GPUs, gloo, or what fits.
            allow_nonfinite: train on where a loss, or a norm to clip, is not finite, and save such
                weights; else `step`, `run` and `save` fail there on all ranks.
            sample_memory: count the bytes of a step now and then, for `memory`.
            transport: between the ranks of one replica, instead of replicas, mesh and backend.
            options: further fields of `Task`, such as `clip_norm` or `scheduler`.

        Raises:
            InputError: if anything does not fit: model, plan, number of ranks, data.
            InvalidPlanError: if the plan breaks a rule.
        """
        patience = parse_wait_ns(timeout, "pipeline: timeout")
        check_ranks(seed, replicas, mesh, backend, transport)
        self.plan = plan if isinstance(plan, Plan) else Plan.read(plan)
        verifier.check(self.plan)
        self._pattern: Pattern = lowering.lower(self.plan)
        lowering.check_deadlock(self._pattern)
        draft = drafted(self.plan, model, (loss, optimizer, sample), options)
        data = check_data(draft.task)
        gpus = len(self.plan.cluster.gpus)
        gpu = gpu_of(gpus, mesh) if transport is None else transport.rank
        witness = self._host(draft, gpu)
        for note in self._split.notes:
            _log.warning(note)
        self._device = device_of(self._split)
        self._around = around(self._device)
        step = f"Call torch.cuda.set_device({self._device.index}) before making the model."
        check_current(self._device, "pipeline", step)
        own: GlooTransport | LocalTransport | None = None
        if transport is None:
            if sample is not None:
                data = ""  # for shapes alone: ranks may have different ones
            alike = partial(trained, seed=seed, data=data, flags={"backend": backend})
            mine = self.plan, self._split, self.task
            terms = JoinTerms(partial(alike, *mine, witness=witness))
            training = Training(self.plan, self._split, backend)
            own = transport = for_pipeline(training, replicas, mesh, patience, terms)
        self._ending = Ending(own)
        self._own: set[Path] = set()
        """Directories with checkpoints of this training."""
        self._allows, self._samples = allow_nonfinite, sample_memory
        try:
            self._begin(transport, mesh, seed, patience)
        except BaseException:
            self._ending.abandon()
            raise

    def _host(self, draft: Draft, gpu: int) -> Mapping[str, str]:
        """Take over what this rank hosts, with values; fingerprints of first ones."""
        hosted = draft.hosted(gpu, seeded=draft.task.weights is None)
        if hosted.task.weights is not None:
            fill(hosted, self.plan, gpu)
        self.task, self._split = hosted.task, hosted.split
        return hosted.witness

    def _begin(
        self, transport: Transport, mesh: DeviceMesh | None, seed: int, patience_ns: int
    ) -> None:
        if room := GpuMemory.of(self._device):
            room.check(self.plan, transport.rank)
        self._transport = transport
        self.mesh = mesh
        """Replicas x GPUs of the plan, as torch names ranks; None for one rank alone."""
        if isinstance(transport, GlooTransport):
            self.mesh = mesh or transport.mesh(self._device.type)
        self._heard = LossRecord()
        plan, pattern = self.plan, self._pattern
        job = TrainingJob(plan=plan, pattern=pattern, task=self.task, split=self._split, seed=seed)
        options = SessionOptions(
            timeout_ns=patience_ns,
            allow_nonfinite=self._allows,
            drops=False,
            samples_bytes=self._samples and self._split.compile is None,
        )
        self._ending.session = self._session = Session(job, transport, self._heard, options)
        GpuMemoryUse.start(self._device)
        slots = [each for stage in self._session.worker.stages.values() for each in stage.slots]
        self._as_made = AsMade(self.task, self._split.layers, slots)

    @property
    def steps(self) -> int:
        """Optimizer steps done."""
        return self._session.steps

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self._ending.failed(error)

    def _whole(self) -> AbstractContextManager[None]:
        """Around what leaves a state that nothing can go on from if it does not end."""
        self._ending.check_whole()
        if self.task.autocast is None and self._transport.size > 1:
            check_around(self._around, self._device)
        return self._ending.whole()

    @property
    def has_loss(self) -> bool:
        """Whether this rank hosts the last stage, which knows the losses."""
        return self.plan.stages[-1].gpu == self._transport.rank

    def step(self, inputs: Inputs | None = None, target: Any = None) -> float | None:
        """One optimizer step; returns the mean loss where it is known.

        Each replica has a batch of its own, and the loss of that.

        Args:
            inputs: the batch of all micro-batches; ranks that host no layer fed with it may leave
                it out. Without inputs and target the task's data is used.
            target: what the loss compares with; needed on the rank of the last stage.

        Raises:
            InputError: if the batch does not divide into the plan's micro-batches.
        """
        if inputs is not None or target is not None:
            batch = self._session.source.batch("step", inputs, target, self.plan.microbatches)
            self._session.source.give(self.steps, batch)
        try:
            losses = self.run(1)
        finally:
            self._session.source.forget()
        return losses[0] if losses else None

    def run(self, steps: int) -> list[float]:
        """`steps` optimizer steps on the task's data; under 2bw they overlap, as planned.

        Returns:
            The mean loss of each step; empty where losses are not known.

        Raises:
            InputError: if `steps` is negative, an earlier run ended in its middle, there are no
                gradients around the call, or the model has other modules or parameters, or other
                ones are to be trained, than before.
            RankError: if a rank failed, or a number is not finite: on all ranks, which have the
                same steps behind them.
        """
        whole("run: steps", steps)
        check_recorded("run")
        self._as_made.check("run")
        self._as_made.check_parts("run")
        first = self.steps
        with self._whole():
            self._session.train(steps)
            if not self._allows:
                self._session.agree(weights=False)
        self._ending.check_finite()
        m = self.plan.microbatches
        heard = self._heard.losses
        losses = [
            sum(heard[number] for number in range(step * m, (step + 1) * m)) / m
            for step in range(first, self.steps if heard else first)
        ]
        heard.clear()
        return losses

    def evaluate(
        self,
        inputs: Inputs | None = None,
        target: Any = None,
        *,
        numbers: Sequence[int] = (),
    ) -> float | None:
        """The mean loss of the newest weights in eval mode; None where losses are not known.

        Args:
            inputs: any number of micro-batches of the planned shape, as one batch.
            target: what the loss compares with.
            numbers: instead of both, numbers of micro-batches of the task's data.

        Raises:
            InputError: if nothing is given, or a batch and numbers, the batch does not divide into
                micro-batches, or the model has other modules or parameters than before.
        """
        self._as_made.check_parts("evaluate")
        session = self._session
        if counted := numbers_of(numbers):
            if inputs is not None or target is not None:
                raise InputError(
                    f"evaluate: got {'a target' if inputs is None else 'inputs'} and"
                    f" {len(counted)} numbers, need a batch or numbers of micro-batches of the"
                    " task's data. Call evaluate once for each."
                )
            with self._whole():
                losses = session.evaluate_numbers(counted)
        else:
            batch = session.source.batch("evaluate", inputs, target, None)
            with self._whole():
                losses = session.evaluate(batch, batch.count)
        return sum(losses.values()) / len(losses) if losses else None

    def memory(self) -> MemoryReport | None:
        """Where each byte of each GPU was predicted to be, and was; every rank calls it.

        Bytes are counted, storage by storage, in the second step (2bw: the fourth) and of long
        runs in one of 1000, as `launch` does. Before such a step, in compiled tasks and with
        `sample_memory=False` the report has the prediction alone. What `to_json()` gives is a
        memory.json; `pipeplan report` reads a folder with it.

        Returns:
            The report of all ranks of this replica; None where the plan cannot be replayed.

        Raises:
            InputError: if a run ended in its middle.
            RankError: if another rank is gone.
        """
        sampled = self._session.sampled
        mine = (
            sampled.memory() if sampled else None,
            GpuMemoryUse.since_start(self._device).beyond_tensors,
        )
        with self._whole():
            found = self._session.gather(mine, own=True)
        return memory_of_run(self.plan, self._pattern, found)

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of the training state, flat, keyed by parameter name; not copied.

        `model.NAME`, `previous.NAME` (2bw), `optimizer.NAME.FIELD`, and `step`, `scales`,
        `good_steps`, `drawn` (micro-batches of the data used so far). Any rank of any plan of the
        same task, with any number of replicas, can go on from the parts of one replica's ranks.

        Raises:
            InputError: if a run ended in its middle: then there is no such state.
        """
        self._ending.check_whole()
        session = self._session
        scales, good = session.worker.scales(self.steps)
        drawn = session.shard.drawn_by(self.steps)
        progress = {"step": self.steps, "scales": scales, "good_steps": good, "drawn": drawn}
        return named_state.state_of(session.worker.stages.values()) | progress

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`: what `state_dict` gave, parts of all ranks that are needed merged.

        A state without `drawn` was made by one replica, which draws a plan's step at a time.

        Raises:
            InputError: if it lacks something this rank needs.
        """
        self._ending.check_whole()
        told = SavedProgress.of(state)
        step = told.step
        drawn = step * self.plan.microbatches if told.drawn is None else told.drawn
        completeness.check_taken(state, self._split, "state_dict")
        named_state.put(self._session.worker, step, state, told.scales, told.good_steps)
        self._session.go_on(step, drawn)

    def save(self, out: str | Path) -> None:
        """Write a checkpoint into the directory `out`, as `launch` does; every rank calls it.

        It lies in `out/checkpoint/step-N`; `load` goes on from it, as does `launch --resume out`,
        under any plan of the same task, semantics and micro-batches.

        Raises:
            InputError: if a run ended in its middle, this step is there already, or later ones of
                another training, or a transport of the script's own carries messages.
            DisagreementError: if the ranks do not see one directory; on all ranks.
            RankError: if it could not be written, or a weight is not finite; on all ranks.
        """
        folder = Path(out)
        self._ending.check_whole()
        if not self._allows:
            with self._whole():
                self._session.agree(weights=True)
            self._ending.check_finite()
        if storage.is_complete(storage.step_folder(folder, self.steps)):
            raise InputError(
                f"pipeline: save {folder}: step {self.steps} is there already and nothing is ever"
                " overwritten. Choose another directory, or train on."
            )
        later = [] if folder.resolve() in self._own else storage.behind(folder, self.steps)
        if later:
            raise InputError(
                f"pipeline: save {folder}: got {later[-1].name} there, which this pipeline neither"
                f" wrote nor loaded, need no checkpoint behind step {self.steps}: load and"
                " --resume would go on from that one. Choose another directory, or load this one"
                " first."
            )
        self._session.save(folder)
        self._own.add(folder.resolve())

    def load(self, out: str | Path) -> None:
        """Go on from the newest complete checkpoint in the directory `out`; every rank calls it.

        Raises:
            InputError: if there is none, it does not fit plan, seed or task, or is damaged.
        """
        folder = Path(out)
        path = storage.latest(folder)
        for note in storage.passed_over(folder, path):
            _log.warning(note)
        meta = storage.read_meta(path)
        self._session.checkpoints.check_fits(path, meta)
        for note in self._session.checkpoints.changes(meta):
            _log.warning(note)
        with self._whole():
            told = self._session.gather(path.name)
        if len(set(told)) > 1:
            raise DisagreementError(
                f"pipeline: load {folder}: ranks find {', '.join(sorted(set(told)))}, need one"
                " newest complete checkpoint: a directory that all of them share"
            )
        with self._whole():
            self._session.load(path, meta)
        self._own.add(folder.resolve())

    def close(self) -> None:
        """Give the modules their parameters back, newest weights inside, and leave the ranks.

        Ranks that a failure parted do not wait for each other. A second call does nothing.
        """
        if self._ending.left:
            return
        self._session.close_threads()
        for stage in self._session.worker.stages.values():
            for slots in stage.slots:
                slots.release()
        self._ending.close()
