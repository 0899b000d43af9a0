"""`pipeplan plan` for several micro-batch sizes: a table of all, and the plan that is written."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pipeplan.cli import common
from pipeplan.errors import InfeasibleError, InputError, TimeLimitError
from pipeplan.units import format_bytes, format_ns

if TYPE_CHECKING:
    from pipeplan.microbatch_sizes import SizedPlan
    from pipeplan.plan import Plan


def check(args: argparse.Namespace, machines: int) -> None:
    """Raise InputError where what several chains or `--batch` mean is not defined."""
    if machines > 1 and (len(args.chains) > 1 or args.batch):
        given = "--batch" if args.batch else f"{len(args.chains)} chains"
        raise InputError(
            f"plan: got {given} and {machines} machines, need one machine. Plan for each machine"
            " by itself."
        )
    for flag in ("refine", "resume"):
        if getattr(args, flag) and len(args.chains) > 1:
            raise InputError(
                f"plan: got --{flag} and {len(args.chains)} chains, need one chain: what"
                f" --{flag} names is of one micro-batch size"
            )


def best(sized: Sequence[SizedPlan]) -> Plan:
    """The plan with the most samples per second.

    Raises:
        InfeasibleError: if it is proven that no size has a plan.
        TimeLimitError: if none was found.
    """
    if sized[0].plan is not None:
        return sized[0].plan
    errors = [each.error for each in sized if each.error]
    if len(errors) == 1:
        raise errors[0]
    proven = all(isinstance(error, InfeasibleError) for error in errors)
    raise (InfeasibleError if proven else TimeLimitError)("\n".join(_reasons(sized)))


def figures(sized: Sequence[SizedPlan]) -> list[dict[str, object]]:
    """One row per size, the best first, for JSON."""
    from pipeplan.cli import show

    return [
        {"microbatch_size": each.chain.microbatch_size}
        | ({"reason": str(each.error)} if each.plan is None else show.figures(each.plan))
        for each in sized
    ]


def present(sized: Sequence[SizedPlan]) -> None:
    """One line per size, the best first; then why others have no plan."""
    from rich.table import Table

    table = Table(title="micro-batch sizes", title_justify="left")
    for name in ("size", "micro-batches", "samples/s", "per micro-batch", "gap", "largest peak"):
        table.add_column(name, justify="right")
    for each in sized:
        table.add_row(str(each.chain.microbatch_size), *_cells(each.plan))
    common.screen().print(table)
    for line in _reasons(sized):
        print(line)


def _cells(plan: Plan | None) -> Iterator[str]:
    from pipeplan.report.tables import samples_per_second

    if plan is None:
        yield from ("-", "none", "-", "-", "-")
        return
    gap = plan.solver.gap
    yield str(plan.microbatches)
    yield f"{samples_per_second(plan):,.4g}"
    yield format_ns(plan.period_per_microbatch)
    yield "-" if gap is None else f"{gap:.2%}"
    yield format_bytes(max(row.peak_bytes for row in plan.memory))


def _reasons(sized: Sequence[SizedPlan]) -> list[str]:
    return [
        f"micro-batches of {each.chain.microbatch_size}: {each.error}"
        for each in sized
        if each.error
    ]
