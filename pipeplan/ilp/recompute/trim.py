"""Removal of unneeded recomputation: segments that memory can hold are stored, one by one.

Of a segment that must run again, what it holds is stored while it does, where that fits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from pipeplan.ilp.cycle_ratio import minimize_period_for_order
from pipeplan.ilp.incumbent import Incumbent
from pipeplan.ilp.recompute.contracted_chain import contract
from pipeplan.ilp.recompute.joint_incumbent import JointIncumbent
from pipeplan.ilp.recompute.search_result import SearchResult
from pipeplan.ilp.runs import Run, Runs
from pipeplan.plan import Stage

BEYOND_S: Final = 1.0
"""Seconds that this may take when time is over."""


def trim(joint: JointIncumbent) -> None:
    """Keep each run of the best plan, the longest first, where the plan then fits as well.

    Orders stay, times are made anew: without a run's second forward nothing comes later. Where
    there are many runs, or many micro-batches per period, that ends soon after the limit; where
    work is counted instead of time, all are tried.
    """
    chain = joint.best.contracted
    if chain is None or joint.best.state.best is None:
        return
    layers = chain.source.layers

    def longest(run: Run) -> tuple[int, Run]:
        if run.option is not None:
            layer, option = layers[run.first], layers[run.first].options[run.option]
            own = layer.forward_ns + layer.backward_ns
            return own - option.forward_ns - option.backward_ns, run
        return -sum(layer.forward_ns for layer in layers[run.first : run.last + 1]), run

    limits = joint.state.options
    end = max(joint.state.elapsed, limits.time_limit_s) + BEYOND_S
    for run in sorted(chain.runs, key=longest):
        if not limits.deterministic and joint.state.elapsed > end:
            return
        for instead in ((), (run._replace(inner=()),)) if run.inner else ((),):
            tried = _with(joint, run, instead)
            if tried.cost <= joint.best.cost:
                joint.take(tried, equal=True)
                break


def _with(joint: JointIncumbent, run: Run, instead: Runs) -> SearchResult:
    """The best plan with others in place of a run; without a plan where that does not fit."""
    best, whole = joint.best, joint.state
    assert best.contracted is not None
    assert best.state.best is not None
    runs = {*best.contracted.runs, *instead} - {run}
    chain = contract(best.contracted.source, sorted(runs))
    costs, schedule = chain.of(whole.costs), best.state.best
    placed = chain.renumbered((stage.first, stage.last, stage.gpu) for stage in best.stages)
    stages = tuple(
        Stage(id=number, layers=(first, last), gpu=gpu)
        for number, (first, last, gpu) in enumerate(placed)
    )
    lowest = whole.lowest_period(schedule.k)
    inner = Incumbent(costs, whole.options, joint.on_report)
    inner.phase = best.state.phase
    inner.offer(
        minimize_period_for_order(costs, replace(schedule, stages=stages, offloads=()), lowest)
    )
    return SearchResult(inner, chain)
