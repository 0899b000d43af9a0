"""A file appears whole or not at all: written beside its place first, then moved there.

So no reader sees half of it, and Ctrl-C or a full disk leaves what was there.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


def beside(place: Path) -> Path:
    """A new, empty file in the folder of `place`: moving it there is one step.

    Raises:
        OSError: if none can be made there.
    """
    number = 0
    while True:
        partial = place.with_name(f"{place.name}.{os.getpid()}-{number}.partial")
        with contextlib.suppress(FileExistsError):
            partial.touch(exist_ok=False)
            return partial
        number += 1


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to fill; it takes the place of `path`, where a link leads, once the block has ended.

    Raises:
        OSError: if it cannot be made or moved. It is gone then, as after an error in the block.
    """
    place = path.resolve()
    partial = beside(place)
    try:
        yield partial
        os.replace(partial, place)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def replace(path: Path, content: str | bytes) -> None:
    """Put `content` into `path`; text as UTF-8.

    Raises:
        OSError: as `replacing`, or if the disk is full.
    """
    with replacing(path) as partial:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)
