"""Random small changes of a plan: most break a rule, some are neutral."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from pipeplan.chain import Layer
from pipeplan.cluster import Gpu
from pipeplan.errors import PipeplanError
from pipeplan.plan import MemoryRow, Op, Plan, Remat, Stage
from pipeplan.testing.plans import settle
from tests import mutations_host, mutations_split


def mutate(plan: Plan, rng: Random, kind: str | None = None) -> tuple[str, Plan]:
    """(name of the change, the changed plan); half of them with a memory table that fits again.

    The change is drawn, or the one called `kind`.
    """
    name, change = rng.choice([each for each in MUTATIONS if kind in (None, each[0])])
    mutant = change(plan, rng)
    mutant = mutant.model_copy(update={"chain_digest": mutant.chain.digest()})
    if name not in CLAIMS and rng.random() < 0.5:
        try:
            mutant = settle(mutant)
        except PipeplanError:
            return name, mutant
    return name, Plan.from_data(mutant.model_dump(mode="json", by_alias=True))


def _replace(plan: Plan, field: str, index: int, value: object) -> Plan:
    items = list(getattr(plan, field))
    items[index] = value
    return plan.model_copy(update={field: tuple(items)})


def _op(plan: Plan, rng: Random, change: Callable[[Op], dict[str, Any]]) -> Plan:
    index = rng.randrange(len(plan.ops))
    op = plan.ops[index]
    return _replace(plan, "ops", index, op.model_copy(update=change(op)))


def start_moved(plan: Plan, rng: Random) -> Plan:
    """One op starts a little earlier or later, in the same period or a neighbouring one."""
    by = rng.choice([-3, -2, -1, 1, 1, 2, 3, rng.randint(0, plan.period_ns)])

    def change(op: Op) -> dict[str, Any]:
        time = max(0, op.shift * plan.period_ns + op.start_ns + by)
        shift, start = divmod(time, plan.period_ns)
        return {"shift": shift, "start_ns": start}

    return _op(plan, rng, change)


def start_unfolded(plan: Plan, rng: Random) -> Plan:
    """One op starts outside the period."""
    return _op(plan, rng, lambda op: {"start_ns": op.start_ns + plan.period_ns})


def shift_changed(plan: Plan, rng: Random) -> Plan:
    """One op moves by a period."""
    by = rng.choice([-1, 1])
    return _op(plan, rng, lambda op: {"shift": max(0, op.shift + by)})


def all_shifted(plan: Plan, _: Random) -> Plan:
    """The whole plan happens a period later."""
    ops = tuple(op.model_copy(update={"shift": op.shift + 1}) for op in plan.ops)
    return plan.model_copy(update={"ops": ops})


def all_rotated(plan: Plan, rng: Random) -> Plan:
    """The whole plan happens a little later: neutral."""
    by, ops = rng.randint(1, plan.period_ns), []
    for op in plan.ops:
        carry, start = divmod(op.start_ns + by, plan.period_ns)
        ops.append(op.model_copy(update={"shift": op.shift + carry, "start_ns": start}))
    first = min(op.shift for op in ops)
    ops = [op.model_copy(update={"shift": op.shift - first}) for op in ops]
    return plan.model_copy(update={"ops": tuple(ops)})


def ops_swapped(plan: Plan, rng: Random) -> Plan:
    """Two ops exchange their times."""
    i, j = rng.randrange(len(plan.ops)), rng.randrange(len(plan.ops))
    first, second = plan.ops[i], plan.ops[j]
    times = [{"start_ns": op.start_ns, "shift": op.shift} for op in (second, first)]
    plan = _replace(plan, "ops", i, first.model_copy(update=times[0]))
    return _replace(plan, "ops", j, second.model_copy(update=times[1])) if i != j else plan


def duration_changed(plan: Plan, rng: Random) -> Plan:
    """One op lasts longer or shorter than it can."""
    by = rng.choice([-1, 1])
    return _op(plan, rng, lambda op: {"duration_ns": max(0, op.duration_ns + by)})


def place_changed(plan: Plan, rng: Random) -> Plan:
    """One op runs on another GPU, link or way to the host."""
    gpus = len(plan.cluster.gpus)

    def change(op: Op) -> dict[str, Any]:
        if op.kind.is_send:
            return {"link": (rng.randrange(gpus), rng.randrange(gpus))}
        return {"gpu": rng.randrange(gpus)}

    return _op(plan, rng, change)


def op_lost(plan: Plan, rng: Random) -> Plan:
    """One op is missing."""
    index = rng.randrange(len(plan.ops))
    return plan.model_copy(update={"ops": plan.ops[:index] + plan.ops[index + 1 :]})


def op_doubled(plan: Plan, rng: Random) -> Plan:
    """One op is there twice, perhaps instead of another copy of it."""
    op = rng.choice(plan.ops)
    extra = op.model_copy(update={"copy_": rng.randrange(plan.k)})
    return plan.model_copy(update={"ops": (*plan.ops, extra)})


def _stage(plan: Plan, rng: Random, change: Callable[[Stage], dict[str, Any]]) -> Plan:
    index = rng.randrange(len(plan.stages))
    stage = plan.stages[index]
    return _replace(plan, "stages", index, stage.model_copy(update=change(stage)))


def stage_moved(plan: Plan, rng: Random) -> Plan:
    """One stage is on another GPU, its ops too, but for what it sends to other GPUs."""
    gpu, index = rng.randrange(len(plan.cluster.gpus)), rng.randrange(len(plan.stages))
    ops = tuple(
        op.model_copy(update={"gpu": gpu}) if op.gpu is not None and op.stage == index else op
        for op in plan.ops
    )
    stage = plan.stages[index].model_copy(update={"gpu": gpu})
    return _replace(plan.model_copy(update={"ops": ops}), "stages", index, stage)


def stage_recut(plan: Plan, rng: Random) -> Plan:
    """One stage ends elsewhere."""
    last = rng.randrange(len(plan.chain.layers))
    return _stage(plan, rng, lambda stage: {"layers": (min(stage.first, last), last)})


def stage_renamed(plan: Plan, rng: Random) -> Plan:
    """One stage has another id."""
    return _stage(plan, rng, lambda stage: {"id": stage.id + 1})


def run_recomputed(plan: Plan, rng: Random) -> Plan:
    """One stage recomputes another run of layers, of its own or not, alone or with its others."""
    run, beside = _run(plan, rng), rng.random() < 0.5

    def change(stage: Stage) -> dict[str, Any]:
        held = stage.remat or Remat(recompute=(run,))
        runs = (*held.recompute, run) if beside and stage.remat else (run,)
        return {"remat": held.model_copy(update={"recompute": runs})}

    return _stage(plan, rng, change)


def program_changed(plan: Plan, rng: Random) -> Plan:
    """One stage runs another option of its own layers, or of others, if there is such a one."""
    pair = (rng.randrange(len(plan.chain.layers)), rng.randrange(2))

    def change(stage: Stage) -> dict[str, Any]:
        held = stage.remat or Remat(programs=(pair,))
        return {"remat": held.model_copy(update={"programs": (pair,)})}

    return _stage(plan, rng, change)


def run_offloaded(plan: Plan, rng: Random) -> Plan:
    """One stage offloads another run of layers, of its own or not."""
    run = _run(plan, rng)

    def change(stage: Stage) -> dict[str, Any]:
        held = stage.remat or Remat(offload=(run,))
        return {"remat": held.model_copy(update={"offload": (run,)})}

    return _stage(plan, rng, change)


def _run(plan: Plan, rng: Random) -> tuple[int, int]:
    first, last = sorted(rng.randrange(len(plan.chain.layers)) for _ in range(2))
    return first, last


def period_changed(plan: Plan, rng: Random) -> Plan:
    """The same starts in a longer or shorter period."""
    return plan.model_copy(update={"period_ns": max(1, plan.period_ns + rng.choice([-1, 1]))})


def microbatches_changed(plan: Plan, rng: Random) -> Plan:
    """Steps of another size."""
    by = rng.choice([-3, -2, -1, 1])
    return plan.model_copy(update={"microbatches": max(1, plan.microbatches + by)})


def semantics_changed(plan: Plan, _: Random) -> Plan:
    """The other mode of training."""
    return plan.model_copy(update={"semantics": "flush" if plan.semantics == "2bw" else "2bw"})


def model_changed(plan: Plan, _: Random) -> Plan:
    """The other memory model."""
    other = "paper" if plan.memory_model == "exact" else "exact"
    return plan.model_copy(update={"memory_model": other})


def duplex_changed(plan: Plan, _: Random) -> Plan:
    """Links shared by both directions, or no longer."""
    links = plan.cluster.links
    pairs = () if links.duplex == "full" else links.pairs
    other = "half" if links.duplex == "full" else "full"
    links = links.model_copy(update={"duplex": other, "pairs": pairs})
    return plan.model_copy(update={"cluster": plan.cluster.model_copy(update={"links": links})})


def _gpu(plan: Plan, rng: Random, change: Callable[[Gpu], dict[str, Any]]) -> Plan:
    gpus = list(plan.cluster.gpus)
    index = rng.randrange(len(gpus))
    gpus[index] = gpus[index].model_copy(update=change(gpus[index]))
    return plan.model_copy(
        update={"cluster": plan.cluster.model_copy(update={"gpus": tuple(gpus)})}
    )


def memory_lowered(plan: Plan, rng: Random) -> Plan:
    """A GPU with one byte less than its plan needs, and a table that says so."""
    gpu = rng.randrange(len(plan.memory))
    budget = max(0, plan.memory[gpu].peak_bytes - 1)
    gpus = list(plan.cluster.gpus)
    gpus[gpu] = gpus[gpu].model_copy(update={"memory_bytes": budget})
    cluster = plan.cluster.model_copy(update={"gpus": tuple(gpus)})
    row = plan.memory[gpu].model_copy(update={"budget_bytes": budget})
    return _replace(plan.model_copy(update={"cluster": cluster}), "memory", gpu, row)


def speed_changed(plan: Plan, rng: Random) -> Plan:
    """A GPU of another speed."""
    return _gpu(plan, rng, lambda _: {"speed": rng.choice([0.5, 0.9, 1.0, 2.0])})


def layer_changed(plan: Plan, rng: Random) -> Plan:
    """A layer that needs more of something."""
    fields = [
        name
        for name, field in Layer.model_fields.items()
        if name.endswith(("_bytes", "_ns")) and field.annotation is int and "saved_" not in name
    ]
    index, name = rng.randrange(len(plan.chain.layers)), rng.choice([*fields, "saved_bytes"])
    layers = list(plan.chain.layers)
    split = {"forward_ns": "forward_split_ns", "backward_ns": "backward_input_ns"}.get(name, name)
    more = {each: getattr(layers[index], each) for each in (name, split)}
    more: dict[str, Any] = {each: size + 1 for each, size in more.items() if size is not None}
    options = layers[index].options
    if name in ("forward_ns", "backward_ns"):  # no option is quicker than its layer
        options = tuple(
            each.model_copy(update={name: getattr(each, name) + 1}) for each in options
        )
    layers[index] = layers[index].model_copy(update={**more, "options": options})
    return plan.model_copy(
        update={"chain": plan.chain.model_copy(update={"layers": tuple(layers)})}
    )


def layers_tied(plan: Plan, rng: Random) -> Plan:
    """Two layers share a parameter."""
    layers = list(plan.chain.layers)
    index = rng.randrange(len(layers))
    layers[index] = layers[index].model_copy(update={"parameters": layers[0].parameters})
    return plan.model_copy(
        update={"chain": plan.chain.model_copy(update={"layers": tuple(layers)})}
    )


def row_changed(plan: Plan, rng: Random) -> Plan:
    """One number of the memory table is off by one."""
    gpu = rng.randrange(len(plan.memory))
    row, name = plan.memory[gpu], rng.choice(list(MemoryRow.model_fields))
    value = max(0, getattr(row, name) + rng.choice([-1, 1]))
    if name == "gpu":
        value %= len(plan.memory)
    return _replace(plan, "memory", gpu, row.model_copy(update={name: value}))


def row_lost(plan: Plan, _: Random) -> Plan:
    """The memory table ends early."""
    return plan.model_copy(update={"memory": plan.memory[:-1]})


def step_changed(plan: Plan, rng: Random) -> Plan:
    """The step takes a little more or less than claimed."""
    return plan.model_copy(update={"step_ns": max(0, plan.step_ns + rng.choice([-1, 1]))})


def nothing(plan: Plan, _: Random) -> Plan:
    """No change."""
    return plan


CLAIMS = {"memory_lowered", "row_changed", "row_lost", "step_changed"}
"""Changes of the table and the step themselves."""
_SCHEDULE = [start_moved, start_moved, start_moved, shift_changed, ops_swapped, all_rotated]
MUTATIONS: list[tuple[str, Callable[[Plan, Random], Plan]]] = [
    (change.__name__, change)
    for change in [
        *_SCHEDULE,
        start_unfolded,
        all_shifted,
        duration_changed,
        place_changed,
        op_lost,
        op_doubled,
        stage_moved,
        stage_recut,
        stage_renamed,
        run_recomputed,
        run_offloaded,
        program_changed,
        *mutations_host.CHANGES,
        *mutations_split.CHANGES,
        period_changed,
        microbatches_changed,
        semantics_changed,
        model_changed,
        duplex_changed,
        memory_lowered,
        speed_changed,
        layer_changed,
        layers_tied,
        row_changed,
        row_lost,
        step_changed,
        nothing,
    ]
]
