"""Plan and run pipeline-parallel training: the shortest period under exact memory."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeplan.batching import batches
    from pipeplan.callbacks import Callback
    from pipeplan.pipeline import Pipeline
    from pipeplan.rematerialized import rematerialize
    from pipeplan.task import Task, task_function
    from pipeplan.validation import Validation

__version__ = "0.1.0"
__all__ = [
    "Callback",
    "Pipeline",
    "Task",
    "Validation",
    "batches",
    "rematerialize",
    "task_function",
]

_HOMES = {
    "Callback": "pipeplan.callbacks",
    "Pipeline": "pipeplan.pipeline",
    "Task": "pipeplan.task",
    "batches": "pipeplan.batching",
    "rematerialize": "pipeplan.rematerialized",
    "task_function": "pipeplan.task",
    "Validation": "pipeplan.validation",
}


def __getattr__(name: str) -> object:
    """Import what is asked for only then: planning needs no torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'pipeplan' has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_HOMES[name]), name)
    except AttributeError as error:  # Python would say that `pipeplan` has no such name
        raise ImportError(
            f"pipeplan.{name}: cannot be imported: {error}. It needs torch 2.11 or newer."
        ) from error
