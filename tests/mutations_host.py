"""Random small changes of what goes to the host and comes back."""

from __future__ import annotations

from random import Random

from pipeplan.plan import OpKind, Plan, Remat


def input_moved(plan: Plan, rng: Random) -> Plan:
    """The saved input of one stage leaves, or no longer: neutral where nothing is kept of it."""
    index = rng.randrange(len(plan.stages))
    stage = plan.stages[index]
    remat = stage.remat or Remat(offload_input=True)
    changed = remat.model_copy(
        update={"offload_input": not stage.remat or not remat.offload_input}
    )
    kept = changed.recompute or changed.programs or changed.offloads
    other = stage.model_copy(update={"remat": changed if kept else None})
    stages = (*plan.stages[:index], other, *plan.stages[index + 1 :])
    return plan.model_copy(update={"stages": stages})


def _moving(plan: Plan, rng: Random) -> int | None:
    """The place of an OFFLOAD or PREFETCH in the plan's ops, if it has any."""
    found = [index for index, op in enumerate(plan.ops) if op.kind.is_host]
    return rng.choice(found) if found else None


def host_op_moved(plan: Plan, rng: Random) -> Plan:
    """An OFFLOAD starts earlier, or a PREFETCH later."""
    index = _moving(plan, rng)
    if index is None:
        return plan
    op = plan.ops[index]
    by = rng.choice([1, 1, 2, 5]) * (-1 if op.kind is OpKind.OFFLOAD else 1)
    shift, start = divmod(max(0, op.shift * plan.period_ns + op.start_ns + by), plan.period_ns)
    op = op.model_copy(update={"shift": shift, "start_ns": start})
    return plan.model_copy(update={"ops": (*plan.ops[:index], op, *plan.ops[index + 1 :])})


def host_op_lost(plan: Plan, rng: Random) -> Plan:
    """A copy is sent to the host and never brought back, or the other way round."""
    index = _moving(plan, rng)
    if index is None:
        return plan
    return plan.model_copy(update={"ops": plan.ops[:index] + plan.ops[index + 1 :]})


def copy_kept(plan: Plan, rng: Random) -> Plan:
    """A copy is not offloaded any more: neutral where another one of its stage is."""
    index = _moving(plan, rng)
    if index is None:
        return plan
    lost = plan.ops[index].stage, plan.ops[index].copy_
    ops = tuple(op for op in plan.ops if not op.kind.is_host or (op.stage, op.copy_) != lost)
    return plan.model_copy(update={"ops": ops})


def _host(plan: Plan, **fields: object) -> Plan:
    """`plan` with fields of its host replaced, if it has one."""
    if plan.cluster.host is None:
        return plan
    host = plan.cluster.host.model_copy(update=fields)
    return plan.model_copy(update={"cluster": plan.cluster.model_copy(update={"host": host})})


def host_lowered(plan: Plan, _: Random) -> Plan:
    """A host with one byte less than its plan needs."""
    return _host(plan, memory_bytes=max(0, sum(row.host_bytes for row in plan.memory) - 1))


def host_rate_changed(plan: Plan, rng: Random) -> Plan:
    """Ways to the host that are slower or faster."""
    rates = [10**9 // 2, 10**9, 2 * 10**9, 5 * 10**9]
    return _host(plan, bandwidth_bytes_per_s=rng.choice(rates))


def host_duplex_changed(plan: Plan, _: Random) -> Plan:
    """Ways to the host shared by both directions, or no longer."""
    host = plan.cluster.host
    return _host(plan, duplex="half" if host and host.duplex == "full" else "full")


def host_gone(plan: Plan, _: Random) -> Plan:
    """No host: neutral where nothing is offloaded."""
    return plan.model_copy(update={"cluster": plan.cluster.model_copy(update={"host": None})})


def states_moved(plan: Plan, rng: Random) -> Plan:
    """The states of one stage are elsewhere."""
    index = rng.randrange(len(plan.stages))
    stage = plan.stages[index]
    other = stage.model_copy(update={"states": "gpu" if stage.states == "host" else "host"})
    stages = (*plan.stages[:index], other, *plan.stages[index + 1 :])
    return plan.model_copy(update={"stages": stages})


def update_rate_changed(plan: Plan, rng: Random) -> Plan:
    """Updates on the host are slower, faster, or of an unknown speed."""
    return _host(plan, update_bytes_per_s=rng.choice([None, 10**9 // 2, 4 * 10**9]))


CHANGES = (
    input_moved,
    host_op_moved,
    host_op_lost,
    copy_kept,
    host_lowered,
    host_rate_changed,
    host_duplex_changed,
    host_gone,
    states_moved,
    update_rate_changed,
)
