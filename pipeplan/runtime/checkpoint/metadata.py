"""The `.metadata` of a checkpoint, read without running what it names.

torch.distributed.checkpoint writes and reads it with pickle, which calls whatever a file asks for.
This reader admits only the names that a checkpoint of tensors and plain values needs, and files
that lie in its own folder.
"""

from __future__ import annotations

import pickle
from pathlib import Path

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as names
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from pipeplan.errors import InputError

_FORMAT = names._MEM_FORMAT_ENCODING  # noqa: SLF001


def _member(kind: object, name: object) -> object:
    """What `getattr` stands for: early Pythons 3.11 pickle members of an enum by name.

    Raises:
        UnpicklingError: if it is asked for anything else.
    """
    if kind is not _FORMAT or name not in _FORMAT.__members__:
        raise pickle.UnpicklingError(f"it takes {name!r} of {kind!r}, which no checkpoint needs")
    return _FORMAT.__members__[str(name)]


_ADMITTED: dict[tuple[str, str], object] = {
    (each.__module__, each.__qualname__): each
    for each in (
        names.Metadata,
        names.MetadataIndex,
        names.StorageMeta,
        names.TensorProperties,
        names.TensorStorageMetadata,
        names.BytesStorageMetadata,
        names.ChunkStorageMetadata,
        _FORMAT,
        filesystem._StorageInfo,  # noqa: SLF001
    )
} | {
    ("builtins", "getattr"): _member,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): lambda _: torch.strided,
    ("pathlib", "PosixPath"): lambda *parts: "/".join(parts),
    ("pathlib", "WindowsPath"): lambda *parts: "/".join(parts),
    ("pathlib._local", "PosixPath"): lambda *parts: "/".join(parts),
}


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        """What `name` of `module` stands for.

        Raises:
            UnpicklingError: if no checkpoint has it.
        """
        if (module, name) in _ADMITTED:
            return _ADMITTED[module, name]
        kind = vars(torch).get(name) if module == "torch" else None
        if isinstance(kind, torch.dtype):
            return kind
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")


def read(path: Path) -> Metadata:
    """What the checkpoint at `path` holds, and where.

    Raises:
        InputError: if `.metadata` is missing, or holds something else.
    """
    try:
        with (path / ".metadata").open("rb") as file:
            found = _PlainUnpickler(file).load()
        _check(found)
    except Exception as error:  # bytes of chance raise anything
        why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise InputError(f"{path}: .metadata cannot be read: {why}") from error
    assert isinstance(found, Metadata)
    return found


def files(metadata: Metadata) -> dict[str, int]:
    """The files that `metadata` names, and how long they are at least, in bytes."""
    ends: dict[str, int] = {}
    for place in metadata.storage_data.values():
        end = place.offset + place.length
        ends[place.relative_path] = max(ends.get(place.relative_path, 0), end)
    return ends


def _check(found: object) -> None:
    """Refuse what has another shape than torch's own, or would read outside the folder."""
    if not isinstance(found, Metadata):
        raise TypeError(f"it holds a {type(found).__name__}, need torch's Metadata")
    kinds = TensorStorageMetadata | names.BytesStorageMetadata
    for key, stored in found.state_dict_metadata.items():
        if not isinstance(key, str) or not isinstance(stored, kinds):
            raise TypeError(f"{key!r}: got a {type(stored).__name__}, need a tensor's or bytes'")
    for index, place in found.storage_data.items():
        if not isinstance(index, MetadataIndex):
            raise TypeError(f"it holds a {type(index).__name__} where torch has a MetadataIndex")
        if not isinstance(place, filesystem._StorageInfo):  # noqa: SLF001
            raise TypeError(f"{index.fqn}: got a {type(place).__name__}, need its place")
        name = Path(place.relative_path).name
        if name != place.relative_path or name in ("", "..") or place.transform_descriptors:
            raise ValueError(
                f"{index.fqn}: is said to lie in {place.relative_path!r}, need a file"
            )
        if not 0 <= place.offset <= place.offset + place.length:
            raise ValueError(f"{index.fqn}: got bytes from {place.offset}, {place.length} long")
