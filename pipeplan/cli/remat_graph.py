"""`pipeplan remat` of a graph of operators: what runs again so that one device's budget holds."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from pipeplan.cli import common, flags, output, progress, remat_curve

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeplan.operator_graph import OperatorGraph
    from pipeplan.remat.graph import Answer, Option

METHODS = (
    "auto", "keep-all", "rotor", "rockmate", "hiremate", "join", "least-memory", "intervals",
    "checkmate", "rk-checkmate", "brute-force",
)  # fmt: skip
"""What `--method` takes for a graph; written out so that help needs no numpy."""
_IN_PYTHON = ("hiremate", "join")
"""Of these, what `rematerialize` takes by its name."""
SECONDS = 20
_FOR_CHAINS = ("host_bandwidth", "host_duplex", "slots")
"""Flags that mean nothing for a graph."""


def run(args: argparse.Namespace, graph: OperatorGraph) -> int:
    """Plan `graph` within `args.budget`."""
    _check(args)
    seconds = float(SECONDS) if args.time_limit is None else args.time_limit / 1e9
    answer = _answer(graph, args.budget, args.method, seconds)
    option = answer.option
    assert option is not None
    if args.output:
        output.write(args.output, option.program.to_text(), args.force)
    if args.picture:
        from pipeplan.report.budget import draw_program_memory

        title = f"{graph.name}: {option.method}"
        draw_program_memory(option.outcome, args.budget, title, args.picture)
    if not args.json and args.output != "-":
        _present(graph, answer, option)
        sys.stdout.flush()  # a curve takes minutes
    points = _curve(args, graph, seconds)
    if args.output == "-":
        return 0
    if args.json:
        common.emit(_figures(graph, answer, option) | ({"curve": points} if points else {}))
    else:
        _table(graph, points)
    method = args.method if args.method in _IN_PYTHON else "operators"
    call = f"pipeplan.rematerialize(module, sample, budget={args.budget}, method='{method}')"
    common.then(f"in Python: {call}")
    return 0


def _check(args: argparse.Namespace) -> None:
    """Refuse what means nothing for a graph.

    Raises:
        InputError: names the flag.
    """
    from pipeplan.errors import InputError

    why = (
        "got it with a graph of operators, whose programs only recompute; need a chain of layers."
    )
    flags.refuse(args, _FOR_CHAINS, f"{why} Leave it out.")
    if args.method not in METHODS:
        raise InputError(
            f"--method: got {args.method} with a graph of operators, need one of"
            f" {', '.join(METHODS)}."
        )


def _answer(graph: OperatorGraph, budget: int, method: str, seconds: float) -> Answer:
    """The answer with an option.

    Raises:
        InfeasibleError: if it is proven that there is none of the method's class.
        TimeLimitError: if none was found.
    """
    from pipeplan.errors import InfeasibleError, TimeLimitError
    from pipeplan.remat.graph import Budget, GraphProblem, least_peak, solve
    from pipeplan.units import format_bytes

    common.say(f"planning {len(graph.operations)} operators, at most {seconds:g} s")
    asked, heard = GraphProblem(graph), progress.timed()
    (answer,) = solve(asked, [Budget(budget)], seconds, method, say=heard).answers
    if answer.option is not None:
        return answer
    least = least_peak(graph, seconds)
    if least <= budget:
        need = f"{least} ({format_bytes(least)}) do with another one. Give --method auto."
    else:
        need = f"need at least {least} ({format_bytes(least)}), the least found. Give --budget"
        need += f" {least}, or a smaller micro-batch."
    found = "there is no program" if answer.proven else "found no program"
    kind = InfeasibleError if answer.proven else TimeLimitError
    static = format_bytes(graph.static_bytes)
    raise kind(
        f"--budget, method {method}: got {budget} bytes, {static} of them always taken, {found}"
        f" within them; {need}"
    )


def _curve(
    args: argparse.Namespace, graph: OperatorGraph, seconds: float
) -> list[remat_curve.Point]:
    """Drawn where asked for."""
    if not args.curve and not args.curve_picture:
        return []
    from pipeplan.remat.graph import CURVE, auto_of_all, graph_budgets, graph_curve

    def find(method: str, limits: Sequence[int]) -> tuple[Answer, ...]:
        return graph_curve(graph, limits, seconds, common.say, (method,))[method]

    count = args.curve or remat_curve.BUDGETS
    limits, found = remat_curve.by_method(
        CURVE, lambda: graph_budgets(graph, count, seconds), find
    )
    options = {method: [each.option for each in row] for method, row in auto_of_all(found).items()}
    times = {
        method: [None if each is None else each.outcome.makespan_ns for each in row]
        for method, row in options.items()
    }
    points = remat_curve.points(limits, times)
    remat_curve.draw(graph.name, points, args.curve_picture)
    return points


def _table(graph: OperatorGraph, points: list[remat_curve.Point]) -> None:
    """Time over budget, methods side by side."""
    if not points:
        return
    from rich.table import Table

    from pipeplan.units import format_bytes, format_ns

    methods = [name for name in points[0] if name != "budget_bytes"]
    table = Table(title="time of a micro-batch, and over that of every operation once")
    for name in ("budget", *methods):
        table.add_column(name, justify="right")

    def cell(time: int | None) -> str:
        over = (time or 0) / max(1, graph.compute_ns) - 1
        return "-" if time is None else f"{format_ns(time)} {over:+.1%}"

    for point in points:
        size = format_bytes(point["budget_bytes"] or 0)
        table.add_row(size, *(cell(point[method]) for method in methods))
    common.screen().print(table)


def _figures(graph: OperatorGraph, answer: Answer, option: Option) -> dict[str, object]:
    outcome = option.outcome
    return {
        "method": option.method,
        "budget_bytes": answer.budget.peak_bytes,
        "peak_bytes": outcome.peak_bytes,
        "static_bytes": graph.static_bytes,
        "saved_bytes": outcome.saved_bytes,
        "makespan_ns": outcome.makespan_ns,
        "compute_ns": graph.compute_ns,
        "bound_ns": answer.bound_ns,
        "proven": answer.proven,
        "steps": [
            {
                "op": str(step.instruction),
                "start_ns": step.start_ns,
                "end_ns": step.end_ns,
                "bytes": step.bytes,
            }
            for step in outcome.steps
        ],
    }


def _present(graph: OperatorGraph, answer: Answer, option: Option) -> None:
    from pipeplan.units import format_bytes, format_ns

    outcome = option.outcome
    extra = outcome.makespan_ns / graph.compute_ns - 1 if graph.compute_ns else 0.0
    gap = f"; bound {format_ns(answer.bound_ns or 0)}, gap {answer.gap or 0:.1%}"
    proven = ", proven the least" if answer.proven else gap
    print(
        f"{option.method}: {format_ns(outcome.makespan_ns)} a micro-batch, {extra:.1%} over"
        f" running every operation once{proven};"
        f" peak {format_bytes(outcome.peak_bytes)} of {format_bytes(answer.budget.peak_bytes)},"
        f" {format_bytes(graph.static_bytes)} of it always there"
    )
