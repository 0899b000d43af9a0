"""Where results go: refused before the work begins if they could not be written at its end.

A file appears whole or not at all (`whole_file`). Links are followed; pipes and devices
(`/dev/stdout`, `>(gzip > plan.json.gz)`) are written to as they are.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from pipeplan.errors import InputError
from pipeplan.whole_file import beside


def check_output(path: str, force: bool, reads: Sequence[str | None] = ()) -> None:
    """Refuse a file that could not be written at the end, before the work begins.

    Args:
        path: the file.
        force: whether it may exist.
        reads: files that the command reads, and whose place no other may take. A plan that is
            gone on from is none of them.

    Raises:
        InputError: if `path` exists and `force` is not given, it is one of those that are read,
            or nothing can be written there.
    """
    if path == "-":
        return
    if _is_stream(path):
        return
    place = _target(path)
    if not path or place.is_dir() or not place.parent.is_dir():
        raise InputError(f"output {path}: need a file in an existing folder. Check the path.")
    if place.exists() and not place.is_file():
        raise InputError(f"output {path}: got a device, need a file. Check the path.")
    if place.exists() and place in {_target(name) for name in reads if name}:
        raise InputError(f"output {path}: is what the command reads. Choose another file.")
    if place.exists() and not force:
        raise InputError(f"output {path}: exists already. Choose another file or give --force.")
    with _written(path):
        _try(place)


def check_outputs(
    paths: Iterable[str | None], force: bool, reads: Sequence[str | None] = ()
) -> None:
    """`check_output` for all files of one command that are wanted: no two may be one.

    Raises:
        InputError: as `check_output`, or if one would replace another.
    """
    places: set[Path] = set()
    for path in filter(None, paths):
        check_output(path, force, reads)
        if path != "-" and _is_stream(path):
            continue
        place = Path(path) if path == "-" else _target(path)
        if place in places:
            raise InputError(f"output {path}: got the same file twice, need one for each result.")
        places.add(place)


def check_ending(
    path: str | None, endings: Sequence[str] = ("png", "svg", "pdf"), what: str = "picture"
) -> None:
    """Refuse the name of a file whose ending, which chooses the format, is none of `endings`.

    Raises:
        InputError: if it is not.
    """
    if path and not path.endswith(tuple(f".{ending}" for ending in endings)):
        wanted = " or ".join(f".{ending}" for ending in endings)
        raise InputError(f"{what} {path}: need a name that ends with {wanted}.")


def output_folder(path: str, force: bool) -> Path:
    """The folder for results, made if needed; refused before the work if it cannot be used.

    Raises:
        InputError: if `path` is a file, holds files and `force` is not given, or cannot be made
            or written to.
    """
    place = Path(path)
    if path in ("", "-") or (place.exists() and not place.is_dir()):
        raise InputError(f"output {path}: is no folder. Choose another.")
    if place.is_dir() and any(place.iterdir()) and not force:
        raise InputError(f"output {path}: is not empty. Choose another or give --force.")
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"output {path}: cannot be made: {error.strerror}.") from None
    with _written(path):
        _try(place / "results")
    return place


def write(path: str, text: str, force: bool = False) -> None:
    """Put `text` into `path`, all of it or nothing; `-` is stdout.

    Args:
        path: A file that `check_output` let pass, or one in a folder that `output_folder` did.
        text: The file's content.
        force: Whether a file that came to be there since is replaced.

    Raises:
        InputError: if the file cannot be written. Where one came to be there meanwhile, what was
            to be written stays beside it, and the message says where.
    """
    if path == "-":
        sys.stdout.write(text)
        return
    place = _target(path)
    with _written(path):
        if _is_stream(path):
            Path(path).write_text(text, encoding="utf-8")
            return
        partial = beside(place)
        try:
            partial.write_text(text, encoding="utf-8")
            if force or not place.exists():
                os.replace(partial, place)
                return
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
    raise InputError(
        f"output {path}: came to exist meanwhile. The result is in {partial}: move it where it"
        " shall be, or give --force."
    )


def _target(path: str) -> Path:
    """What `path` stands for: the end of a link, not the link."""
    return Path(os.path.realpath(path))


def _is_stream(path: str) -> bool:
    """Whether bytes flow through: nothing that is there could be lost."""
    return Path(path).is_fifo() or Path(path).is_char_device()


def _try(place: Path) -> None:
    """Make and remove a file beside `place`; no other test sees every reason why one cannot be."""
    beside(place).unlink()


@contextlib.contextmanager
def _written(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(
            f"output {path}: cannot be written: {error.strerror}. Choose another place."
        ) from None
