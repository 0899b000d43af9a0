"""Whether layers can be spread over the GPUs at all, and by how many bytes they miss.

An assignment model without times: each GPU must hold its states and, whenever one of its layers
runs, what one micro-batch keeps and needs there. Every plan satisfies that, because an op's own
micro-batch is always in memory; and a plan that processes one micro-batch at a time needs no more.
"""

from __future__ import annotations

from dataclasses import dataclass

from ortools.sat.python import cp_model

from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.cpsat.precedence import add_tied
from pipeplan.ilp.cpsat.solve import configured, run
from pipeplan.ilp.cpsat.variables import Instance, Linear, Variables
from pipeplan.ilp.incumbent import SearchOptions
from pipeplan.ilp.schedule import OpId, Schedule, chain_ops, duration
from pipeplan.plan import Stage

Assignment = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AssignmentResult:
    """GPU of each layer if they fit; else the bytes that every GPU surely lacks (0: unknown)."""

    home: Assignment | None
    missing: int = 0


def find_feasible_assignment(
    costs: CostModel, options: SearchOptions, seconds: float
) -> AssignmentResult:
    """Spread single layers over the GPUs, with as little memory beyond theirs as possible."""
    items = tuple((layer, layer) for layer in range(costs.layers))
    v = Variables(Instance(costs, items), 1)
    add_tied(v)
    most = sum(costs.segment(i, i).states + _need(costs, i) for i in range(costs.layers))
    extra = v.model.new_int_var(0, 2 * most, "extra")
    for gpu in v.instance.gpus:
        _limit(v, gpu, extra)
    v.model.minimize(extra)
    solver = configured(options, seconds)
    status = run(solver, v.model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return AssignmentResult(None)
    if solver.value(extra) > 0:
        return AssignmentResult(None, max(0, round(solver.best_objective_bound)))
    return AssignmentResult(
        tuple(next(p for p in v.instance.gpus if solver.boolean_value(row[p])) for row in v.on)
    )


def _need(costs: CostModel, layer: int) -> int:
    size = costs.segment(layer, layer)
    tensors = costs.tensor_bytes(layer, backward=False) + costs.tensor_bytes(layer, backward=True)
    return size.saved + size.running + max(0, size.backward) + size.update + 2 * tensors


def _limit(v: Variables, gpu: int, extra: cp_model.IntVar) -> None:
    """States, boundaries, kept bytes of the layers before, and the running layer's own."""
    costs = v.instance.costs
    late = any(layer.waiting_gradient_bytes for layer in costs.chain.layers)
    fixed: list[Linear] = []
    kept: list[Linear] = []
    for layer in range(costs.layers):
        here = v.on[layer][gpu]
        size = costs.segment(layer, layer, True)
        fixed.append(size.states * here)
        if not costs.exact and layer + 1 < costs.layers:
            slots = 2 * costs.tensor_bytes(layer, backward=False)
            cut = v.cut(layer)
            fixed += [slots * v.both(v.on[n][gpu], cut) for n in (layer, layer + 1)]
    for layer in range(costs.layers):
        here = v.on[layer][gpu]
        size, alone = costs.segment(layer, layer, True), costs.segment(layer, layer)
        uncovered = v.both(here, v.cut(layer - 1)) if layer else here
        # Only behind a cut the layer surely begins a stage, and an update is beside what is kept
        # before it; what a late one needs is known there too (M7).
        update = size.optimizer if costs.semantics == "2bw" and not late else 0
        own = max(size.forward, size.saved + size.backward)
        more = max(alone.running, alone.saved + alone.backward, update) - own
        limit = costs.budgets[gpu] + extra
        v.require(sum(kept) + own + more * uncovered <= limit - sum(fixed), here)
        v.require(sum(fixed) + size.update <= limit, here)
        kept += [size.saved * here, (alone.saved - size.saved) * uncovered]


def serial_schedule(costs: CostModel, home: Assignment) -> Schedule:
    """One micro-batch at a time, every layer a stage of its own, nothing waits."""
    stages = tuple(
        Stage(id=layer, layers=(layer, layer), gpu=gpu) for layer, gpu in enumerate(home)
    )
    clock = 0
    times: dict[OpId, tuple[int, ...]] = {}
    for op in chain_ops(stages):
        times[op] = (clock,)
        clock += duration(costs, stages, op)
    return Schedule(stages, max(1, clock), 1, times)
