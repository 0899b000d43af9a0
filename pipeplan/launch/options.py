"""Flags of `launch`. No torch, no files."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeVar

from pipeplan.errors import InputError
from pipeplan.units import parse_time_ns

_Value = TypeVar("_Value")

_EXAMPLES = """\
examples:
  torchrun --nproc-per-node 4 -m pipeplan.launch --plan plan.json --steps 100 --out run
  python -m pipeplan.launch --plan plan.json --dry-run
  torchrun --nproc-per-node 4 -m pipeplan.launch --plan plan.json --resume run --steps 200
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the user asked for."""

    plan: Path
    task: str | None
    """Task reference; None takes the one in the plan's chain."""
    steps: int
    """Optimizer steps in total, those before a resume included."""
    seed: int | None
    out: Path | None
    resume: Path | None
    save_every: int | None
    timeout_ns: int
    dry_run: bool
    json: bool
    instrument: bool


class _Parser(argparse.ArgumentParser):
    """Usage errors become an InputError, so that only rank 0 prints them."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"launch: {message}. See python -m pipeplan.launch --help.")


def parse(argv: Sequence[str] | None) -> Options:
    """The options in `argv`.

    Raises:
        InputError: if a flag is unknown or its value makes no sense.
    """
    parser = _Parser(
        prog="torchrun --nproc-per-node P -m pipeplan.launch",
        description="Train a task as a plan says, one rank per GPU of the plan.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--plan", type=Path, required=True, metavar="FILE", help="plan.json")
    add("--task", metavar="REF", help="task reference, if not the one the chain was profiled from")
    add("--steps", type=_count(1), default=100, help="optimizer steps in total (default 100)")
    add("--seed", type=_count(0), help="of weights and dropout (default 0)")
    add("--out", type=Path, metavar="DIR", help="metrics, results and checkpoints; must be empty")
    add("--resume", type=Path, metavar="DIR", help="go on from DIR's newest checkpoint")
    add("--save-every", type=_count(1), metavar="STEPS", help="also save in between")
    add("--timeout", type=_time, default="600s", help="longest wait for a peer (default 600s)")
    add("--dry-run", action="store_true", help="check everything, print the table of ranks, stop")
    add("--json", action="store_true", help="one JSON object per step on stdout")
    add("--instrument", action="store_true", help="count live bytes (slow: do not time this run)")
    given = parser.parse_args(argv)
    return Options(
        plan=given.plan,
        task=given.task,
        steps=given.steps,
        seed=given.seed,
        out=given.out or given.resume,
        resume=given.resume,
        save_every=given.save_every,
        timeout_ns=given.timeout,
        dry_run=given.dry_run,
        json=given.json,
        instrument=given.instrument,
    )


def _count(least: int) -> Callable[[str], int]:
    def convert(text: str) -> int:
        if not text.isascii() or not text.isdigit() or not least <= int(text[:20]) < 2**31:
            raise argparse.ArgumentTypeError(
                f"got {text!r}, need an integer from {least} to {2**31 - 1}"
            )
        return int(text)

    return convert


def _time(text: str) -> int:
    try:
        return parse_time_ns(text)
    except InputError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
