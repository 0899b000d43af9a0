"""How a pipeline leaves the other ranks: done, failed, or with a number that is not finite."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pipeplan.errors import InputError, RankError
from pipeplan.runtime.session import Session
from pipeplan.runtime.transport.gloo import GlooTransport, LocalTransport


class Ending:
    """Which ends of a session are left, and whether there is a state to go on from."""

    def __init__(self, own: GlooTransport | LocalTransport | None) -> None:
        """Takes the transport that the pipeline made; None for one of the script's."""
        self._own = own
        self.session: Session | None = None
        """Set once there is one."""
        self.torn = False
        """Whether a run or an evaluation ended in its middle."""
        self.left = False
        """Whether `close` was called."""

    def check_whole(self) -> None:
        """Refuse to go on where gradients are half added and stages are at different steps.

        Raises:
            InputError: if a run or an evaluation ended in its middle.
        """
        if self.torn:
            raise InputError(
                "pipeline: an earlier run, step or evaluate failed in its middle: got a state"
                " between two steps, need one after a step. Make the model and its Pipeline anew"
                " on all ranks, and load the last state_dict() from before."
            )

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Around what leaves a state that nothing can go on from if it does not end.

        Raises:
            RankError: with the rank that is to blame, where the failure does not say it.
        """
        self.torn = True
        try:
            yield
        except BaseException as error:
            named = self._attributed(error) if isinstance(error, Exception) else None
            self.abandon()
            if named is not None:
                raise named from error
            raise
        self.torn = False

    def failed(self, error: BaseException) -> None:
        """The script fails with `error`: the others hear of it, and this rank leaves."""
        if isinstance(error, Exception) and not self.torn:
            self._attributed(error)  # the others ask what this rank does
        self.abandon()

    def abandon(self) -> None:
        """Leave without waiting for anyone."""
        self._close_threads()
        if self._own:
            self._own.abandon()
            self._own = None

    def check_finite(self) -> None:
        """Leave together with the other ranks if anything is not finite: all of them know it.

        Raises:
            RankError: if so.
        """
        if self.session and self.session.wrong:
            self.torn = True
            self._close_threads()
            if self._own:
                self._own.close()
                self._own = None
            raise RankError(
                f"pipeline: {self.session.wrong}. Go on from a state before it with a smaller"
                " learning rate, or train on with allow_nonfinite=True."
            )

    def close(self) -> None:
        """Leave the ranks; those that a failure parted do not wait for each other."""
        self.left = True
        self._close_threads()
        if self.torn:
            self.abandon()
        elif self._own:
            self._own.close()

    def _attributed(self, error: Exception) -> RankError | None:
        return self.session.attributed(error) if self.session else None

    def _close_threads(self) -> None:
        if self.session:
            self.session.close_threads()
