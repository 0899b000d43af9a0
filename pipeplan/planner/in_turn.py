"""Several searches, one after the other, of which Ctrl-C keeps what the first ones found."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeVar

from pipeplan.ilp import Report as Progress

_Item = TypeVar("_Item")
_Found = TypeVar("_Found")


def in_turn(
    items: Iterable[tuple[str, _Item]],
    search: Callable[[_Item, Progress], _Found],
    progress: Progress | None,
) -> Iterator[_Found]:
    """What `search` finds for each item; Ctrl-C ends all searches, the one that runs among them.

    Args:
        items: what phases of a search begin with, and what it is given.
        search: of one item; it may keep its best plan on Ctrl-C, as `solve` does.
        progress: hears of all searches.

    Raises:
        KeyboardInterrupt: if the first search was interrupted and kept nothing.
    """
    for number, (name, item) in enumerate(items):
        heard = _NamedProgress(progress, name)
        try:
            found = search(item, heard)
        except KeyboardInterrupt:
            if not number:
                raise
            return
        yield found
        if heard.interrupted:
            return


@dataclass
class _NamedProgress:
    """Passes progress on with the search's name in front of each phase."""

    progress: Progress | None
    name: str
    interrupted: bool = False

    def __call__(
        self,
        elapsed: float,
        best: Fraction | None,
        bound: Fraction,
        gap: float | None,
        phase: str,
    ) -> None:
        self.interrupted |= phase == "interrupted"
        if self.progress is not None:
            self.progress(elapsed, best, bound, gap, f"{self.name}{phase}")
