"""Live progress of a search on stderr: best, bound, gap, elapsed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import TYPE_CHECKING

from pipeplan.cli import common
from pipeplan.units import format_ns

if TYPE_CHECKING:
    from pipeplan.planner import Progress


def timed() -> Callable[[str], None]:
    """Says news behind the seconds since now."""
    begin = time.monotonic()
    return lambda news: common.say(f"{time.monotonic() - begin:6.1f} s  {news}")


@contextmanager
def search() -> Iterator[Progress]:
    """A callback for `solve`: one live line on a terminal, a line per news in a log."""
    console = common.screen(to_stderr=True)
    if not console.is_terminal:
        yield _Log()
        return
    from rich.progress import Progress as Bar
    from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task("planning", total=None)
        yield lambda _, best, bound, gap, phase: bar.update(
            task, description=line(best, bound, gap, phase)
        )


def line(best: Fraction | None, bound: Fraction, gap: float | None, phase: str) -> str:
    """What is known now, in one line."""
    plan = "none yet" if best is None else f"{format_ns(best)} per micro-batch"
    proven = f"bound {format_ns(bound)}" if bound else "no bound yet"
    return f"{phase}: best {plan}, {proven}, gap {'?' if gap is None else f'{gap:.2%}'}"


_NEWS_S, _SILENT_S = 1, 5
"""Least seconds before a better plan is told, and before what is known already."""


class _Log:
    """Says each phase when it comes for the first time, what is better, and now and then the rest.

    A search goes through its phases again and again.
    """

    def __init__(self) -> None:
        self._phases: set[str] = set()
        self._known: tuple[Fraction | None, str] = None, ""
        self._at = 0.0

    def __call__(
        self,
        elapsed: float,
        best: Fraction | None,
        bound: Fraction,
        gap: float | None,
        phase: str,
    ) -> None:
        found, _ = self._known
        wait = _NEWS_S if best != found else _SILENT_S
        again = (best, phase) != self._known and elapsed >= self._at + wait
        if phase not in self._phases or again:
            self._phases.add(phase)
            self._known, self._at = (best, phase), elapsed
            common.say(f"{elapsed:6.1f} s  {line(best, bound, gap, phase)}")
