"""The entry point: one exit code and one message, whatever happens."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipeplan import interrupts
from pipeplan.launch.last_words import say

if TYPE_CHECKING:
    from pipeplan.errors import PipeplanError
    from pipeplan.launch.options import LaunchOptions
    from pipeplan.plan import Plan
    from pipeplan.program import Pattern
    from pipeplan.runtime.transport.torchrun_env import TorchrunEnv

_PART_S = 1.0
"""How long ranks other than 0 wait once it knows why they end, so that it speaks."""
_PATIENCE_S = 10.0
"""How long ranks other than 0 let rank 0 speak first when a check fails."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one rank; returns its exit code.

    Nothing is imported before it listens to Ctrl-C, of which only rank 0 speaks: all have it.
    """
    speaks = interrupts.is_first_rank()
    return interrupts.exit_code_of("launch", lambda: _checked(argv), speaks=speaks)


def _checked(argv: Sequence[str] | None) -> int:
    from pipeplan.errors import PipeplanError
    from pipeplan.heap import give_back_large_blocks
    from pipeplan.launch.options import parse
    from pipeplan.runtime.transport.torchrun_env import TorchrunEnv

    if argv is None:  # the process is this rank's and nobody else's
        give_back_large_blocks(os.environ)
    place: TorchrunEnv | None = None
    try:
        place = TorchrunEnv.of(os.environ)
        return _run(parse(argv), place)
    except PipeplanError as error:
        return _refuse(error, place)


def _run(options: LaunchOptions, place: TorchrunEnv) -> int:
    from pipeplan.launch import checks

    if options.clock != "real":
        plan, pattern = checks.planned_run(options, place)
        if options.dry_run:
            return _table(plan, options, place)
        return _dry_run(options, place, plan, pattern)
    if options.dry_run and (foreign := checks.foreign_task(options)):
        return _table(checks.check_without_task(options, place), options, place, foreign)
    from pipeplan.errors import InputError
    from pipeplan.taskref import error_line

    try:
        setup = checks.prepare(options, place)
    except SystemExit as error:  # its code would be taken for ours
        raise InputError(f"launch: the task's code has exited: {error_line(error)}") from error
    if options.dry_run:
        return _table(setup.plan, options, place)
    from pipeplan.launch import train

    return train.run(setup, place)


def _dry_run(options: LaunchOptions, place: TorchrunEnv, plan: Plan, pattern: Pattern) -> int:
    from pipeplan.launch import dry_run

    return dry_run.run(options, place, plan, pattern)


def _table(
    plan: Plan, options: LaunchOptions, place: TorchrunEnv, unloaded: str | None = None
) -> int:
    from pipeplan.launch import checks

    if place.rank == 0:
        print(checks.rank_table(plan, unloaded, options.replicas))
    return 0


def _refuse(error: PipeplanError, place: TorchrunEnv | None) -> int:
    """Rank 0 speaks, and who does not know its rank; others tell rank 0, or speak after a while.

    torchrun ends all ranks as soon as one has ended, so rank 0 must not lose the race. Ranks that
    were not refused hear of it where they join.
    """
    begin = time.monotonic()
    if place is None or not place.rank:
        say(f"error: {error}")
        if place and place.size > 1:
            _tell(error, place)
    elif _tell(error, place):
        time.sleep(_PART_S)
    else:
        time.sleep(max(0.0, _PATIENCE_S - (time.monotonic() - begin)))
        say(f"error: rank {place.rank}: {error}")
    return error.exit_code


def _tell(error: PipeplanError, place: TorchrunEnv) -> bool:
    """Tell the ranks that join; whether rank 0 knows then."""
    if not os.environ.get("MASTER_ADDR"):  # nobody can be told, so torch is not needed
        return False
    from pipeplan.runtime.startup.process_group import tell_refusal

    return tell_refusal(place, str(error), _PATIENCE_S)


if __name__ == "__main__":
    interrupts.leave(main())
