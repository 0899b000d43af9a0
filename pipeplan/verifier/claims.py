"""What a plan says about itself beside its schedule: rules `bounds` and `digests`."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from math import isclose

from pipeplan.plan import Plan
from pipeplan.verifier.violation import Rule, Violation

GAP_TOLERANCE = 1e-9


def bounds(plan: Plan, *, has_sound_stages: bool) -> Iterator[Violation]:
    """No bound exceeds what it bounds; gap and status follow from the bound `gap_bound` names.

    What is proven is proven for plans with these pins and at most so many micro-batches per step,
    so it says nothing of a plan that breaks one or has more.
    """
    yield from _pins(plan, has_sound_stages)
    most = plan.solver.most_microbatches
    if most is not None and plan.microbatches > most:
        yield Violation(
            Rule.BOUNDS,
            "solver.most_microbatches",
            f"got {most}, need at least {plan.microbatches}, the plan's micro-batches per step:"
            " its bounds say nothing of it",
        )
    known = _known(plan)
    period = plan.period_per_microbatch
    holds = {"any": True, "k1": plan.k == 1, "contiguous": is_contiguous(plan)}
    for name, bound in known.items():
        if holds[name] and bound > period:
            yield Violation(
                Rule.BOUNDS,
                f"solver.bounds.{name}",
                f"got {bound} ns per micro-batch, need at most {period} ns, what the plan takes",
            )
    name = plan.solver.gap_bound
    if holds[name]:
        yield from _gap(plan, known.get(name), period)
    else:
        plans = "one micro-batch per period" if name == "k1" else "one stage per GPU"
        yield Violation(
            Rule.BOUNDS,
            "solver.gap_bound",
            f"got {name!r}, which is proven for plans with {plans}, need one that holds for this",
        )


def _pins(plan: Plan, has_sound_stages: bool) -> Iterator[Violation]:
    """Each pin names one layer and one GPU that exist, and the plan keeps it."""
    layers, gpus = len(plan.chain.layers), len(plan.cluster.gpus)
    homes = {layer: s.gpu for s in plan.stages for layer in range(s.first, s.last + 1)}
    seen: set[int] = set()
    for index, (layer, gpu) in enumerate(plan.solver.pins):
        fault = None
        if layer >= layers:
            fault = f"got layer {layer}, need one below {layers}"
        elif gpu >= gpus:
            fault = f"got GPU {gpu}, need one below {gpus}"
        elif layer in seen:
            fault = f"got layer {layer} again, need each layer once"
        elif has_sound_stages and homes[layer] != gpu:
            fault = f"got layer {layer} on GPU {homes[layer]}, need it on GPU {gpu}"
        if fault:
            yield Violation(Rule.BOUNDS, f"solver.pins[{index}]", fault)
        seen.add(layer)


def _known(plan: Plan) -> dict[str, Fraction]:
    given = plan.solver.bounds
    named = {"any": given.any, "k1": given.k1, "contiguous": given.contiguous}
    return {name: Fraction(*value) for name, value in named.items() if value is not None}


def _gap(plan: Plan, bound: Fraction | None, period: Fraction) -> Iterator[Violation]:
    gap, name = plan.solver.gap, plan.solver.gap_bound
    if not bound:
        if gap is not None:
            yield Violation(
                Rule.BOUNDS, "solver.gap", f"got {gap}, need null: no positive bound {name!r}"
            )
    else:
        need = float((period - bound) / bound)
        if gap is None or not isclose(gap, need, rel_tol=GAP_TOLERANCE, abs_tol=GAP_TOLERANCE):
            yield Violation(
                Rule.BOUNDS,
                "solver.gap",
                f"got {gap}, need {need}: bound {name!r} is {bound} ns per micro-batch,"
                f" the plan takes {period} ns",
            )
    need_status = "optimal" if bound == period else "feasible"
    if plan.solver.status != need_status:
        yield Violation(
            Rule.BOUNDS,
            "solver.status",
            f"got {plan.solver.status!r}, need {need_status!r}: the plan takes {period} ns per"
            f" micro-batch, bound {name!r} is {'unknown' if bound is None else f'{bound} ns'}",
        )


def is_contiguous(plan: Plan) -> bool:
    """Whether no GPU hosts two stages."""
    used = [stage.gpu for stage in plan.stages]
    return len(used) == len(set(used))


def digests(plan: Plan) -> Iterator[Violation]:
    """`chain_digest` is the embedded chain's; `task_digest` is the chain's."""
    need = plan.chain.digest()
    if plan.chain_digest != need:
        got = plan.chain_digest[:80]
        yield Violation(Rule.DIGESTS, "chain_digest", f"got {got!r}, need {need!r}")
    if plan.task_digest != plan.chain.task_digest:
        yield Violation(
            Rule.DIGESTS,
            "task_digest",
            f"got {plan.task_digest!r:.80}, need {plan.chain.task_digest!r:.80}, the chain's",
        )
