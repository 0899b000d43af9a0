"""Whether all ranks see one output directory: found out before the first step, not at a save.

Rank 0 puts a file there. The others try to make the same one: where it is shared, the file system
itself says that it exists, whatever a machine remembers of the directory (network file systems
do so for up to a minute).
"""

from __future__ import annotations

import os
import secrets
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from torch.distributed.distributed_c10d import Store

from pipeplan.errors import DisagreementError

MARKER = ".pipeplan-join"
_UNSHARED = (
    "got a directory of its own, need one that all ranks share: each writes its part of every"
    " checkpoint there. Give a directory on a file system that all machines have."
)
_UNWRITABLE = "cannot be written to: {}. Choose another directory."
_HEARD_S = 5.0
_LOOK_S = 0.01


def check_shared(store: Store, rank: int, size: int, out: Path, timeout: timedelta) -> None:
    """Return where all ranks see one directory `out`, which exists then and is as it was.

    Args:
        store: shared by all ranks, used by nothing else.
        rank: this rank.
        size: number of ranks.
        out: as this rank was given it.
        timeout: longest wait for the others.

    Raises:
        DisagreementError: if one of them sees another one; the same on every rank.
    """
    if rank:
        store.wait(["marker"], timeout)
        made = list[Path]()
        try:
            store.set(f"seen{rank}", _looked(out, store.get("marker").decode(), made))
            store.wait(["outcome"], timeout)
        finally:
            # Not before: another rank may be looking into a directory that this one made.
            _unmake(made)
        said = str(store.get("outcome").decode())
        store.add("heard", 1)
    else:
        said = _create(store, size, out, timeout)
        store.set("outcome", said)
        _wait_until_heard(store, size if said else 0)
    if said:
        raise DisagreementError(said)


def _create(store: Store, size: int, out: Path, timeout: timedelta) -> str:
    """What rank 0 does; what there is to say against a rank, empty if nothing."""
    token, made, said = secrets.token_hex(16), list[Path](), ""
    others = range(1, size)
    try:
        _make(out, made)
        (out / MARKER).write_text(token)
    except OSError as error:
        said = f"--out {out}: rank 0: {_UNWRITABLE.format(error)}"
    try:
        store.set("marker", token)
        store.wait([f"seen{other}" for other in others], timeout)
        seen = {other: store.get(f"seen{other}").decode() for other in others}
        differing = (f"--out {out}: rank {r}: {text}" for r, text in seen.items() if text)
        said = said or next(differing, "")
        return said
    finally:
        with suppress(OSError):
            (out / MARKER).unlink()
        if said:
            _unmake(made)


def _make(folder: Path, made: list[Path]) -> None:
    """Make `folder` and what it is in; adds to `made` what was not there.

    That is all behind the first that was not: another rank may make it meanwhile.
    """
    for each in (*reversed(folder.parents), folder):
        if made or not os.path.lexists(each):
            made.append(each)
            with suppress(FileExistsError):
                each.mkdir()


def _unmake(made: list[Path]) -> None:
    for each in reversed(made):
        with suppress(OSError):
            each.rmdir()


def _looked(out: Path, token: str, made: list[Path]) -> str:
    """Why rank 0's file is not here, empty if it is; adds to `made` what was not there."""
    try:
        _make(out, made)
        os.close(os.open(out / MARKER, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        (out / MARKER).unlink()
    except FileExistsError:
        with suppress(OSError):
            return "" if (out / MARKER).read_text() == token else _UNSHARED
    except OSError as error:
        return _UNWRITABLE.format(error)
    return _UNSHARED


def _wait_until_heard(store: Store, size: int) -> None:
    """Until all others know: this rank may host the store and is about to end."""
    deadline = time.monotonic() + _HEARD_S
    while store.add("heard", 0) < size - 1 and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
