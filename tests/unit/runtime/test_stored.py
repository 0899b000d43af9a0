"""A checkpoint's files: nothing in them is run, and no byte that was not written is loaded."""

from __future__ import annotations

import io
import os
import pickle
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from pipeplan.errors import InputError
from pipeplan.runtime.checkpoint import storage

META = storage.CheckpointMeta(
    step=1, seed=0, semantics="flush", microbatches=1, task_digest="", plan_digest=""
)


def state() -> dict[str, Any]:
    """Tensors of some kinds, and objects that optimizers keep."""
    return {
        "model.a": torch.arange(300.0),
        "model.b": torch.full((3, 4), 0.5, dtype=torch.bfloat16),
        "model.count": torch.tensor(7),
        "optimizer.a.step": 3,
        "optimizer.a.options": {"betas": (0.9, 0.99), "name": "x", "none": None},
    }


def saved(path: Path) -> Path:
    """A checkpoint of `state` at `path`."""
    storage.write(path, META, state(), rank=0, alone=True)
    return path


def loaded(path: Path) -> dict[str, Any]:
    """All that the checkpoint at `path` holds."""
    reading = storage.CheckpointReader(path)
    found = {key: reading.blank(key) for key in reading.metadata.state_dict_metadata}
    reading.fill(found)
    return found


def equal(left: dict[str, Any], right: dict[str, Any]) -> bool:
    """Whether two states have the same keys and the same bits."""
    return left.keys() == right.keys() and all(
        torch.equal(value, right[key]) and value.dtype == right[key].dtype
        if isinstance(value, Tensor)
        else value == right[key]
        for key, value in left.items()
    )


def flat() -> dict[str, Any]:
    """`state` as torch stores it: dictionaries by their entries."""
    return {key: value for key, value in state().items() if not isinstance(value, dict)} | {
        f"optimizer.a.options.{name}": value
        for name, value in state()["optimizer.a.options"].items()
        if not isinstance(value, tuple)
    }


def test_a_checkpoint_reads_back(tmp_path: Path) -> None:
    """Tensors and objects come back as they were, and `sha256sum` agrees with the digests."""
    found = loaded(saved(tmp_path / "c"))
    assert equal({key: found[key] for key in flat()}, flat())
    assert storage.is_complete(tmp_path / "c")
    sums = sorted(path.name for path in (tmp_path / "c").glob("*.sha256"))
    assert sums == ["metadata.sha256", "rank0.sha256"]
    subprocess.run(["sha256sum", "--check", "--strict", *sums], cwd=tmp_path / "c", check=True)


class Runs:
    """Pickled, it asks for a call."""

    def __init__(self, call: Callable[..., object], *arguments: object) -> None:
        """Takes what is called by who unpickles this."""
        self.asked = call, arguments

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        """See `object`."""
        return self.asked


@pytest.mark.parametrize(
    ("call", "arguments"), [(os.system, ("touch {}",)), (exec, ("open('{}', 'w')",))]
)
@pytest.mark.parametrize("whole", [True, False])
def test_metadata_runs_nothing(
    tmp_path: Path, whole: bool, call: Callable[..., object], arguments: tuple[str, ...]
) -> None:
    """A call hidden in `.metadata` is refused by its name, and not made."""
    ran = tmp_path / "ran"
    path = saved(storage.step_folder(tmp_path, 1))
    hidden = Runs(call, *(each.format(ran) for each in arguments))
    content: object = hidden if whole else Metadata({}, planner_data=hidden, storage_data={})
    (path / ".metadata").write_bytes(pickle.dumps(content))
    name = f"{call.__module__}.{call.__name__}"
    with pytest.raises(InputError, match=rf"\.metadata cannot be read: .* it names {name}, which"):
        storage.CheckpointReader(path)
    with pytest.raises(InputError, match=rf"no complete checkpoint, .* it names {name}, which"):
        storage.latest(tmp_path)
    assert not ran.exists()


def test_members_of_an_enum_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.11.2 pickles them as getattr(enum, name); nothing else may be asked for so."""
    by_name = lambda self, _: (getattr, (type(self), self.name))  # noqa: E731
    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", by_name)
    path = saved(storage.step_folder(tmp_path, 1))
    assert b"getattr" in (path / ".metadata").read_bytes()
    found = loaded(path)
    assert equal({key: found[key] for key in flat()}, flat())
    hidden = Runs(getattr, Metadata, "__init__")
    (path / ".metadata").write_bytes(pickle.dumps(hidden))
    with pytest.raises(InputError, match=r"it takes '__init__' of .*, which no checkpoint needs"):
        storage.CheckpointReader(path)


def test_objects_run_nothing(tmp_path: Path) -> None:
    """A call hidden in what an optimizer keeps is refused where it is read, and not made."""
    ran = tmp_path / "ran"
    path = tmp_path / "c"
    hidden = {"optimizer.a.step": Runs(os.system, f"touch {ran}")}
    storage.write(path, META, hidden, rank=0, alone=True)
    with pytest.raises(InputError, match=r"c: cannot be read: .*Weights only load failed"):
        loaded(path)
    assert not ran.exists()


def place(name: str, offset: int = 0, length: int = 1) -> dict[MetadataIndex, object]:
    """Where the one key of a checkpoint lies."""
    return {MetadataIndex("k"): filesystem._StorageInfo(name, offset, length)}


BYTES = {"k": BytesStorageMetadata()}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"a": 1}, "holds a dict, need torch's Metadata"),
        (Metadata({1: 2}, storage_data={}), "1: got a int"),
        (Metadata(BYTES, storage_data={"k": 1}), "where torch has a MetadataIndex"),
        (Metadata(BYTES, storage_data={MetadataIndex("k"): 1}), "k: got a int, need its place"),
        (Metadata(BYTES, storage_data=place("../secret")), "lie in '../secret', need a file"),
        (Metadata(BYTES, storage_data=place("/etc/passwd")), "lie in '/etc/passwd'"),
        (Metadata(BYTES, storage_data=place("")), "lie in ''"),
        (Metadata(BYTES, storage_data=place("..")), "lie in '..'"),
        (Metadata(BYTES, storage_data=place("a", -5, 3)), "got bytes from -5"),
        (Metadata(BYTES, storage_data=place("a", 5, -3)), "-3 long"),
    ],
)
def test_metadata_of_another_shape(tmp_path: Path, content: object, message: str) -> None:
    """What torch never wrote is refused in one line that says what it is."""
    path = saved(tmp_path / "c")
    (path / ".metadata").write_bytes(pickle.dumps(content))
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        storage.CheckpointReader(path)
    assert "\n" not in str(caught.value)


def test_a_size_beyond_all_memory(tmp_path: Path) -> None:
    """A tensor that `.metadata` makes too large for any machine is no crash."""
    path = saved(tmp_path / "c")
    huge = TensorStorageMetadata(TensorProperties(), torch.Size([2**60]), [])
    (path / ".metadata").write_bytes(pickle.dumps(Metadata({"k": huge}, storage_data={})))
    with pytest.raises(InputError, match=r"c: cannot be read: k: RuntimeError"):
        storage.CheckpointReader(path).blank("k")


def outcome(broken: Path, before: dict[str, Any]) -> str:
    """What becomes of a checkpoint with a flipped bit."""
    if not storage.is_complete(broken):
        return "passed over"
    try:
        found = loaded(broken)
    except InputError as error:
        return "refused" if "broken: cannot be read: " in str(error) else str(error)
    same = equal(found, before) and storage.read_meta(broken) == META
    return "same" if same else "other bits"


def test_a_flipped_bit_is_never_loaded(tmp_path: Path) -> None:
    """One bit of any file flipped: refused or passed over, or the same bits are loaded."""
    whole = saved(tmp_path / "whole")
    before = loaded(whole)
    random = Random(0)
    outcomes = Counter[str]()
    for file in sorted(whole.iterdir()):
        data = file.read_bytes()
        for _ in range(25):
            broken = tmp_path / "broken"
            shutil.copytree(whole, broken)
            flipped = bytearray(data)
            flipped[random.randrange(len(data))] ^= 1 << random.randrange(8)
            (broken / file.name).write_bytes(flipped)
            outcomes[outcome(broken, before)] += 1
            shutil.rmtree(broken)
    assert outcomes.keys() <= {"refused", "passed over", "same"}, outcomes
    assert outcomes["refused"] >= 25, outcomes
    assert outcomes["passed over"] >= 50, outcomes


def test_a_flip_in_the_data_names_the_file(tmp_path: Path) -> None:
    """The message says which file, how it is known, and the way out."""
    path = saved(tmp_path / "c")
    (data,) = path.glob("*.distcp")
    content = bytearray(data.read_bytes())
    at = content.index(torch.arange(300.0).numpy().tobytes()) + 5
    content[at] ^= 1
    data.write_bytes(content)
    with pytest.raises(
        InputError,
        match=rf"c: cannot be read: {data.name}: its SHA-256 is \w+\.\., it was written with"
        r" \w+\.\.\. .*move the folder away, and --resume goes on",
    ):
        loaded(path)


def test_a_file_without_digest_among_others(tmp_path: Path) -> None:
    """Where files have digests, one that has none is no file of this checkpoint."""
    path = saved(tmp_path / "c")
    (path / "rank0.sha256").write_text("")
    with pytest.raises(InputError, match=r"\.distcp: has no digest in any \*\.sha256 file"):
        loaded(path)


def test_checkpoints_of_earlier_versions(tmp_path: Path) -> None:
    """Without digests they load as before, and it is said."""
    path = saved(storage.step_folder(tmp_path, 1))
    assert storage.passed_over(tmp_path, path) == []
    for each in path.glob("*.sha256"):
        each.unlink()
    assert equal({key: loaded(path)[key] for key in flat()}, flat())
    (remark,) = storage.passed_over(tmp_path, path)
    assert remark.startswith(f"{path} has no digests, ")


def test_a_damaged_checkpoint_is_passed_over_aloud(tmp_path: Path) -> None:
    """The one before is taken, and what is wrong with the newer one is said."""
    older, newer = (saved(storage.step_folder(tmp_path, step)) for step in (1, 2))
    meta = newer / "pipeplan.json"
    meta.write_text(meta.read_text().replace('"step": 1', '"step": 9'))
    assert storage.latest(tmp_path) == older
    (remark,) = storage.passed_over(tmp_path, older)
    assert remark.startswith(f"damaged, and passed over: {newer}: pipeplan.json: its SHA-256")


def test_a_user_admits_classes_of_an_optimizer(tmp_path: Path) -> None:
    """What torch's own list of safe classes admits is loaded."""
    path = tmp_path / "c"
    storage.write(path, META, {"optimizer.a.kept": io.UnsupportedOperation}, rank=0, alone=True)
    with torch.serialization.safe_globals([io.UnsupportedOperation]):
        assert loaded(path)["optimizer.a.kept"] is io.UnsupportedOperation
