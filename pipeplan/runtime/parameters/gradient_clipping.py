"""What an update needs to know of all stages: how long the gradient is, whether it is finite.

Each rank sends the norms of its own parameters (`gradient_norms`) to every other rank, and all
compute the same from the same numbers, so on devices of one kind the result does not depend on the
plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeplan.errors import InputError
from pipeplan.runtime.parameters.extremes import extremes
from pipeplan.runtime.parameters.gradient_norms import NormLayout, norms_of
from pipeplan.runtime.transport.base import Pending, Transport, wait_for
from pipeplan.task import LossScale

_EPSILON = 1e-6
"""What torch adds to the norm before it divides by it."""


@dataclass(frozen=True, slots=True)
class StepDecision:
    """How a step's update is made."""

    skip: bool
    factor: Tensor | None
    """Of all gradients, where these are; None where nothing is clipped."""
    norm: Tensor
    """Of the gradient before clipping: where `factor` is, else on the host. It is not read."""


class LossScaler:
    """The loss scale of each step; equal on all ranks because what it is told is.

    Under 2bw step t begins before the gradients of step t-1 are known, so its scale follows from
    the steps up to t-2, as its weights do.
    """

    def __init__(self, rule: LossScale, lag: int) -> None:
        """Steps 0..lag-1 begin before anything is known; `lag` is 1 (flush) or 2 (2bw)."""
        self._rule = rule
        self._lag = lag
        self.restore(0, [rule.initial] * lag, 0)

    def restore(self, step: int, scales: Sequence[float], good: int) -> None:
        """Say that `step` steps are over: the scales of the next ones, good steps on end.

        Raises:
            InputError: if there are too few scales.
        """
        if len(scales) < self._lag:
            raise InputError(
                f"scales: got {len(scales)}, need {self._lag}: those of the next steps, under 2bw"
                " two. The state is of a task without loss_scale, or of other semantics."
            )
        self._scales = {step + ahead: scale for ahead, scale in enumerate(scales)}
        self._good = good

    def state(self, step: int) -> tuple[tuple[float, ...], int]:
        """What `restore` takes after `step` steps."""
        return tuple(self._scales[step + ahead] for ahead in range(self._lag)), self._good

    def of(self, step: int) -> float:
        """The scale of `step`."""
        return self._scales[step]

    def record(self, step: int, *, finite: bool) -> None:
        """Say how `step` went; steps come in order."""
        scale = self._scales[step + self._lag - 1]
        self._good = self._good + 1 if finite else 0
        if not finite:
            scale *= self._rule.backoff
        elif self._good == self._rule.interval:
            scale *= self._rule.growth
            self._good = 0
        self._scales[step + self._lag] = scale
        self._scales.pop(step - 1, None)


Nonfinite = Callable[[int, str], None]
"""Hears of a step and what in it is not finite."""


@dataclass(frozen=True, slots=True)
class _Found:
    """What one stage of this rank has found of its gradients, where these are; float64."""

    places: list[int]
    norms: Tensor
    """By place."""
    finite: Tensor
    """One number: 1 if all of them are, or nobody looked."""


class StepDecisions:
    """One rank's side of what all ranks tell each other once a step."""

    def __init__(
        self,
        layout: NormLayout,
        transport: Transport,
        clip_norm: float | None,
        scaler: LossScaler | None,
        tag: int,
        nonfinite: Nonfinite | None = None,
        read: Callable[[Tensor], Tensor] = Tensor.cpu,
        device: torch.device | None = None,
    ) -> None:
        """Takes the rank's part.

        Args:
            layout: of all norms.
            transport: to the other ranks.
            clip_norm: the longest gradient; None for any.
            scaler: of the loss; None for none.
            tag: of the messages, which nothing else uses.
            nonfinite: hears of norms.
            read: brings numbers to the host.
            device: of the gradients, where it is a GPU.
        """
        self._read = read
        self._device = device
        self.scaler = scaler
        self._nonfinite = nonfinite
        self._layout = layout
        self._transport = transport
        self._clip = clip_norm
        self._tag = tag
        self._found: dict[int, list[_Found]] = {}
        self._rows: dict[int, dict[int, Tensor]] = {}
        self._pending: dict[int, dict[int, list[Pending]]] = {}
        """By step and rank."""
        self._decided: dict[int, StepDecision] = {}

    def add(self, step: int, gradients: Mapping[str, Tensor]) -> None:
        """Take the finished gradients of one stage by name; they are not kept.

        What is found stays where they are: reading it here would wait for the GPU.
        """
        found = self._found.setdefault(step, [])
        if gradients:
            places = [self._layout.place[name] for name in gradients]
            found.append(_found(places, list(gradients.values()), look=self.scaler is not None))

    def send(self, step: int) -> None:
        """Tell everybody; all stages of this rank have been added."""
        here = self._transport.rank
        row = self._row(step)
        rows = {rank: self._blank(rank) for rank in self._layout.hosts if rank != here}
        self._pending[step] = {
            rank: [
                self._transport.receive(blank, rank, self._tag),
                self._transport.send(row, rank, self._tag),
            ]
            for rank, blank in rows.items()
        }
        self._rows[step] = rows | {here: row}

    def _row(self, step: int) -> Tensor:
        """What this rank knows of `step`, read from the GPU at once: finite, norms by place."""
        found = self._found.pop(step)
        if not found:
            return torch.ones(1, dtype=torch.float64)
        facts = torch.cat([*(each.finite for each in found), *(each.norms for each in found)])
        read = self._read(facts)
        finite, norms = read[: len(found)], read[len(found) :]
        places = [place for each in found for place in each.places]
        index = {place: number for number, place in enumerate(places)}
        own = [index[place] for place in self._layout.ranks[self._transport.rank]]
        return torch.cat([finite.amin().reshape(1), norms[own]])

    def _blank(self, rank: int) -> Tensor:
        return torch.empty(1 + len(self._layout.ranks[rank]), dtype=torch.float64)

    def wait(self, step: int) -> StepDecision:
        """The decision about `step`; steps come in order, each as often as wanted."""
        if step not in self._decided:
            _wait_for_all(self._pending.pop(step))
            self._decided[step] = self._decide(step, self._rows.pop(step))
            self._decided.pop(step - 2, None)
        return self._decided[step]

    def forget(self) -> None:
        """Let what was told of steps that nobody decides arrive."""
        for pending in self._pending.values():
            _wait_for_all(pending)
        self._pending.clear()
        self._rows.clear()

    def _decide(self, step: int, rows: Mapping[int, Tensor]) -> StepDecision:
        finite = all(bool(row[0]) for row in rows.values())
        if self.scaler:
            self.scaler.record(step, finite=finite)
        own = {rank: row[1:] for rank, row in rows.items()}
        known = self._layout.total(own)
        if self._clip is None or not finite:
            return StepDecision(not finite, None, known)
        if self._nonfinite and not known.isfinite():
            self._nonfinite(step, self._wrong(rows))
        norm = known if self._device is None else self._layout.total(own, self._device)
        factor = torch.clamp(self._clip / (norm + _EPSILON), max=1.0)
        return StepDecision(False, factor, norm)

    def _wrong(self, rows: Mapping[int, Tensor]) -> str:
        """Which norm is not finite, for people."""
        places = self._layout.ranks
        pairs = (zip(places[rank], row[1:].tolist(), strict=True) for rank, row in rows.items())
        wrong = sorted(place for row in pairs for place, norm in row if not math.isfinite(norm))
        return f"the norm of {self._layout.told(wrong[0])}" if wrong else "the gradient's norm"


def _wait_for_all(pending: Mapping[int, Sequence[Pending]]) -> None:
    """Wait for the messages of each rank."""
    for rank, messages in pending.items():
        wait_for(rank, messages)


def _found(places: list[int], gradients: list[Tensor], *, look: bool) -> _Found:
    """The norm of each gradient, and whether all numbers are finite, without reading either.

    No tensor is made that is as large as a gradient.
    """
    norms = norms_of(gradients)
    ends = [end for each in gradients if look for end in extremes(each)]
    finite = torch.stack(ends).isfinite().all() if ends else norms.new_ones(())
    return _Found(places, norms, finite.double().reshape(1))
