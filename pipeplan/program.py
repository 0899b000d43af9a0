"""The program: what each rank does, in order. Data only; lowering makes it, two voices run it.

A `Pattern` is one period of every rank; `actions` unrolls it for any number of micro-batches, so a
run of any length needs no longer file. A `Program` is a finite list, as people write and read it.
Text form: one rank per line, actions such as `2F0`, `2SEND_F0`, `2OPT`; `parse(str(x)) == x`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from pipeplan.errors import InputError
from pipeplan.plan import Semantics
from pipeplan.units import shown


class ActionKind(StrEnum):
    """What one action does. The suffix F or B tells which message: activation or gradient.

    A message belongs to the stage named in the action: `2SEND_F0` sends stage 2's output on,
    `3RECV_F0` posts stage 3's receive of it; `3SEND_B0` sends the gradient of stage 3's input
    back, `2RECV_B0` posts stage 2's receive of it. `2FREE_F0` waits until stage 2's sent output
    has left and gives its bytes back. `2OPT` updates stage 2's weights.
    `2I0` and `2W0` are the two halves of a split backward (docs/reference/model.md §4).
    `2OFFLOAD0` begins to copy what stage 2 keeps of micro-batch 0 to the host, or, before `2F0`,
    its input as soon as that begins. `2FREE_O0` waits for the copy and gives the bytes back,
    `2PREFETCH0` begins to bring them back.
    """

    F = "F"
    B = "B"
    I = "I"  # noqa: E741  the literature's letter
    W = "W"
    SEND_F = "SEND_F"
    SEND_B = "SEND_B"
    RECV_F = "RECV_F"
    RECV_B = "RECV_B"
    FREE_F = "FREE_F"
    FREE_B = "FREE_B"
    OFFLOAD = "OFFLOAD"
    FREE_O = "FREE_O"
    PREFETCH = "PREFETCH"
    OPT = "OPT"


MOST_ACTIONS = 5_000_000
"""Of a program: a longer one would take minutes and gigabytes."""
_KINDS = "|".join(sorted((kind.value for kind in ActionKind), key=len, reverse=True))
_STAGE = r"[0-9]{1,6}"
_MICROBATCH = r"[0-9]{1,19}"
_ACTION = re.compile(rf"({_STAGE})({_KINDS})({_MICROBATCH})?")
_PERIODIC = re.compile(rf"({_STAGE})({_KINDS})([0-9]{{1,4}})([+-][0-9]{{1,7}})")
_HEAD = re.compile(rf"pattern k=([0-9]{{1,4}}) semantics=(2bw|flush) microbatches=({_MICROBATCH})")
_HOSTED = re.compile(rf"(?:{_STAGE}(?:,{_STAGE})*)?")


@dataclass(frozen=True, slots=True)
class Action:
    """One step of a rank. `microbatch` counts from the start of the run; None for OPT."""

    kind: ActionKind
    stage: int
    microbatch: int | None = None

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{'' if self.microbatch is None else self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """The action in `text`.

        Raises:
            InputError: if it is none.
        """
        match = _ACTION.fullmatch(text)
        if not match or (match[3] is None) != (match[2] == ActionKind.OPT):
            raise InputError(
                f"action: got {shown(text)}, need <stage><kind><micro-batch> such as 2F0"
            )
        return cls(
            ActionKind(match[2]), int(match[1]), None if match[3] is None else int(match[3])
        )


@dataclass(frozen=True, slots=True)
class PeriodicAction:
    """One action of the period: acts on micro-batch k * (n - shift) + copy in period n.

    An OPT belongs to the micro-batch whose backward it follows; it acts only when that micro-batch
    is the last of an optimizer step.
    """

    kind: ActionKind
    stage: int
    copy: int
    shift: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.copy}{self.shift:+d}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """The periodic action in `text`, such as `2F0+1`.

        Raises:
            InputError: if it is none.
        """
        match = _PERIODIC.fullmatch(text)
        if not match:
            raise InputError(
                f"action: got {shown(text)}, need <stage><kind><copy><signed shift> such as 2F0+1"
            )
        return cls(ActionKind(match[2]), int(match[1]), int(match[3]), int(match[4]))


@dataclass(frozen=True, slots=True)
class Program:
    """Finite action lists, one per rank."""

    ranks: tuple[tuple[Action, ...], ...]

    def __str__(self) -> str:
        return "".join(" ".join(map(str, rank)) + "\n" for rank in self.ranks)

    @classmethod
    def parse(cls, text: str) -> Self:
        """The program in `text`: one rank per line, an empty line for an idle rank.

        Raises:
            InputError: if a word is no action.
        """
        lines = text.removesuffix("\n").split("\n") if text else []
        return cls(tuple(tuple(map(Action.parse, line.split())) for line in lines))


@dataclass(frozen=True, slots=True)
class Pattern:
    """One period of every rank, in the order the rank executes it.

    Under `2bw` the period contains OPT actions and micro-batches flow across optimizer steps;
    under `flush` each step of `microbatches` fills, drains, and then updates every stage.
    """

    k: int
    semantics: Semantics
    microbatches: int
    """Micro-batches per optimizer step."""
    ranks: tuple[tuple[PeriodicAction, ...], ...]
    hosted: tuple[tuple[int, ...], ...]
    """Stages of each rank, in chain order."""

    def __str__(self) -> str:
        head = f"pattern k={self.k} semantics={self.semantics} microbatches={self.microbatches}"
        lines = [
            ",".join(map(str, hosted)) + ": " + " ".join(map(str, rank))
            for hosted, rank in zip(self.hosted, self.ranks, strict=True)
        ]
        return "\n".join([head, *lines]) + "\n"

    @classmethod
    def parse(cls, text: str) -> Self:
        """The pattern in `text`.

        Raises:
            InputError: if the text is not a pattern.
        """
        head, *lines = text.removesuffix("\n").split("\n")
        match = _HEAD.fullmatch(head)
        if not match or int(match[1]) < 1 or int(match[3]) < 1:
            raise InputError(
                f"pattern: got first line {shown(head)}, need"
                " 'pattern k=<1 or more> semantics=<2bw or flush> microbatches=<1 or more>'"
            )
        ranks, hosted = [], []
        for line in lines:
            stages, colon, actions = line.partition(":")
            if not colon or not _HOSTED.fullmatch(stages):
                raise InputError(f"pattern: got line {shown(line)}, need '<stages>: <actions>'")
            hosted.append(tuple(int(stage) for stage in stages.split(",") if stage))
            ranks.append(tuple(map(PeriodicAction.parse, actions.split())))
        semantics: Semantics = "2bw" if match[2] == "2bw" else "flush"
        pattern = cls(int(match[1]), semantics, int(match[3]), tuple(ranks), tuple(hosted))
        pattern._check()
        return pattern

    def _check(self) -> None:
        """What a text can break: copies below k, every stage on one rank, own stages only."""
        home: dict[int, int] = {}
        for rank, stages in enumerate(self.hosted):
            for stage in stages:
                if stage in home:
                    raise InputError(
                        f"pattern: rank {rank}: got stage {stage} again, need it once"
                    )
                home[stage] = rank
        for rank, actions in enumerate(self.ranks):
            for action in actions:
                if action.copy >= self.k:
                    raise InputError(
                        f"pattern: rank {rank}: got {action}, need a copy below k = {self.k}"
                    )
                if home.get(action.stage) != rank:
                    raise InputError(
                        f"pattern: rank {rank}: got {action}, need a stage that the rank hosts"
                    )

    def actions(self, rank: int, microbatches: int, first: int = 0) -> Iterator[Action]:
        """What `rank` does for micro-batches first..first+microbatches-1, from empty to empty.

        Updates happen after each complete step of `self.microbatches`; `first` must be a multiple
        of it. After a drain the last stage updates first, as under 2bw: what a stage needs of
        later ones for its update is then on its way.
        """
        if self.semantics == "2bw":
            yield from self._flow(rank, microbatches, first)
            return
        for start in range(first, first + microbatches, self.microbatches):
            size = min(self.microbatches, first + microbatches - start)
            yield from self._flow(rank, size, start)
            if size == self.microbatches:
                updates = reversed(self.hosted[rank])
                yield from (Action(ActionKind.OPT, stage) for stage in updates)

    @property
    def most_unrolled(self) -> int:
        """How many micro-batches `unroll` makes a program of: it keeps every action."""
        return max(1, MOST_ACTIONS * self.k // max(1, sum(map(len, self.ranks))))

    def unroll(self, microbatches: int, first: int = 0) -> Program:
        """The finite program of all ranks for `microbatches` micro-batches.

        Raises:
            InputError: if there are more than `most_unrolled`.
        """
        if microbatches > self.most_unrolled:
            raise InputError(
                f"pattern: got {microbatches} micro-batches to write out, need at most"
                f" {self.most_unrolled}: every action of each is kept. Plan with fewer per step"
                " (--microbatches)."
            )
        ranks = range(len(self.ranks))
        return Program(tuple(tuple(self.actions(rank, microbatches, first)) for rank in ranks))

    def _flow(self, rank: int, microbatches: int, first: int) -> Iterator[Action]:
        for n in self._periods(rank, microbatches):
            for action in self.ranks[rank]:
                local = self.k * (n - action.shift) + action.copy
                if not 0 <= local < microbatches:
                    continue
                microbatch = first + local
                if action.kind is not ActionKind.OPT:
                    yield Action(action.kind, action.stage, microbatch)
                elif (microbatch + 1) % self.microbatches == 0:
                    yield Action(ActionKind.OPT, action.stage)

    def _periods(self, rank: int, microbatches: int) -> Iterator[int]:
        """The periods in which an action of a rank has one of so many micro-batches."""
        shifts = sorted({action.shift for action in self.ranks[rank]})
        behind, rounds = min(shifts, default=0), 1 + (microbatches - 1) // self.k
        for shift in shifts:
            yield from range(max(shift, behind), shift + rounds)
            behind = shift + rounds
