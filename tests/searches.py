"""What the solver's searches may do in tests."""

from __future__ import annotations

from typing import Any

from pipeplan.ilp.incumbent import SearchOptions


def limits(**changes: Any) -> SearchOptions:
    """K = 1, any allocation, one worker, 20 s, no gap allowed; `changes` go on top."""
    usual: dict[str, Any] = {
        "microbatches": 8,
        "limit_versions": False,
        "ks": (1,),
        "contiguous_only": False,
        "time_limit_s": 20,
        "gap": 0,
        "seed": 0,
        "workers": 1,
        "deterministic": False,
    }
    return SearchOptions(**usual | changes)
