"""Where first weights are read from, by name: files of safetensors, torch and its checkpoints.

A source lists its names and gives one tensor at a time, so that a rank reads what it hosts and
never holds more of a file than the tensor it copies.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from pipeplan.errors import InputError
from pipeplan.runtime.checkpoint.storage import CheckpointReader, cause, is_ours

_FORMS = (
    "need a folder with safetensors files (model.safetensors.index.json or *.safetensors), a"
    " folder of torch.distributed.checkpoint (with .metadata), a .safetensors file, or a file"
    " that torch.save wrote of a state_dict"
)


class WeightSource(Protocol):
    """Tensors by name."""

    @property
    def names(self) -> Collection[str] | None:
        """All of them; None if that is not known."""

    def read(self, name: str) -> Tensor:
        """One of them; KeyError if there is no such name."""


def opened(weights: str | Path | Callable[[str], Tensor]) -> WeightSource:
    """The source that `Task.weights` names.

    Raises:
        InputError: if it is none, or cannot be read.
    """
    if callable(weights):
        return _Called(weights)
    path = Path(weights)
    try:
        return _of_folder(path) if path.is_dir() else _of_file(path)
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"task: weights {path}: cannot be read: {cause(error)}; {_FORMS}"
        ) from error


def _of_folder(path: Path) -> WeightSource:
    index = path / "model.safetensors.index.json"
    if index.is_file():
        return _Safetensors(_indexed(index))
    if (path / ".metadata").is_file():
        return _Distributed.of(path)
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise InputError(f"task: weights {path}: got a folder with none of these, {_FORMS}")
    found: dict[str, Path] = {}
    for file in files:
        found |= dict.fromkeys(_names_in(file), file)
    return _Safetensors(found)


def _of_file(path: Path) -> WeightSource:
    if not path.is_file():
        raise InputError(f"task: weights {path}: got no file, {_FORMS}")
    if path.suffix == ".safetensors":
        return _Safetensors(dict.fromkeys(_names_in(path), path))
    return _Saved.of(path)


def _indexed(index: Path) -> dict[str, Path]:
    """The file of each name, all in the folder of `index`."""
    stored = json.loads(index.read_text(encoding="utf-8"))
    files: dict[str, str] = stored["weight_map"]
    for name in set(files.values()):
        if Path(name).name != name:
            raise InputError(f"task: weights {index}: got the file {name!r}, need one beside it")
    return {key: index.parent / name for key, name in files.items()}


def _names_in(file: Path) -> list[str]:
    with _safe_open(file) as stored:
        return list(stored.keys())


def _safe_open(file: Path) -> Any:
    try:
        from safetensors import safe_open
    except ImportError:
        raise InputError(
            f"task: weights {file}: needs the package safetensors: pip install safetensors"
        ) from None
    return safe_open(file, framework="pt", device="cpu")


@dataclass(frozen=True, slots=True)
class _Called:
    """A function of the user's."""

    read: Callable[[str], Tensor]
    names: None = None


@dataclass(frozen=True, slots=True)
class _Safetensors:
    """Files of safetensors: each is mapped for one tensor and let go."""

    files: Mapping[str, Path]

    @property
    def names(self) -> Collection[str]:
        return self.files.keys()

    def read(self, name: str) -> Tensor:
        with _safe_open(self.files[name]) as stored:
            value: Tensor = stored.get_tensor(name)
        return value


@dataclass(frozen=True, slots=True)
class _Saved:
    """A file of torch.save: mapped for one tensor and let go."""

    path: Path
    names: frozenset[str]

    @classmethod
    def of(cls, path: Path) -> _Saved:
        stored = _loaded(path)
        if not isinstance(stored, Mapping) or not all(
            isinstance(name, str) and isinstance(value, Tensor) for name, value in stored.items()
        ):
            raise InputError(
                f"task: weights {path}: got a {type(stored).__name__} that is no state_dict, need"
                " names with tensors. Save model.state_dict() alone."
            )
        return cls(path, frozenset(stored))

    def read(self, name: str) -> Tensor:
        value: Tensor = _loaded(self.path)[name]
        return value


def _loaded(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


@dataclass(frozen=True, slots=True)
class _Distributed:
    """A folder of torch.distributed.checkpoint; of one of ours, the weights."""

    reading: CheckpointReader
    prefix: str
    names: frozenset[str]

    @classmethod
    def of(cls, path: Path) -> _Distributed:
        reading, prefix = CheckpointReader(path), "model." if is_ours(path) else ""
        names = (
            key.removeprefix(prefix)
            for key, value in reading.metadata.state_dict_metadata.items()
            if key.startswith(prefix) and isinstance(value, TensorStorageMetadata)
        )
        return cls(reading, prefix, frozenset(names))

    def read(self, name: str) -> Tensor:
        key = self.prefix + name
        state = {key: self.reading.blank(key)}
        self.reading.fill(state)
        value: Tensor = state[key]
        return value
