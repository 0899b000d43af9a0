"""Where among the ranks this process is, as torchrun's environment variables say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipeplan.errors import InputError
from pipeplan.units import shown

_MOST = 2**31 - 1
"""Of what counts processes."""


@dataclass(frozen=True, slots=True)
class TorchrunEnv:
    """This process among the ranks; `launched` says whether torchrun started it."""

    rank: int
    size: int
    attempt: int
    launched: bool
    local_rank: int
    """Among those on this machine."""
    local_size: int

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> TorchrunEnv:
        """The place that torchrun's variables describe; alone without them.

        Raises:
            InputError: if one of them is no number, or they contradict each other.
        """
        size = _number(environ, "WORLD_SIZE", 1, least=1)
        rank = _number(environ, "RANK", 0)
        if rank >= size:
            raise InputError(
                f"environment: RANK: got {rank}, need less than WORLD_SIZE = {size}. Start the"
                " ranks with torchrun, or unset both."
            )
        return cls(
            rank=rank,
            size=size,
            attempt=_number(environ, "TORCHELASTIC_RESTART_COUNT", 0),
            launched="WORLD_SIZE" in environ,
            local_rank=_number(environ, "LOCAL_RANK", rank),
            local_size=_number(environ, "LOCAL_WORLD_SIZE", size, least=1),
        )


def check_rendezvous_address(environ: Mapping[str, str]) -> None:
    """Refuse variables that do not say where the ranks find each other.

    Raises:
        InputError: if an address is missing or a port is none.
    """
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not environ.get(name):
            raise InputError(
                f"environment: {name}: got nothing, need where rank 0 listens. Start the ranks"
                " with torchrun, which sets it."
            )
    _number(environ, "MASTER_PORT", 0, most=2**16 - 1)


def _number(
    environ: Mapping[str, str], name: str, usual: int, *, least: int = 0, most: int = _MOST
) -> int:
    text = environ.get(name)
    if text is None:
        return usual
    if not text.isascii() or not text.isdigit() or not least <= int(text[:20]) <= most:
        raise InputError(
            f"environment: {name}: got {shown(text)}, need an integer from {least} to {most}."
            " torchrun sets it; by hand unset it."
        )
    return int(text)
