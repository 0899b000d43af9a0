"""Whether a program can end: every message has both its ends, and no circle of waits exists.

Works on any program, hand-written ones included: what waits for what follows from the actions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import networkx as nx

from pipeplan.errors import DeadlockError, InputError
from pipeplan.program import Action, ActionKind, Pattern, Program

MOST_ACTIONS = 2_000_000
"""A longer window would take minutes and gigabytes."""
_K = ActionKind
_Node = tuple[int, int]
"""(rank, index in its list)."""
_MESSAGES = {
    "F": (_K.SEND_F, _K.RECV_F, _K.FREE_F, +1),
    "B": (_K.SEND_B, _K.RECV_B, _K.FREE_B, -1),
}
_COMPUTES = {"F": (_K.F,), "B": (_K.B, _K.I)}
"""What takes a message in and makes the next one."""
_HALVES = {_K.I: _K.W, _K.W: _K.I}
_CARRIES = {_K.OFFLOAD: _K.F, _K.FREE_O: _K.OFFLOAD, _K.PREFETCH: _K.OFFLOAD}
"""What must have acted before the host has, or gives back, what a stage keeps."""


def check_deadlock(program: Program | Pattern, *, blocking: bool = True) -> None:
    """Refuse a program that cannot end; the message prints the circle of waits line by line.

    Args:
        program: a finite program, or a pattern, which is unrolled from empty to empty until
            every action of its period has met every other one.
        blocking: whether a send blocks its rank until its receive is posted.

    Raises:
        InputError: if a message lacks one of its ends, an action is there twice or on a rank
            where it cannot act.
        DeadlockError: if actions wait for each other in a circle; `cycle` names them.

    Source: ours (docs/reference/model.md, O6).
    """
    cycle = wait_cycle(program, blocking=blocking)
    if cycle is None:
        return
    how = (
        "when a send blocks until its receive is posted" if blocking else "even if no send blocks"
    )
    raise DeadlockError(
        f"program: actions wait for each other in a circle {how}:\n  "
        + "\n  ".join(cycle)
        + "\nMove one of these actions behind what it waits for, or post the receive earlier.",
        cycle,
    )


def wait_cycle(program: Program | Pattern, *, blocking: bool = True) -> tuple[str, ...] | None:
    """A circle of waits, one readable line per wait, or None if the program always ends.

    A rank executes its list in order. A compute waits for its input, a W for its I, a SEND for its
    producer and, if it blocks, for the RECV, a FREE for the whole transfer. A way to the host has
    no other end that could block: who takes it waits for what it carries, a backward for its
    PREFETCH. An OFFLOAD that stands before its F begins with that; whether its stage may do so,
    the plan says and not the program.

    Args:
        program: as in `check_deadlock`.
        blocking: as in `check_deadlock`.

    Raises:
        InputError: as in `check_deadlock`.
    """
    if isinstance(program, Pattern):
        program = _window(program)
    places = _Places.of(program)
    graph = nx.DiGraph(_waits(program, places, blocking))
    if nx.is_directed_acyclic_graph(graph):
        return None
    return tuple(_lines(program, [tail for tail, _ in nx.find_cycle(graph)]))


def _window(pattern: Pattern) -> Program:
    """Enough micro-batches for every action of the period to meet every other one.

    Under flush two such steps: longer ones only repeat the period. Updates wait for nothing.
    """
    shifts = [action.shift for rank in pattern.ranks for action in rank] or [0]
    least = pattern.k * (max(shifts) - min(shifts) + 2)
    most = max(1, MOST_ACTIONS * pattern.k // max(1, sum(map(len, pattern.ranks))))
    if least > most:
        raise InputError(
            f"pattern: got shifts {min(shifts)} to {max(shifts)}, which take {least} micro-batches"
            f" to check, need at most {most}. Plan for fewer micro-batches in flight."
        )
    if pattern.semantics == "2bw":
        return pattern.unroll(least)
    step = min(pattern.microbatches, least)
    return replace(pattern, microbatches=step).unroll(2 * step)


@dataclass(frozen=True, slots=True)
class _Places:
    """Where each action with a micro-batch stands, and on which rank each stage lives."""

    program: Program
    node: dict[Action, _Node]
    last_stage: int

    @classmethod
    def of(cls, program: Program) -> _Places:
        node: dict[Action, _Node] = {}
        homes: dict[int, int] = {}
        for rank, actions in enumerate(program.ranks):
            for index, action in enumerate(actions):
                home = homes.setdefault(action.stage, rank)
                if home != rank:
                    raise InputError(
                        f"program: rank {rank}: got {action}, need it on rank {home}, which has"
                        f" the other actions of stage {action.stage}"
                    )
                if action.microbatch is None:
                    continue
                if action in node:
                    raise InputError(f"program: rank {rank}: got {action} twice, need it once")
                node[action] = (rank, index)
        places = cls(program, node, max(homes, default=0))
        places.check(homes)
        return places

    def check(self, homes: dict[int, int]) -> None:
        """Every message has a producer, a SEND, a RECV and a consumer, on two ranks."""
        for action in self.node:
            for letter, (send, receive, free, step) in _MESSAGES.items():
                if action.kind is send:
                    peer = action.stage + step
                    self._demand(action, self.computes(letter, action), action.stage)
                    self._demand(action, receive, peer)
                    if homes[peer] == homes[action.stage]:
                        raise InputError(
                            f"program: got {action}, need no message between stages"
                            f" {action.stage} and {peer}: both are on rank {homes[peer]}"
                        )
                elif action.kind is free:
                    self._demand(action, send, action.stage)
                elif action.kind is receive:
                    self._demand(action, send, action.stage - step)
                    self._demand(action, self.computes(letter, action), action.stage)
                elif action.kind in _COMPUTES[letter]:
                    self._check_input(action, letter, homes)
            self._check_at_home(action)

    def computes(self, letter: str, action: Action, stage: int | None = None) -> ActionKind:
        """What computes the forward or backward of the action's micro-batch in a stage.

        F, or B, or I where the program has one of the halves; the stage is the action's if none
        is given.
        """
        home = action.stage if stage is None else stage
        split = any(Action(half, home, action.microbatch) in self.node for half in _HALVES)
        return _K.I if letter == "B" and split else _K(letter)

    def _check_at_home(self, action: Action) -> None:
        """What goes to the host comes back for the backward; I and W are there together, or B."""
        if action.kind in _CARRIES:
            self._demand(action, _CARRIES[action.kind], action.stage)
        if action.kind is _K.PREFETCH:
            self._demand(action, self.computes("B", action), action.stage)
        if action.kind not in _HALVES:
            return
        self._demand(action, _HALVES[action.kind], action.stage)
        whole = Action(_K.B, action.stage, action.microbatch)
        if whole in self.node:
            raise InputError(
                f"program: rank {self.node[action][0]}: got {action} and {whole}, need one of"
                " them: I and W are the two halves of B"
            )

    def _check_input(self, action: Action, letter: str, homes: dict[int, int]) -> None:
        _, receive, _, step = _MESSAGES[letter]
        source = action.stage - step
        if letter == "B":
            self._demand(action, _K.F, action.stage)
            if Action(_K.OFFLOAD, action.stage, action.microbatch) in self.node:
                self._demand(action, _K.PREFETCH, action.stage)
        if not 0 <= source <= self.last_stage:
            return
        self._demand(action, self.computes(letter, action, source), source)
        if homes[source] != homes[action.stage]:
            self._demand(action, receive, action.stage)

    def _demand(self, action: Action, kind: ActionKind, stage: int) -> None:
        needed = Action(kind, stage, action.microbatch)
        if needed not in self.node:
            raise InputError(
                f"program: rank {self.node[action][0]}: {action} needs {needed}, which no rank has"
            )


def _waits(program: Program, places: _Places, blocking: bool) -> Iterator[tuple[_Node, _Node]]:
    """(waiter, what it waits for), for all actions."""
    for rank, actions in enumerate(program.ranks):
        for index in range(1, len(actions)):
            yield (rank, index), (rank, index - 1)
    for action, node in places.node.items():
        for needed in _needs(action, places, blocking):
            target = places.node.get(needed)
            if target is not None:
                yield node, target


def _needs(action: Action, places: _Places, blocking: bool) -> Iterator[Action]:
    """Actions that must have acted before `action` can be passed; absent ones are no needs."""
    kind, stage, microbatch = action.kind, action.stage, action.microbatch
    for letter, (send, receive, free, step) in _MESSAGES.items():
        if kind is send:
            yield Action(places.computes(letter, action), stage, microbatch)
        if kind is free or (kind is send and blocking):
            yield Action(receive, stage + step, microbatch)
        if kind is free:
            yield Action(send, stage, microbatch)
        if kind in _COMPUTES[letter]:
            source = stage - step
            yield Action(send, source, microbatch)
            yield Action(receive, stage, microbatch)
            yield Action(places.computes(letter, action, source), source, microbatch)
    if kind is _K.W:
        yield Action(_K.I, stage, microbatch)
    if kind in _COMPUTES["B"]:
        yield Action(_K.F, stage, microbatch)
        yield Action(_K.PREFETCH, stage, microbatch)
    if kind in _CARRIES:
        yield from _carried(action, places)


def _carried(action: Action, places: _Places) -> Iterator[Action]:
    """What the host needs; OFFLOAD before its F is of an input, which leaves with that (H3)."""
    needed, forward = (
        Action(kind, action.stage, action.microbatch) for kind in (_CARRIES[action.kind], _K.F)
    )
    if action.kind is not _K.OFFLOAD:
        yield from (needed, forward)
    elif places.node[forward] < places.node[action]:
        yield forward


def _lines(program: Program, cycle: list[_Node]) -> Iterator[str]:
    """The circle in words: one line per wait, one per run of steps back along a rank's list."""

    def is_wait(i: int) -> bool:
        (rank, index), follower = cycle[i % len(cycle)], cycle[(i + 1) % len(cycle)]
        return follower != (rank, index - 1)

    first = next(i for i in range(len(cycle)) if is_wait(i - 1))
    entry = first
    for i in range(first, first + len(cycle)):
        if not is_wait(i):
            continue
        (rank, start), (_, stop) = cycle[entry % len(cycle)], cycle[i % len(cycle)]
        peer, target = cycle[(i + 1) % len(cycle)]
        names = program.ranks[rank]
        if start != stop:
            yield f"rank {rank}: {names[start]} comes after {names[stop]}"
        yield f"rank {rank}: {names[stop]} waits for rank {peer}: {program.ranks[peer][target]}"
        entry = i + 1
