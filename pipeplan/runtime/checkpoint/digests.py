"""SHA-256 of a checkpoint's files, in the form that `sha256sum -c` checks, too.

Each rank writes `rankR.sha256` for the files it wrote, before `.metadata` makes the checkpoint
complete; `metadata.sha256` follows for `.metadata` and `pipeplan.json`. Checkpoints of earlier
versions have neither.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

SUFFIX = ".sha256"


def write(folder: Path, name: str, files: Iterable[str]) -> None:
    """Write the digests of `files`, which lie in `folder`, into its file `name`.sha256."""
    lines = [f"{_digest(folder / file)}  {file}\n" for file in files]
    with (folder / f"{name}{SUFFIX}").open("w", encoding="utf-8") as target:
        target.writelines(lines)
        target.flush()
        os.fsync(target.fileno())


def present(folder: Path) -> bool:
    """Whether the files in `folder` have digests."""
    return any(folder.glob(f"rank*{SUFFIX}"))


class Digests:
    """The digests in a folder; each file is read once."""

    def __init__(self, folder: Path) -> None:
        """Reads what `write` has written."""
        self._folder = folder
        self._present = present(folder)
        self._checked: set[str] = set()
        self._known: dict[str, str] = {}
        for each in folder.glob(f"*{SUFFIX}"):
            for line in each.read_text(encoding="utf-8", errors="replace").splitlines():
                digest, _, file = line.partition("  ")
                self._known[file] = digest

    def wrong(self, files: Iterable[str]) -> str | None:
        """Which of `files` has other bytes than were written, and how it is known; None if none.

        Where nothing has digests, nothing is known.
        """
        for file in sorted(set(files) - self._checked if self._present else ()):
            if file not in self._known:
                return f"{file}: has no digest in any *{SUFFIX} file"
            if (found := _digest(self._folder / file)) != self._known[file]:
                need = self._known[file]
                return f"{file}: its SHA-256 is {found[:12]}.., it was written with {need[:12]}.."
            self._checked.add(file)
        return None


def _digest(file: Path) -> str:
    with file.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()
