"""Where among the ranks this process is, as torchrun's environment variables say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Place:
    """This process among the ranks; `launched` says whether torchrun started it."""

    rank: int
    size: int
    attempt: int
    launched: bool
    local_rank: int
    """Among those on this machine."""
    local_size: int

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Place:
        """The place that torchrun's variables describe; alone without them."""
        rank, size = environ.get("RANK", "0"), environ.get("WORLD_SIZE", "1")
        return cls(
            rank=int(rank),
            size=int(size),
            attempt=int(environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
            launched="WORLD_SIZE" in environ,
            local_rank=int(environ.get("LOCAL_RANK", rank)),
            local_size=int(environ.get("LOCAL_WORLD_SIZE", size)),
        )
