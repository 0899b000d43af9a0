"""What one voice says of a plan, for tests that compare it with another one."""

from __future__ import annotations

from dataclasses import replace

from pipeplan import lowering, simulator
from pipeplan.errors import PipeplanError
from pipeplan.plan import Plan
from pipeplan.program import ActionKind, Pattern


def never_later_never_higher(plan: Plan) -> None:
    """(O7): eager starts no op later than planned, with the same peak on every GPU."""
    pattern = lowering.lower(plan)
    planned = simulator.simulate(plan, pattern)
    eager = simulator.simulate(plan, pattern, clock="eager", microbatches=planned.microbatches)
    pairs = list(zip(eager.spans(), planned.spans(), strict=True))
    assert len(pairs) == planned.microbatches * len(plan.ops) // plan.k
    for mine, its in pairs:
        assert (mine.kind, mine.stage, mine.microbatch) == (its.kind, its.stage, its.microbatch)
        assert mine.start_ns <= its.start_ns
    for early, late in zip(eager.memory, planned.memory, strict=True):
        assert early.peak_bytes == late.peak_bytes
        assert early.host_bytes == late.host_bytes
    assert eager.in_flight == planned.in_flight
    assert eager.period_ns is None or eager.period_ns <= plan.period_ns


def counted_slots(pattern: Pattern) -> dict[tuple[ActionKind, int], int]:
    """What `lowering.buffer_slots` says, from a flow of the lists, message by message."""
    shifts = [action.shift for rank in pattern.ranks for action in rank] or [0]
    count = pattern.k * (max(shifts) - min(shifts) + 2)
    flow = replace(pattern, semantics="2bw").unroll(count)
    most: dict[tuple[ActionKind, int], int] = {}
    for rank in flow.ranks:
        posted = {(a.kind, a.stage) for a in rank}
        used: dict[tuple[ActionKind, int], int] = {}
        for action in rank:
            taken, given_back = {
                "F": ("SEND_F", "RECV_F"),
                "B": ("SEND_B", "RECV_B"),
                "I": ("SEND_B", "RECV_B"),
                "RECV_F": ("RECV_F", None),
                "RECV_B": ("RECV_B", None),
                "FREE_F": (None, "SEND_F"),
                "FREE_B": (None, "SEND_B"),
            }.get(action.kind.value, (None, None))
            for name, step in ((given_back, -1), (taken, 1)):
                if name is None or (ActionKind(name), action.stage) not in posted:
                    continue
                buffer = (ActionKind(name), action.stage)
                used[buffer] = used.get(buffer, 0) + step
                most[buffer] = max(most.get(buffer, 0), used[buffer])
    return most


def replay_accepts(plan: Plan) -> bool:
    """Whether the replay confirms every number of a plan."""
    try:
        simulator.check(plan, lowering.lower(plan))
    except PipeplanError:
        return False
    return True
