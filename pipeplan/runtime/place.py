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

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Place:
        """The place that torchrun's variables describe; alone without them."""
        return cls(
            rank=int(environ.get("RANK", "0")),
            size=int(environ.get("WORLD_SIZE", "1")),
            attempt=int(environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
            launched="WORLD_SIZE" in environ,
        )
