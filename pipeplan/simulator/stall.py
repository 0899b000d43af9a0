"""Why a run stopped before its end: who waits for what."""

from __future__ import annotations

from pipeplan.errors import DeadlockError
from pipeplan.plan import OpKind
from pipeplan.program import Action, ActionKind, Program
from pipeplan.simulator.engine import Engine
from pipeplan.simulator.links import Links, PlannedLinks
from pipeplan.simulator.tape import Does, Entry, Ops


def explain(program: Program, engine: Engine, links: Links) -> DeadlockError:
    """The error for a run that stopped, with the waits from one stopped rank on, line by line."""
    stopped = [rank for rank, at in enumerate(engine.position) if at < len(engine.tapes[rank])]
    lines: list[str] = []
    seen: list[int] = []
    rank: int | None = stopped[0]
    while rank is not None and rank not in seen:
        seen.append(rank)
        action = program.ranks[rank][engine.position[rank]]
        needed = _needed(engine, links, engine.tapes[rank][engine.position[rank]])
        following = next((r for r, acts in enumerate(program.ranks) if needed in acts), None)
        where = "which no rank has" if following is None else f"which rank {following} has later"
        lines.append(f"rank {rank}: {action} waits for {needed}, {where}")
        rank = following
    cycle = lines if rank is None else lines[seen.index(rank) :]
    return DeadlockError(
        f"program: {len(stopped)} of {len(engine.tapes)} ranks wait for ever:\n  "
        + "\n  ".join(cycle)
        + "\nMove one of these actions behind what it waits for.",
        cycle,
    )


def _needed(engine: Engine, links: Links, entry: Entry) -> Action:
    """The action that must happen before `entry` can."""
    does, op, microbatch = entry
    awaited = op if does == Does.FREE else engine.ops.before[op]
    kind = Ops.kind(awaited)
    if kind.is_compute:
        return Action(ActionKind(kind), Ops.stage(awaited), microbatch)
    if (
        isinstance(links, PlannedLinks)
        and {(awaited, microbatch)} <= engine.issued & engine.posted
    ):
        awaited, microbatch = links.head(awaited)
        kind = Ops.kind(awaited)
    forward, stage = kind is OpKind.SEND_F, Ops.stage(awaited)
    if (awaited, microbatch) not in engine.issued:
        return Action(ActionKind(kind), stage, microbatch)
    if forward:
        return Action(ActionKind.RECV_F, stage + 1, microbatch)
    return Action(ActionKind.RECV_B, stage - 1, microbatch)
