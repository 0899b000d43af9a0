"""Every exception pipeplan raises on purpose, each with the exit code its command ends with.

Messages follow one form: what, where, got, needed, next step.
"""

from __future__ import annotations

from collections.abc import Sequence


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, as Python, torch on a GPU and torch's CPU allocator say it."""
    known = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return known or "DefaultCPUAllocator: " in str(error)


class PipeplanError(Exception):
    """Base of all expected failures; the command line prints it without a traceback."""

    exit_code = 1


class InternalError(PipeplanError):
    """Our own promise is broken (an unverifiable plan, a disagreement of voices): a bug report."""

    exit_code = 1


class InputError(PipeplanError, ValueError):
    """A file, flag or task given by the user is wrong."""

    exit_code = 2


class DisagreementError(InputError):
    """Ranks that were to train together have different things; raised alike on all of them."""


class InfeasibleError(PipeplanError):
    """It is proven that no plan exists for this chain on this cluster."""

    exit_code = 3
    least_bytes: int | None = None
    """Of a budget that was too small: one that can be kept, where that is known."""


class InvalidPlanError(PipeplanError):
    """A plan breaks at least one rule of the verifier; `violations` lists all of them."""

    exit_code = 4

    def __init__(self, message: str, violations: Sequence[object] = ()) -> None:
        super().__init__(message)
        self.violations = tuple(violations)


class TimeLimitError(PipeplanError):
    """No plan was found before the time limit or the end of the search; nothing is proven."""

    exit_code = 5


class DeadlockError(PipeplanError):
    """Actions of a program wait for each other in a circle; `cycle` names them in order."""

    exit_code = 4

    def __init__(self, message: str, cycle: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.cycle = tuple(cycle)


class RankError(PipeplanError):
    """A rank failed, hung or disagrees with its peers during a run.

    `peers` are the ranks whose fault it may be: those it waited for or lost.
    """

    exit_code = 1

    def __init__(self, message: str, peers: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.peers = tuple(peers)
