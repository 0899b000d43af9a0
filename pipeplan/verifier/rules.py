"""All rules of docs/reference/model.md, section 6, and which of them can be judged."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pipeplan.errors import InputError, InvalidPlanError
from pipeplan.plan import MemoryRow, Plan
from pipeplan.units import MAX_INT
from pipeplan.verifier import claims, durations, memory, offload, schedule, step, structure
from pipeplan.verifier.ledger import Terms
from pipeplan.verifier.recompute import without_runs
from pipeplan.verifier.timetable import Timetable
from pipeplan.verifier.violation import Rule, Violation

SHOWN = 20
"""Violations listed in the text of an error; the exception carries all of them."""

_TIMELESS = (Rule.PRECEDENCE, Rule.GPU)
"""Where these are broken, ops of a GPU overlap or run backwards: its bytes mean nothing."""


@dataclass(frozen=True, slots=True)
class Audit:
    """What the model says of a plan's schedule, whatever the plan itself claims."""

    memory: tuple[MemoryRow, ...]
    """One row per GPU: the terms after the first event that reaches its peak, in bytes."""
    in_flight: tuple[int, ...]
    """Per stage, the most micro-batches between start of F and end of B (or I)."""
    least_microbatches: int
    """(R6): of one step; 1 under flush."""
    step_ns: int


def verify(plan: Plan) -> tuple[Violation, ...]:
    """Every broken rule of `plan`, or nothing.

    Rules build on each other: without sound stages and ops there is no schedule to judge, and
    without order on each GPU no memory. Then the dependent rules are left out. Never raises.

    Args:
        plan: any plan that parses.

    Returns:
        The violations in the order of `Rule`.
    """
    found = list(structure.stages(plan))
    sound = not found
    if sound:
        found += [*structure.ops(plan), *structure.tied(plan)]
        if not any(violation.rule is Rule.OPS for violation in found):
            found += _judge_schedule(Timetable(without_runs(plan)))
    return (*found, *claims.bounds(plan, has_sound_stages=sound), *claims.digests(plan))


def _judge_schedule(table: Timetable) -> Iterator[Violation]:
    found = [
        *durations.durations(table),
        *schedule.shifts(table),
        *schedule.precedence(table),
        *schedule.gpu(table),
        *schedule.links(table),
        *schedule.fifo(table),
    ]
    yield from found
    if not any(violation.rule in _TIMELESS for violation in found):
        yield from step.weight_versions(table)
        yield from memory.judge_memory(table)
    yield from step.step(table)


def check(plan: Plan, where: str = "plan") -> None:
    """Does nothing if `plan` keeps every rule.

    Args:
        plan: any.
        where: names it in the error, such as its path.

    Raises:
        InvalidPlanError: if it does not; `violations` holds all of them.
    """
    found = verify(plan)
    if not found:
        return
    lines = [f"- {violation}" for violation in found[:SHOWN]]
    if len(found) > SHOWN:
        lines.append(f"- and {len(found) - SHOWN} more")
    names = ", ".join(dict.fromkeys(violation.rule for violation in found))
    text = "\n".join(lines)
    raise InvalidPlanError(f"{where}: breaks {names}, need every rule kept:\n{text}", found)


def audit(plan: Plan) -> Audit:
    """Memory, in-flight counts and step time of `plan`, computed from its schedule alone.

    The plan's own memory table, step, solver fields and digests are not looked at: the planner
    fills them from this.

    Args:
        plan: a plan with sound stages and ops.

    Raises:
        InvalidPlanError: if stages or ops are not sound.
        InputError: if sizes add up to more than a plan file can hold.
    """
    found = list(structure.stages(plan)) or list(structure.ops(plan))
    if found:
        lines = "\n".join(f"- {violation}" for violation in found[:SHOWN])
        raise InvalidPlanError(f"plan: stages and ops are not sound:\n{lines}", found)
    table = Timetable(without_runs(plan))
    sizes = zip(memory.peaks(table), offload.host_bytes(table), strict=True)
    rows = tuple(_row(plan, gpu, *both) for gpu, both in enumerate(sizes))
    return Audit(
        memory=rows,
        in_flight=step.in_flight(table),
        least_microbatches=max(step.least_microbatches(table)),
        step_ns=step.step_ns(table),
    )


def _row(plan: Plan, gpu: int, terms: Terms, away: int) -> MemoryRow:
    if max(terms.total, away) > MAX_INT or min(*terms, away) < 0:
        raise InputError(
            f"GPU {gpu}: got a peak of {terms.total} bytes ({terms}) and {away} in the host,"
            f" need 0 to {MAX_INT}. Check the sizes in the chain and the order of the ops."
        )
    return MemoryRow(
        gpu=gpu,
        **{f"{name}_bytes": value for name, value in terms._asdict().items()},
        peak_bytes=terms.total,
        budget_bytes=memory.usable(plan, gpu),
        host_bytes=away,
    )
