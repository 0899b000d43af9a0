"""The entry point: one exit code and one message, whatever happens."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipeplan import interrupts

if TYPE_CHECKING:
    from pipeplan.errors import PipeplanError
    from pipeplan.launch.options import Options
    from pipeplan.plan import Plan
    from pipeplan.program import Pattern
    from pipeplan.runtime.place import Place

_PATIENCE_S = 10.0
"""How long ranks other than 0 let rank 0 speak first when a check fails."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one rank; returns its exit code.

    Nothing is imported before it listens to Ctrl-C, of which only rank 0 speaks: all have it.
    """
    speaks = interrupts.is_first_rank()
    return interrupts.told("launch", lambda: _checked(argv), speaks=speaks)


def _checked(argv: Sequence[str] | None) -> int:
    from pipeplan.errors import PipeplanError
    from pipeplan.launch.options import parse
    from pipeplan.runtime.place import Place

    place: Place | None = None
    try:
        place = Place.of(os.environ)
        return _run(parse(argv), place)
    except PipeplanError as error:
        return _refuse(error, place)


def _run(options: Options, place: Place) -> int:
    from pipeplan.launch import checks

    if options.clock != "real":
        plan, pattern = checks.planned(options, place)
        return _table(plan, place) if options.dry_run else _rehearse(options, place, plan, pattern)
    if options.dry_run and (foreign := checks.foreign_task(options)):
        return _table(checks.check_without_task(options, place), place, foreign)
    setup = checks.prepare(options, place)
    if options.dry_run:
        return _table(setup.plan, place)
    from pipeplan.launch import train

    return train.run(setup, place)


def _rehearse(options: Options, place: Place, plan: Plan, pattern: Pattern) -> int:
    from pipeplan.launch import rehearsal

    return rehearsal.run(options, place, plan, pattern)


def _table(plan: Plan, place: Place, unloaded: str | None = None) -> int:
    from pipeplan.launch import checks

    if place.rank == 0:
        print(checks.table(plan, unloaded))
    return 0


def _refuse(error: PipeplanError, place: Place | None) -> int:
    """Rank 0 speaks, and who does not know its rank; others speak after a while.

    torchrun ends all ranks as soon as one has ended, so rank 0 must not lose the race.
    """
    if place and place.rank:
        time.sleep(_PATIENCE_S)
    where = f"rank {place.rank}: " if place and place.rank else ""
    print(f"error: {where}{error}", file=sys.stderr, flush=True)
    return error.exit_code


if __name__ == "__main__":
    interrupts.leave(main())
