"""Why a module cannot be captured as a graph of operators."""

from __future__ import annotations

from pipeplan.errors import InputError


class UncapturableError(InputError):
    """A module has no graph of operators; whole layers may still be planned.

    `reason` names what in the module is in the way.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"operators: {reason}. Plan whole layers instead (method 'layers' of rematerialize)."
        )
        self.reason = reason
