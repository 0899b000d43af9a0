"""A module that keeps a budget of live bytes: planned by `pipeplan.remat`, run for real.

docs/reference/remat-rules.md, "Running it".
"""

from pipeplan.rematerialized.api import rematerialize

__all__ = ["rematerialize"]
