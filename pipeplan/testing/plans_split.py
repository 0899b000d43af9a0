"""Random valid plans whose backwards are split, of a period or of a whole step (T6).

Draws of their own: what `plans.random_plan` gives for a seed stays what it was.
"""

from __future__ import annotations

from random import Random

from pipeplan.chain import Chain, Layer
from pipeplan.plan import OpKind, Plan, Stage
from pipeplan.testing.plans import (
    budgeted,
    random_chain,
    random_cluster,
    random_stages,
    recomputing,
    scheduled,
)
from pipeplan.testing.plans_offload import fit_host, offloading
from pipeplan.testing.plans_times import Times, ops_lengths, resource_of, timed_ops
from pipeplan.verifier.structure import chain_order


def random_split_plan(
    seed: int,
    *,
    step: bool | None = None,
    microbatches: int | None = None,
    offload: bool | None = None,
) -> Plan:
    """A valid plan in which some stages have I and W; what is not given is drawn.

    Args:
        seed: same seed, same plan.
        step: whether it is a step plan; else its period holds up to three micro-batches.
        microbatches: of a step plan.
        offload: whether stages offload.
    """
    rng = Random(f"{seed} split")
    chain = weighed(rng, random_chain(rng, rng.randint(2, 7)))
    cluster = random_cluster(rng, rng.randint(1, 4), rng.choice(["full", "half"]))
    stages = random_stages(rng, len(chain.layers), len(cluster.gpus))
    if rng.random() < 0.4:
        stages = tuple(recomputing(rng, stage) for stage in stages)
    stages = tuple(splitting(rng, chain, stage) for stage in stages)
    whole = rng.random() < 0.6 if step is None else step
    plan = scheduled(rng, chain, cluster, stages, 1 if whole else rng.randint(1, 3))
    plan = plan.model_copy(update={"semantics": "flush", "microbatches": rng.randint(1, 6)})
    if whole:
        plan = step_plan(rng, plan, microbatches or plan.microbatches)
    drawn = rng.random() < 0.2
    if drawn if offload is None else offload:
        plan = offloading(rng, plan)
    return fit_host(rng, budgeted(rng, plan))


def weighed(rng: Random, chain: Chain) -> Chain:
    """`chain` whose layers tell what the gradients of their weights take, but for one in ten."""
    layers = []
    for index, layer in enumerate(chain.layers):
        size = chain.input_of(index)
        gradients = chain.gradient_of_input(index) + layer.gradient_of_output_bytes
        kept = rng.randint(0, 9)
        weight = rng.choice([0, layer.backward_ns, layer.backward_ns // 2])
        longer = layer.backward_ns - weight + rng.randint(0, 4)
        fields = {
            "backward_weight_ns": weight,
            "backward_input_ns": rng.choice([None, longer]),
            "forward_split_ns": rng.choice([None, layer.forward_ns + rng.randint(0, 4)]),
            "saved_for_weight_bytes": kept,
            "saved_input_for_weight_bytes": rng.choice([0, min(kept, size)]),
            "input_backward_workspace_bytes": rng.randint(-gradients, 6),
            "weight_backward_workspace_bytes": rng.choice([0, 0, rng.randint(1, 9)]),
        }
        known = rng.random() < 0.9
        layers.append(layer.model_copy(update=fields) if known else layer)
    return Chain.model_validate({**dict(chain), "layers": tuple(layers)})


def splitting(rng: Random, chain: Chain, stage: Stage) -> Stage:
    """`stage` with a split backward, more often than not where it can have one."""
    layers = chain.layers[stage.first : stage.last + 1]
    can = stage.first > 0 and all(_tells(layer) for layer in layers)
    return stage.model_copy(update={"split_backward": can and rng.random() < 0.75})


def _tells(layer: Layer) -> bool:
    return layer.backward_weight_ns is not None and layer.saved_for_weight_bytes is not None


def step_plan(rng: Random, plan: Plan, microbatches: int) -> Plan:
    """A plan of the same stages for a whole step: at each turn any op that may follow is next."""
    lengths = ops_lengths(plan)
    before = _before(plan)
    plan = plan.model_copy(update={"k": microbatches, "microbatches": microbatches})
    free: dict[object, int] = {}
    times: Times = {}
    idle = rng.choice([0, 0, 1, 3])
    done = dict.fromkeys(lengths, 0)
    eager = rng.random() < 0.7

    def follows(kind: OpKind, stage: int) -> bool:
        needed = before.get((kind, stage))
        return done[kind, stage] < (microbatches if needed is None else done[needed])

    def earliest(kind: OpKind, stage: int) -> int:
        copy, needed = done[kind, stage], before.get((kind, stage))
        ready = 0 if needed is None else times[*needed, copy] + lengths[needed]
        return max(ready, free.get(resource_of(plan, kind, stage), 0))

    while ready := [op for op in lengths if follows(*op)]:
        op = min(ready, key=lambda op: earliest(*op)) if eager else rng.choice(ready)
        start = earliest(*op) + (rng.randint(0, idle) if times else 0)
        times[*op, done[op]] = start
        free[resource_of(plan, *op)] = start + lengths[op]
        done[op] += 1
    end = max(start + lengths[kind, stage] for (kind, stage, _), start in times.items())
    plan = plan.model_copy(update={"period_ns": max(1, end)})
    ops = timed_ops(rng, plan, lengths, times)
    if any(op.shift for op in ops):  # without length, at the end of the step: it may last longer
        plan = plan.model_copy(update={"period_ns": plan.period_ns + 1})
        ops = timed_ops(rng, plan, lengths, times)
    return plan.model_copy(update={"ops": ops})


def _before(plan: Plan) -> dict[tuple[OpKind, int], tuple[OpKind, int]]:
    """What each op of a micro-batch follows; the first one follows nothing."""
    order = chain_order(plan)
    found = dict(zip(order[1:], order, strict=False))
    for stage in plan.stages:
        if stage.split_backward:
            found[OpKind.W, stage.id] = OpKind.I, stage.id
    return found
