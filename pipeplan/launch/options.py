"""Flags of `launch`. No torch, no files."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Literal, NoReturn, TypeVar

from pipeplan.errors import InputError
from pipeplan.flags import FlagParser
from pipeplan.units import parse_factor, parse_wait_ns
from pipeplan.validation import BestRule

_Value = TypeVar("_Value")

_EXAMPLES = """\
examples:
  torchrun --nproc-per-node 4 -m pipeplan.launch --plan plan.json --steps 100 --out run
  python -m pipeplan.launch --plan plan.json --dry-run
  torchrun --nproc-per-node 4 -m pipeplan.launch --plan plan.json --resume run --steps 200
  torchrun --nproc-per-node 4 -m pipeplan.launch --plan plan.json --clock virtual --steps 10
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
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
    save_in_background: bool
    keep: int | None
    """Complete checkpoints that stay; None: all."""
    validate_every: int | None
    """Steps; None: never."""
    keep_best: BestRule | None
    tensorboard: bool
    timeout_ns: int
    dry_run: bool
    json: bool
    """Whether stdout has a JSON object per step, or that of a dry run."""
    log_format: Literal["text", "json"]
    """`json`: stdout has one per event, and stderr no lines of steps."""
    instrument: bool
    sample: bool
    allow_nonfinite: bool
    """Whether training goes on with losses, norms and weights that are not finite."""
    clock: Literal["real", "sleep", "virtual"]
    """`real` trains; the others run the plan dry, without a model."""
    replicas: int
    """Copies of the pipeline that train together."""
    backend: Literal["nccl", "gloo", "auto"]
    """What carries messages."""
    time_scale: Fraction
    """What a sleeping dry run multiplies planned times by."""
    words: tuple[str, ...]
    """What the user wrote."""


class _Parser(FlagParser):
    """Usage errors become an InputError, so that only rank 0 prints them."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"launch: {message}. See python -m pipeplan.launch --help.")


def parser() -> argparse.ArgumentParser:
    """All flags of the launcher."""
    made = _Parser(
        prog="torchrun --nproc-per-node P -m pipeplan.launch",
        usage="%(prog)s --plan FILE [options]",
        description="Train a task as a plan says, one rank per GPU of the plan.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = made.add_argument
    add("--plan", type=_path, required=True, metavar="FILE", help="plan.json")
    add("--task", metavar="REF", help="task reference, if not the one the chain was profiled from")
    add("--steps", type=_count(1), default=100, help="optimizer steps in total (default 100)")
    add(
        "--replicas",
        type=_count(1),
        metavar="D",
        help="pipelines side by side, gradients averaged",
    )
    add(
        "--backend",
        choices=("auto", "nccl", "gloo"),
        help="what carries messages: nccl needs the model on cuda and a GPU for each rank,"
        " under gloo ranks may share a GPU (default auto: nccl where it can)",
    )
    add("--seed", type=_count(0), help="of weights and dropout (default 0)")
    add("--out", type=_path, metavar="DIR", help="metrics, results and checkpoints; must be empty")
    add("--resume", type=_path, metavar="DIR", help="go on from DIR's newest checkpoint")
    add("--save-every", type=_count(1), metavar="STEPS", help="also save in between")
    add(
        "--keep",
        type=_count(1),
        metavar="N",
        help="remove all but the newest N complete checkpoints (default: keep all)",
    )
    add("--save-in-background", action="store_true", help="train on while a checkpoint is written")
    add(
        "--validate-every",
        type=_count(1),
        metavar="STEPS",
        help="evaluate the task's validation data after every STEPS steps, and at the end",
    )
    add(
        "--keep-best",
        type=_best,
        metavar="METRIC",
        help="also save after each validation with the lowest METRIC so far (METRIC:max: highest;"
        " loss or one of the task's); --keep does not remove it, best.pt has its weights",
    )
    add("--tensorboard", action="store_true", help="scalars for TensorBoard, in DIR/tensorboard")
    add("--timeout", type=_time, default="600s", help="longest wait for a peer (default 600s)")
    add(
        "--dry-run",
        action="store_true",
        help="check everything (the task where --task names it), print the table of ranks as text,"
        " stop",
    )
    add("--json", action="store_true", help="one JSON object per step on stdout")
    add(
        "--log-format",
        choices=("text", "json"),
        help="text: lines on stderr; json: one JSON object a line on stdout for the start, each"
        " step, validation and checkpoint, and the end (default text)",
    )
    add(
        "--allow-nonfinite",
        action="store_true",
        help="train on where a loss, a norm or a weight is not finite, and save such weights",
    )
    add("--instrument", action="store_true", help="count live bytes (slow: do not time this run)")
    add(
        "--no-sample",
        action="store_true",
        help="count the bytes of no step: else those of the second and of one in 1000 (2bw: the"
        " fourth), which go to memory.json",
    )
    add(
        "--clock",
        choices=("real", "sleep", "virtual"),
        default="real",
        help="run dry, without a model: ops sleep their planned time, or pass it at once",
    )
    add("--time-scale", type=_factor, metavar="X", help="with --clock sleep: all times X-fold")
    return made


def parse(argv: Sequence[str] | None) -> LaunchOptions:
    """The options in `argv`.

    Raises:
        InputError: if a flag is unknown or its value makes no sense.
    """
    words = tuple(sys.argv[1:] if argv is None else argv)
    given = parser().parse_args(words)
    _check_clock(given)
    _check_kept(given)
    return LaunchOptions(
        plan=given.plan,
        task=given.task,
        steps=given.steps,
        replicas=given.replicas or 1,
        backend=given.backend or "auto",
        seed=given.seed,
        out=given.out or given.resume,
        resume=given.resume,
        save_every=given.save_every,
        save_in_background=given.save_in_background,
        keep=given.keep,
        validate_every=given.validate_every,
        keep_best=given.keep_best,
        tensorboard=given.tensorboard,
        timeout_ns=given.timeout,
        dry_run=given.dry_run,
        json=given.json,
        log_format=given.log_format or "text",
        instrument=given.instrument,
        sample=not given.no_sample,
        allow_nonfinite=given.allow_nonfinite,
        clock=given.clock,
        time_scale=given.time_scale or Fraction(1),
        words=words,
    )


def _check_clock(given: argparse.Namespace) -> None:
    """A dry run has nothing to load, save or count; scaled times are for sleeping."""
    if given.time_scale is not None and given.clock != "sleep":
        raise InputError("launch: got --time-scale, need --clock sleep with it")
    if given.clock == "real":
        return
    for name in (
        "task",
        "replicas",
        "backend",
        "seed",
        "resume",
        "save_every",
        "save_in_background",
        "keep",
        "instrument",
        "allow_nonfinite",
        "log_format",
        "validate_every",
        "keep_best",
        "tensorboard",
    ):
        if getattr(given, name) not in (None, False):
            raise InputError(
                f"launch: got --{name.replace('_', '-')} with --clock {given.clock}, which has no"
                " model. Leave it out, or train with --clock real."
            )


def _check_kept(given: argparse.Namespace) -> None:
    """What says how to save, or what to count, needs a place to keep it in."""
    kept = ("save_every", "save_in_background", "keep", "keep_best", "tensorboard", "instrument")
    for name in kept:
        if getattr(given, name) and given.out is None and given.resume is None:
            raise InputError(
                f"launch: got --{name.replace('_', '-')} without --out, need a directory to keep"
                " its results in"
            )
    if given.save_in_background and given.save_every is None:
        raise InputError(
            "launch: got --save-in-background without --save-every, need it too: the checkpoint"
            " at the end is waited for"
        )
    if given.keep_best and given.validate_every is None:
        raise InputError(
            "launch: got --keep-best without --validate-every, need it too: validations say which"
            " checkpoint is the best"
        )
    _check_log(given)


def _check_log(given: argparse.Namespace) -> None:
    """One form of the log."""
    if given.json and given.log_format:
        raise InputError(
            "launch: got --json with --log-format, need one of them: --json prints steps alone,"
            " --log-format json all events"
        )


def _path(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("got '', need a name. Leave the flag out.")
    return Path(text)


def _count(least: int) -> Callable[[str], int]:
    def convert(text: str) -> int:
        if not text.isascii() or not text.isdigit() or not least <= int(text[:20]) < 2**31:
            raise argparse.ArgumentTypeError(
                f"got {text!r}, need an integer from {least} to {2**31 - 1}"
            )
        return int(text)

    return convert


def _factor(text: str) -> Fraction:
    try:
        return parse_factor(text)
    except InputError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _best(text: str) -> BestRule:
    try:
        return BestRule.parse(text)
    except InputError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _time(text: str) -> int:
    try:
        return parse_wait_ns(text)
    except InputError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
