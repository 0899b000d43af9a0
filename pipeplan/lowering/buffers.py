"""How many message buffers a pattern needs: send rings and receive depth."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from pipeplan.program import ActionKind, Pattern, PeriodicAction

_K = ActionKind
_TAKES = {
    _K.F: _K.SEND_F,
    _K.B: _K.SEND_B,
    _K.I: _K.SEND_B,
    _K.RECV_F: _K.RECV_F,
    _K.RECV_B: _K.RECV_B,
}
_GIVES = {
    _K.FREE_F: _K.SEND_F,
    _K.FREE_B: _K.SEND_B,
    _K.F: _K.RECV_F,
    _K.B: _K.RECV_B,
    _K.I: _K.RECV_B,
}


def buffer_slots(pattern: Pattern) -> Mapping[tuple[ActionKind, int], int]:
    """Messages of a boundary that are in buffers at once, in steady state.

    A sender holds a slot from its producer to the FREE, a receiver from the RECV to the consumer;
    places in the rank's list decide, so no clock can need more (docs/reference/model.md, O7).

    Returns:
        (SEND_F, s), (SEND_B, s): slots for the output or input gradient that stage s sends;
        (RECV_F, s), (RECV_B, s): slots for the message that stage s receives.

    Source: ours.
    """
    slots: dict[tuple[ActionKind, int], int] = {}
    for rank in pattern.ranks:
        for buffer, steps in _steps(rank).items():
            # A slot taken at shift a and given at shift b is in use at b - a starts of a period.
            level = most = -sum(step * shift for step, shift in steps)
            for step, _ in steps:
                level += step
                most = max(most, level)
            slots[buffer] = most
    return slots


def _steps(
    rank: tuple[PeriodicAction, ...],
) -> dict[tuple[ActionKind, int], list[tuple[int, int]]]:
    """Per buffer the (+1 taken or -1 given, shift) of the rank's actions, in list order."""
    messages = {(action.kind, action.stage) for action in rank}
    steps: dict[tuple[ActionKind, int], list[tuple[int, int]]] = defaultdict(list)
    for action in rank:
        for table, step in ((_GIVES, -1), (_TAKES, +1)):
            buffer = table.get(action.kind)
            if buffer is not None and (buffer, action.stage) in messages:
                steps[buffer, action.stage].append((step, action.shift))
    return steps
