"""The files of a checkpoint: where they lie, when they are complete, writing and reading them.

`torch.distributed.checkpoint` stores what each rank hosts and later reads what each rank asks for;
nothing depends on which rank that was. A checkpoint is complete once its `.metadata` exists, which
is written last, so a torn one is never taken for a whole one. Reading runs nothing that a file
names, and gives no bytes that are not those written.
"""

from __future__ import annotations

import io
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from pipeplan.document import Count, Document, Positive
from pipeplan.errors import InputError
from pipeplan.plan import Semantics
from pipeplan.runtime.checkpoint import digests, metadata

_META = "pipeplan.json"
_LAST = ".metadata"
_NAME = re.compile(r"step-([0-9]{8}|[1-9][0-9]{8,})")


class CheckpointMeta(Document):
    """What a run must have in common with the one it resumes."""

    format: Literal["pipeplan-checkpoint/1"] = "pipeplan-checkpoint/1"
    step: Count
    """Steps done."""
    seed: Count
    semantics: Semantics
    microbatches: Positive
    task_digest: str
    plan_digest: str
    """Of the plan that wrote it; a resumed run may use another one."""
    scales: tuple[float, ...] = ()
    """Loss scales of the next steps; empty without loss scaling."""
    good_steps: Count = 0
    """Steps on end without a gradient that was not finite."""
    drawn: Count | None = None
    """Micro-batches of the data used so far; None: m for each step."""
    recipe: Mapping[str, str] = Field(default_factory=dict)
    """What it trained with beside its model (`recipe.recipe`); a resumed run may change it."""

    @property
    def used(self) -> int:
        """Micro-batches of the data used so far."""
        return self.step * self.microbatches if self.drawn is None else self.drawn


def step_folder(out: Path, step: int) -> Path:
    """Where the checkpoint after `step` steps lies in the output directory `out`."""
    return out / "checkpoint" / f"step-{step:08d}"


def folders(out: Path) -> list[Path]:
    """All checkpoints in the output directory `out`, complete or not, oldest first.

    Folders that no run names so, such as a user's copy of one, are none.
    """
    named = (path for path in (out / "checkpoint").glob("step-*") if _NAME.fullmatch(path.name))
    return sorted(named, key=_step)


def _step(path: Path) -> int:
    """The steps done that the name of a checkpoint's folder says."""
    return int(path.name.removeprefix("step-"))


def behind(out: Path, step: int) -> list[Path]:
    """The complete checkpoints of later steps than `step` in `out`, oldest first."""
    return [path for path in folders(out) if _step(path) > step and is_complete(path)]


def latest(out: Path) -> Path:
    """The newest complete checkpoint in the output directory `out`.

    Raises:
        InputError: if there is none.
    """
    for path in reversed(folders(out)):
        if is_complete(path):
            return path
    damaged = [why for path in reversed(folders(out)) if (why := damage(path))]
    step = "Give the --out directory of an earlier run."
    if not damaged and out.is_dir() and any(out.iterdir()):
        step = "If a run ended before its first one (--save-every), start anew with another --out."
    raise InputError(
        f"resume: {out} holds no complete checkpoint, need {out}/checkpoint/step-NNNNNNNN/{_LAST}."
        + (f" {damaged[0]}." if damaged else "")
        + f" {step}"
    )


def has_checkpoint(out: Path) -> bool:
    """Whether a run can go on from the output directory `out`."""
    return any(map(is_complete, folders(out)))


def is_complete(path: Path) -> bool:
    """Whether everything the checkpoint at `path` lists is there, to the last byte."""
    return (path / _LAST).is_file() and damage(path) is None


def damage(path: Path) -> str | None:
    """What is wrong with the checkpoint at `path` though it was finished; None if nothing.

    `.metadata` is written last, but a machine that lost power may have kept it and not the rest.
    Digests of the data are for who reads them: here only lengths are compared.
    """
    if not (path / _LAST).is_file():
        return None
    try:
        ends = metadata.files(metadata.read(path))
    except InputError as error:
        return str(error)
    for name, end in {_META: 0, **ends}.items():
        file = path / name
        if not file.is_file():
            return f"{path}: {name} is missing"
        if (size := file.stat().st_size) < end:
            return f"{path}: {name} has {size} bytes, need {end}"
    if (path / f"metadata{digests.SUFFIX}").is_file():
        wrong = digests.Digests(path).wrong([_LAST, _META])
        return f"{path}: {wrong}" if wrong else None
    return None


def prune(out: Path, keep: int, spared: Path | None = None) -> None:
    """Remove all complete checkpoints in `out` but the newest `keep`, and the one at `spared`.

    Others are not touched. What makes a checkpoint complete goes first: half of one is never taken
    for a whole one.
    """
    complete = [path for path in folders(out) if is_complete(path)]
    for path in (path for path in complete[:-keep] if path != spared):
        (path / _LAST).unlink()
        shutil.rmtree(path)


def passed_over(out: Path, chosen: Path) -> list[str]:
    """What to say of taking the checkpoint `chosen`: damaged newer ones, no digests."""
    later = (path for path in folders(out) if _step(path) > _step(chosen))
    newer = [why for path in later if (why := damage(path))]
    remarks = [f"damaged, and passed over: {why}" for why in newer]
    if not digests.present(chosen):
        remarks.append(
            f"{chosen} has no digests, an earlier version wrote it: its bytes are not checked"
        )
    return remarks


def is_ours(path: Path) -> bool:
    """Whether the folder of torch.distributed.checkpoint at `path` is one that a run wrote."""
    return (path / _META).is_file()


def read_meta(path: Path) -> CheckpointMeta:
    """What the checkpoint at `path` was made with.

    Raises:
        InputError: if it is not a pipeplan checkpoint, or damaged.
    """
    return CheckpointMeta.read(path / _META)


def write(
    path: Path,
    meta: CheckpointMeta,
    state: dict[str, Any],
    *,
    rank: int,
    alone: bool,
    group: ProcessGroup | None = None,
) -> None:
    """Write a checkpoint; all ranks call it.

    Args:
        path: its folder, made if needed.
        meta: the same on every rank.
        state: this rank's part.
        rank: this rank; rank 0 writes the meta data.
        alone: whether there is no process group.
        group: the one to agree over; None takes the default one.
    """
    path.mkdir(parents=True, exist_ok=True)
    if rank == 0:
        # No rank writes before all have planned: half a checkpoint never passes for the torn one.
        (path / _LAST).unlink(missing_ok=True)
        (path / f"metadata{digests.SUFFIX}").unlink(missing_ok=True)
        (path / _META).write_text(meta.to_json(), encoding="utf-8")
    writer = _Writer(path, rank)
    with _quiet():
        state_dict_saver.save(state, storage_writer=writer, no_dist=alone, process_group=group)


class _Writer(FileSystemWriter):
    """Writes digests beside the files: those of data before what makes them a checkpoint."""

    def __init__(self, path: Path, rank: int) -> None:
        super().__init__(path)
        self._rank = rank

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """See `StorageWriter`."""
        written = super().write_data(plan, planner)
        files = {each.storage_data.relative_path for each in written.wait()}
        digests.write(Path(self.path), f"rank{self._rank}", sorted(files))
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """See `StorageWriter`."""
        super().finish(metadata, results)
        digests.write(Path(self.path), "metadata", [_LAST, _META])


class CheckpointReader:
    """A complete checkpoint, read by key."""

    def __init__(self, path: Path) -> None:
        """Reads its `.metadata`.

        Raises:
            InputError: if that is damaged.
        """
        self.path = path
        self.metadata = metadata.read(path)
        self._digests = digests.Digests(path)
        self._sound: set[str] = set()
        """Files whose digests are right."""

    def blank(self, key: str) -> Any:
        """Something to fill: a tensor of the stored shape, or nothing for an object.

        Raises:
            InputError: if no tensor can be that large.
        """
        stored = self.metadata.state_dict_metadata[key]
        if not isinstance(stored, TensorStorageMetadata):
            return None
        try:
            return torch.empty(stored.size, dtype=stored.properties.dtype)
        except (RuntimeError, TypeError) as error:
            raise self._damaged(f"{key}: {_line(error)}") from error

    def fill(self, state: dict[str, Any]) -> None:
        """Put what is stored into the tensors of `state`, and objects beside them.

        Raises:
            InputError: if the files are damaged, though as long as they should be.
        """
        places = self.metadata.storage_data.items()
        files = {place.relative_path for index, place in places if index.fqn in state}
        if wrong := self._digests.wrong(files - self._sound):
            raise self._damaged(wrong)
        self._sound |= files
        try:
            with _quiet():
                state_dict_loader.load(
                    state, storage_reader=_Reader(self.path), planner=_Planner(), no_dist=True
                )
        except (Exception, CheckpointException) as error:
            raise self._damaged(cause(error)) from error

    def _damaged(self, why: str) -> InputError:
        return InputError(
            f"{self.path}: cannot be read: {why}. Its files are damaged: move the folder away,"
            " and --resume goes on from the complete checkpoint before it."
        )


class _Reader(FileSystemReader):
    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """See `StorageReader`; runs nothing."""
        return metadata.read(Path(self.path))


class _Planner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """See `LoadPlanner`; torch unpickles what these bytes say, so they are made anew.

        A class of the user's own is admitted by `torch.serialization.add_safe_globals`.
        """
        again = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), again)
        again.seek(0)
        super().load_bytes(read_item, again)


def cause(error: BaseException) -> str:
    """What went wrong in a save or a load, on the rank where it did; one line."""
    failures = error.failures if isinstance(error, CheckpointException) else {}
    parts = [f"rank {rank}: {_line(each[0])}" for rank, each in sorted(failures.items())]
    return "; ".join(parts) or _line(error)


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split("\n")[0].split())[:300]
    return f"{type(error).__name__}: {text.rpartition('] ')[2] or text}"


@contextmanager
def _quiet() -> Iterator[None]:
    """torch.distributed.checkpoint warns about running without a process group: intended here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
