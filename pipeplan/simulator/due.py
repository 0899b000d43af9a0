"""When the entries of the tapes are due, and in which order links take transfers."""

from __future__ import annotations

from collections import defaultdict

from pipeplan.simulator.links import Resource
from pipeplan.simulator.planned import Planned
from pipeplan.simulator.tape import Does, Entry, Ops

_TAKES = (Does.SEND, Does.OFFLOAD, Does.PREFETCH)
"""Entries that ask for a link or a way to the host; a RECV belongs to the SEND of its transfer."""


def link_order(
    planned: Planned,
    ops: Ops,
    resources: dict[int, Resource],
    tapes: list[list[Entry]],
    flow: int,
) -> dict[Resource, list[tuple[int, int]]]:
    """Per link, and per way to the host, its transfers as (op, micro-batch), in the plan's order.

    At equal times those without length come first, in the order (O5). Micro-batches flow in
    groups of `flow`; every group starts anew, as the steps of a flush do.
    """
    keys: dict[Resource, list[tuple[int, int, int, int, int, int]]] = defaultdict(list)
    for tape in tapes:
        for does, op, microbatch in tape:
            if does in _TAKES:
                due = planned.at(op, microbatch % flow)
                place = (ops.duration[op], microbatch, ops.position[op], op)
                keys[resources[op]].append((microbatch // flow, due, *place))
    return {
        link: [(op, microbatch) for *_, microbatch, _, op in sorted(each)]
        for link, each in keys.items()
    }


def due_times(planned: Planned, tapes: list[list[Entry]]) -> list[list[int]]:
    """Planned times of all but FREEs and OPTs, per rank and entry; 0 for those.

    A SEND happens when its transfer is due, but no later than the next compute of its rank
    starts; so do OFFLOAD and PREFETCH; a RECV when its SEND does, with the same limit on its rank.
    """
    issued: dict[tuple[int, int], int] = {}
    due = [[0] * len(tape) for tape in tapes]
    for wanted in (_TAKES, (Does.RECV,)):
        for times, tape in zip(due, tapes, strict=True):
            _fill(planned, tape, wanted, issued, times)
    return due


def _fill(
    planned: Planned,
    tape: list[Entry],
    wanted: tuple[Does, ...],
    issued: dict[tuple[int, int], int],
    times: list[int],
) -> None:
    """Fills in the computes and the `wanted` messages, from the end of the tape to its start."""
    following: int | None = None
    for index in range(len(tape) - 1, -1, -1):
        does, op, microbatch = tape[index]
        if does == Does.COMPUTE:
            following = times[index] = planned.at(op, microbatch)
        elif does in wanted:
            at = issued.get((op, microbatch)) if does == Does.RECV else None
            if at is None:
                at = planned.at(op, microbatch)
            times[index] = at if following is None else min(at, following)
            if does == Does.SEND:
                issued[op, microbatch] = times[index]
