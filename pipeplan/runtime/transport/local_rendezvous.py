"""Which ranks share a machine, found out by connecting them.

Names prove nothing: containers may have equal hostnames, clones of a virtual machine equal boot
ids, and a rank with a network of its own cannot be reached though it is on the same machine. So
each rank listens, tells the others where, and calls those before it; a pair has a channel if one
end has called, the other end has answered, and both know it. Nothing here waits for a single rank:
calls are complete at once or not at all, and all ranks pass the same three exchanges.

Addresses are abstract unix sockets (Linux): no file, so a crash leaves none behind.
"""

from __future__ import annotations

import secrets
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import ProcessGroup

_SECRET_BYTES = 16


def machine() -> str | None:
    """A name that ranks of one machine share, others perhaps; None: no channels here."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


@dataclass(frozen=True, slots=True)
class _Address:
    """Where a rank listens."""

    machine: str
    name: bytes
    secret: bytes
    """Whoever calls must know it."""


def connect(group: ProcessGroup, *, takes_part: bool) -> dict[int, socket.socket]:
    """A connected socket to each rank that is to have a channel, by rank; all ranks call it.

    Args:
        group: the ranks.
        takes_part: whether this rank wants any.
    """
    here, name = group.rank(), machine() if takes_part else None
    listener, address = _listen(name, group.size()) if name else (None, None)
    addresses = _tell(group, address)
    called = {
        rank: end
        for rank, other in enumerate(addresses[:here])
        if address and other and (end := _call(address, other, here))
    }
    calls = _tell(group, sorted(called))
    callers = {rank for rank in range(here + 1, group.size()) if here in calls[rank]}
    answered: dict[int, socket.socket] = {}
    if listener and address:
        with listener:
            answered = _answer(listener, address.secret, callers)
    answers = _tell(group, sorted(answered))
    for rank in [rank for rank in called if here not in answers[rank]]:
        called.pop(rank).close()
    return called | answered


def _tell(group: ProcessGroup, value: object) -> list[Any]:
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group)
    return values


def _listen(machine: str, size: int) -> tuple[socket.socket, _Address] | tuple[None, None]:
    name = b"\0pipeplan-" + secrets.token_hex(16).encode()
    try:
        listener = socket.socket(socket.AF_UNIX)
    except OSError:  # no file left, or refused
        return None, None
    try:
        listener.bind(name)
        listener.listen(size)
        listener.setblocking(False)
    except OSError:
        listener.close()
        return None, None
    return listener, _Address(machine, name, secrets.token_bytes(_SECRET_BYTES))


def _call(own: _Address, other: _Address, here: int) -> socket.socket | None:
    """Connect and say who calls; None if that is not possible at once."""
    if own.machine != other.machine:
        return None
    try:
        end = socket.socket(socket.AF_UNIX)
    except OSError:
        return None
    end.setblocking(False)
    try:
        end.connect(other.name)
        end.sendall(other.secret + here.to_bytes(4))
    except OSError:
        end.close()
        return None
    return end


def _answer(listener: socket.socket, secret: bytes, callers: set[int]) -> dict[int, socket.socket]:
    """The ends of all `callers`, who have called already; strangers are hung up on."""
    found: dict[int, socket.socket] = {}
    while True:
        try:
            end, _ = listener.accept()
        except OSError:
            return found
        end.setblocking(False)
        try:
            said = end.recv(_SECRET_BYTES + 4)
        except OSError:
            said = b""
        rank = int.from_bytes(said[_SECRET_BYTES:])
        known = secrets.compare_digest(said[:_SECRET_BYTES], secret)
        if known and rank in callers and rank not in found:
            found[rank] = end
        else:
            end.close()
