"""`pipeplan remat TASK --offload states`: a step whose states wait on the host."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from pipeplan.cli import common, flags, output

if TYPE_CHECKING:
    from pipeplan.remat.states import StatePlan

SECONDS = 60
_FLAGS = ("host_memory", "host_update", "max_layers")
"""Flags that mean nothing without `--offload`."""
_OTHERS = ("slots", "curve", "curve_picture", "picture")
"""Flags that mean nothing with it."""


def add(verb: argparse.ArgumentParser) -> None:
    """Its flags."""
    group = verb.add_argument_group("one device and its host (FILE is a task)")
    group.add_argument(
        "--offload",
        choices=("states",),
        help="parameters, gradients, optimizer states, activations wait on the host",
    )
    group.add_argument(
        "--host-memory", type=common.size, metavar="SIZE", help="bytes of the host; needed"
    )
    group.add_argument(
        "--host-update",
        type=common.bandwidth,
        metavar="RATE",
        help="bytes of parameters that the host updates a second (measured here)",
    )
    group.add_argument(
        "--max-layers", type=common.count(), metavar="N", help="merge layers into N blocks"
    )


def check_absent(args: argparse.Namespace) -> None:
    """Refuse its flags where states do not move.

    Raises:
        InputError: names the flag.
    """
    flags.refuse(args, _FLAGS, "got no --offload states, need it too.")


def run(args: argparse.Namespace) -> int:
    """Measure the task, plan its step, write the plan."""
    from pipeplan.offmate import MachineLimits, measure_task
    from pipeplan.remat.states import plan_states
    from pipeplan.remat.states.plan_file import StatePlanFile
    from pipeplan.task import load

    _check(args)
    seconds = float(SECONDS) if args.time_limit is None else args.time_limit / 1e9
    rate = None if args.host_update is None else args.host_update.bytes_per_s
    limits = MachineLimits(
        args.budget,
        args.host_memory,
        args.host_bandwidth.bytes_per_s,
        host_update=rate,
        duplex=args.host_duplex != "half",
    )
    task = load(args.chain)
    common.say(f"measuring {args.chain}")
    found = measure_task(task, limits, args.max_layers)
    common.say(f"planning {len(found.problem.blocks)} blocks, at most {seconds:g} s")
    plan = plan_states(found.problem, seconds)
    if args.output:
        text = StatePlanFile.of(plan, args.chain, found.task_digest).to_json()
        output.write(args.output, text, args.force)
    if args.output == "-":
        return 0
    if args.json:
        common.emit(_figures(plan))
    else:
        _present(plan)
    if args.output:
        call = f"pipeplan.offmate.StateTraining.of_file(task, {args.output!r})"
        common.then(f"in Python: {call}")
    return 0


def _check(args: argparse.Namespace) -> None:
    """Refuse what means nothing here, and what is missing.

    Raises:
        InputError: names the flag.
    """
    from pipeplan.errors import InputError

    flags.refuse(args, _OTHERS, "got it with --offload states. Leave it out.")
    if args.method != "auto":
        raise InputError(
            f"--method: got {args.method} with --offload states, need auto: O-ILP. Leave it out."
        )
    for flag in ("host-bandwidth", "host-memory"):
        if getattr(args, flag.replace("-", "_")) is None:
            raise InputError(f"--{flag}: got none, need it with --offload states.")
    if args.host_bandwidth.bytes_per_s is None:
        raise InputError("--host-bandwidth: got inf, need a rate such as 12GB/s.")


def _figures(plan: StatePlan) -> dict[str, object]:
    problem, outcome = plan.problem, plan.outcome
    return {
        "step_ns": outcome.makespan_ns,
        "without_limits_ns": problem.compute_ns,
        "bound_ns": int(plan.relaxation.bound_ns),
        "peak_bytes": outcome.peak_bytes,
        "budget_bytes": problem.machine.device_bytes,
        "host_bytes": plan.host_bytes,
        "host_peak_bytes": outcome.host_peak_bytes,
        "host_limit_bytes": problem.machine.host_bytes,
        "updated_on_host_bytes": _updated_on_host(plan),
        "options": list(plan.option_names),
    }


def _present(plan: StatePlan) -> None:
    from pipeplan.units import format_bytes, format_ns

    problem, outcome, machine = plan.problem, plan.outcome, plan.problem.machine
    bound, gap = int(plan.relaxation.bound_ns), plan.gap
    # Nothing to compute: a share of it says nothing.
    share = f"{outcome.makespan_ns / problem.compute_ns:.1%}" if problem.compute_ns else "?"
    print(
        f"step {format_ns(outcome.makespan_ns)}, {share} of one without limits"
        f" ({format_ns(problem.compute_ns)}, updates on the device);"
        f" bound {format_ns(bound)}, gap {'?' if gap is None else f'{gap:.1%}'}"
    )
    print(
        f"device peak {format_bytes(outcome.peak_bytes)} of {format_bytes(machine.device_bytes)};"
        f" host {format_bytes(plan.host_bytes)} of {format_bytes(machine.host_bytes)}"
    )
    names = plan.option_names
    counts = ", ".join(f"{names.count(name)} {name}" for name in dict.fromkeys(names))
    updated = format_bytes(_updated_on_host(plan))
    trained = format_bytes(sum(each.trained_bytes for each in problem.groups))
    print(f"blocks: {counts}; the host updates {updated} of {trained} of parameters")


def _updated_on_host(plan: StatePlan) -> int:
    return sum(each.trained_bytes for each in plan.problem.groups if each.on_host)
