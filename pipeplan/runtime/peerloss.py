"""A message whose other end is gone: the same error wherever and however it is noticed."""

from __future__ import annotations

from typing import NoReturn


class PeerLostError(Exception):
    """The other end of a message is gone or silent for too long."""


def lost(error: RuntimeError) -> NoReturn:
    """A connection may be found closed while sending, posting or waiting: the same loss."""
    raise PeerLostError(str(error).rpartition("] ")[2]) from error
