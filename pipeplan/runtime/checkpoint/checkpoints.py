"""The checkpoints of one training: writing them into a directory, going on from one."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import torch
from torch.distributed.distributed_c10d import PrefixStore, Store

from pipeplan.errors import InputError
from pipeplan.runtime.build import Worker
from pipeplan.runtime.checkpoint import completeness, metadata, named_state, storage
from pipeplan.runtime.checkpoint.recipe import differences, recipe
from pipeplan.runtime.checkpoint.writer import CheckpointWriter
from pipeplan.runtime.job import SessionOptions, TrainingJob
from pipeplan.runtime.startup.shared_directory import check_shared
from pipeplan.runtime.transport.base import Transport
from pipeplan.runtime.transport.gloo import GlooTransport, LocalTransport
from pipeplan.split_model import SplitModel


class Checkpoints:
    """Those of one rank's session."""

    def __init__(
        self,
        job: TrainingJob,
        transport: Transport,
        worker: Worker,
        store: Store | None,
        options: SessionOptions,
    ) -> None:
        """Nothing was written yet.

        Args:
            job: what is trained.
            transport: to the other ranks.
            worker: has the stages.
            store: of all ranks, a part that nothing else uses; None where there is none.
            options: how many checkpoints stay, and when they are written.

        Raises:
            InputError: if there is a directory for checkpoints, and a buffer fits into none.
        """
        self._job, self._transport, self._worker = job, transport, worker
        self._recipe = recipe(job.task)
        self._store, self._options = store, options
        self._shared = set() if options.out is None else {options.out}
        """Directories that all ranks are known to share."""
        self._writer: CheckpointWriter | None = None
        if options.out is not None:  # known before hours of training are lost
            _check_buffers(job.split, options.out)

    def save(self, out: Path, step: int, drawn: int, spared: Path | None = None) -> None:
        """Write one into `out`; all ranks call it, with an empty pipeline.

        Args:
            out: the directory of all checkpoints of the training.
            step: steps done.
            drawn: micro-batches of the data that they used.
            spared: a checkpoint that stays, however old it is.

        Raises:
            InputError: if the transport is not pipeplan's own, or a buffer is sparse.
            DisagreementError: if the ranks do not see one directory.
            RankError: if this checkpoint, or one before it, could not be written.
        """
        job, stages = self._job, self._worker.stages.values()
        _check_buffers(job.split, out)
        scales, good_steps = self._worker.scales(step)
        meta = storage.CheckpointMeta(
            step=step,
            seed=job.seed,
            semantics=job.plan.semantics,
            microbatches=job.plan.microbatches,
            task_digest=job.split.digest(),
            plan_digest=job.plan.digest(),
            scales=scales,
            good_steps=good_steps,
            drawn=drawn,
            recipe=self._recipe,
        )
        self._writer_of(out).save(storage.step_folder(out, step), meta, stages, spared)

    def finish(self) -> None:
        """Wait until the last one is complete.

        Raises:
            RankError: if it could not be written.
        """
        if self._writer:
            self._writer.finish()

    def check_fits(self, path: Path, meta: storage.CheckpointMeta) -> None:
        """Refuse a checkpoint at `path`, made with `meta`, that this training cannot go on from.

        Raises:
            InputError: if semantics, micro-batches, seed or task differ.
        """
        job = self._job
        for name, stored, own in (
            ("semantics", meta.semantics, job.plan.semantics),
            ("micro-batches per step", meta.microbatches, job.plan.microbatches),
            ("seed", meta.seed, job.seed),
            ("task digest", meta.task_digest, job.split.digest()),
        ):
            if stored != own:
                raise InputError(
                    f"load {path}: its {name} is {stored}, this training's is {own}. Take a plan,"
                    " a seed and a task like those that wrote it."
                )

    def changes(self, meta: storage.CheckpointMeta) -> list[str]:
        """What this training does otherwise than the one that wrote `meta`, a remark each."""
        return differences(meta.recipe, self._recipe)

    def load(self, path: Path, meta: storage.CheckpointMeta) -> None:
        """Put the one at `path`, made with `meta`, into the stages, bit for bit.

        Raises:
            InputError: if it lacks something the stages need, or cannot be read.
        """
        known = metadata.read(path).state_dict_metadata
        completeness.check_taken(known, self._job.split, str(path))
        named_state.load(path, meta.step, self._worker)

    def _writer_of(self, out: Path) -> CheckpointWriter:
        transport, options = self._transport, self._options
        if not isinstance(transport, GlooTransport | LocalTransport):
            raise InputError(
                f"save {out}: got a transport of your own, need the ranks of torchrun, of a mesh"
                " or of torch's default group. Keep state_dict() yourself."
            )
        if isinstance(transport, GlooTransport) and self._store and out not in self._shared:
            store = PrefixStore(f"out{len(self._shared)}", self._store)
            patience = timedelta(microseconds=options.timeout_ns // 1000)
            check_shared(store, transport.number, transport.ranks, out, patience)
        self._shared.add(out)
        if self._writer is None:
            self._writer = CheckpointWriter(
                transport, background=options.background, keep=options.keep
            )
        return self._writer


def _check_buffers(split: SplitModel, out: Path) -> None:
    """Refuse what torch's checkpoints cannot hold, on all ranks alike."""
    for layer, names in zip(split.layers, split.fqns, strict=True):
        for local, buffer in layer.named_buffers():
            if buffer.layout is not torch.strided:
                raise InputError(
                    f"save {out}: buffer {names[local]!r} has the layout {buffer.layout}, need"
                    " dense ones: torch's checkpoints hold no others. Register its indices and its"
                    " values as two buffers, and make the sparse tensor of them in the forward; or"
                    " train without checkpoints and keep Pipeline.state_dict() yourself."
                )
