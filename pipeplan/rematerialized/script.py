"""A planned schedule in two parts: up to the module's output, and from its gradient on."""

from __future__ import annotations

from dataclasses import dataclass

from pipeplan.remat import DeviceOp, DeviceOpKind, DeviceSchedule


@dataclass(frozen=True, slots=True)
class Order:
    """One operation, and what the executor must know of the rest of the schedule."""

    op: DeviceOp
    last_use: bool = False
    """Of a unit whose copy to the host was issued before: its bytes may go behind this one."""
    used_later: bool = False
    """For an offload: whether an operation still uses the unit."""


@dataclass(frozen=True, slots=True)
class Script:
    """What a pass runs before it hands its output on, and in its backward."""

    forward: tuple[Order, ...]
    backward: tuple[Order, ...]
    again: frozenset[int]
    """Layers whose forward runs more than once."""
    moved: frozenset[int]
    """Units that are offloaded."""


def script_of(schedule: DeviceSchedule) -> Script:
    """`schedule` cut where the loss, its last layer, runs in the caller's code.

    Between forward and backward of the loss, transfers that have to end for its backward are
    waited for before the forward, which changes no bytes; what comes back comes behind it.
    """
    ops = schedule.ops
    loss = schedule.layers - 1
    orders = _orders(ops)
    start = next(at for at, op in enumerate(ops) if op == DeviceOp(DeviceOpKind.KEEP_ALL, loss))
    turn = ops.index(DeviceOp(DeviceOpKind.BACKWARD, loss))
    between = range(start + 1, turn)
    back = next((at for at in between if ops[at].kind is DeviceOpKind.PREFETCH), turn)
    runs = [op.index for op in ops if op.computes and op.kind is not DeviceOpKind.BACKWARD]
    return Script(
        forward=tuple(orders[:start] + orders[start + 1 : back]),
        backward=tuple(orders[back:turn] + orders[turn + 1 :]),
        again=frozenset(layer for layer in runs if runs.count(layer) > 1),
        moved=frozenset(op.index for op in ops if op.kind is DeviceOpKind.OFFLOAD),
    )


def _orders(ops: tuple[DeviceOp, ...]) -> list[Order]:
    """Each offload with the last use of its unit before it comes back."""
    last: set[int] = set()
    later: set[int] = set()
    for at, op in enumerate(ops):
        if op.kind is not DeviceOpKind.OFFLOAD:
            continue
        back = DeviceOp(DeviceOpKind.PREFETCH, op.index)
        end = next((i for i in range(at, len(ops)) if ops[i] == back), len(ops))
        uses = [i for i in range(at, end) if op.index in used(ops[i])]
        if uses:
            later.add(at)
            last.add(uses[-1])
    return [Order(op, at in last, at in later) for at, op in enumerate(ops)]


def used(op: DeviceOp) -> tuple[int, ...]:
    """The units that `op` reads."""
    if not op.computes:
        return ()
    return (op.index, op.index + 1) if op.kind is DeviceOpKind.BACKWARD else (op.index,)
