"""Why a run stopped before its end: who waits for what."""

from __future__ import annotations

from pipeplan.errors import DeadlockError
from pipeplan.plan import OpKind
from pipeplan.program import Action, ActionKind, Program
from pipeplan.simulator.engine import Engine
from pipeplan.simulator.links import LinkStates, PlannedLinks
from pipeplan.simulator.tape import Does, Entry, Ops


def explain(program: Program, engine: Engine, links: LinkStates) -> DeadlockError:
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


def _needed(engine: Engine, links: LinkStates, entry: Entry) -> Action:
    """The action that must happen before `entry` can."""
    does, op, microbatch = entry
    awaited = _awaited(engine, does, op, microbatch)
    if (
        isinstance(links, PlannedLinks)
        and {(awaited, microbatch)} <= engine.issued & engine.posted
    ):
        awaited, microbatch = links.head(awaited)
    kind, stage = Ops.kind(awaited), Ops.stage(awaited)
    if kind is OpKind.OFFLOAD and (awaited, microbatch) in engine.posted - engine.issued:
        return Action(ActionKind.F, stage, microbatch)
    if kind is OpKind.PREFETCH and (awaited, microbatch) in engine.posted:
        return Action(ActionKind.OFFLOAD, stage, microbatch)
    if not kind.is_send or (awaited, microbatch) not in engine.issued:
        return Action(ActionKind(kind), stage, microbatch)
    if kind is OpKind.SEND_F:
        return Action(ActionKind.RECV_F, stage + 1, microbatch)
    return Action(ActionKind.RECV_B, stage - 1, microbatch)


def _awaited(engine: Engine, does: int, op: int, microbatch: int) -> int:
    """The op whose end, or whose issue, an entry waits for."""
    if does == Does.FREE:
        return op
    if does != Does.COMPUTE:
        return engine.ops.before[op]
    ends = engine.times.end
    return next(each for each in engine.needs(op, microbatch) if ends[each][microbatch] is None)
