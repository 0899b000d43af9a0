"""What the rank with the losses hears of each whole step: gradient norm and learning rates.

Each rank sends it the norms and learning rates of its own parameters, once per step and behind its
updates. No update waits for it. The rank reads them at its first forward that needs the updates of
all stages: the input of that forward comes from ranks that have sent theirs before, so reading
waits for nothing that the forward does not wait for. Norms on a GPU are copied to the host behind
the update, and sent a step later, when the copy has long ended. Source: ours.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pipeplan.runtime.parameters.gradient_clipping import StepDecision
from pipeplan.runtime.parameters.gradient_norms import NormLayout, norms_of
from pipeplan.runtime.parameters.weights import Weights
from pipeplan.runtime.transport.base import Pending, Transport, wait_for

Told = Callable[[int, float, tuple[float, ...]], None]
"""Hears step, norm of its gradient, and the learning rates of its update."""
_NONE = float("nan")
"""The learning rate of an optimizer that has none."""


@dataclass(frozen=True, slots=True)
class _StageReport:
    """What one stage knows of a step."""

    places: list[int]
    norms: Tensor | None
    """On the host, once `there` has come; None where they are known from clipping."""
    there: Any
    rates: list[float]


@dataclass(slots=True)
class _RankReport:
    """What this rank knows of a step, stage by stage."""

    stages: list[_StageReport] = field(default_factory=list)
    norm: Tensor | None = None
    """Of the whole gradient, on the host once `there` has come; None where nothing clips."""
    there: Any = None


class StepReports:
    """One rank's side of them."""

    def __init__(
        self,
        layout: NormLayout,
        transport: Transport,
        hosted: int,
        tag: int,
        told: Told,
        *,
        last: int,
        teller: int,
        lag: int,
        settle: Callable[[Any], None] = lambda _: None,
        uncounted: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Takes the rank's part.

        Args:
            layout: of all norms.
            transport: to the other ranks.
            hosted: how many stages this rank has.
            tag: of the messages, which nothing else uses.
            told: hears of each step, in order, on the rank `teller`.
            last: the last stage.
            teller: the rank of the last stage.
            lag: a forward of step t + lag needs the updates of step t of all stages before it.
            settle: returns once an event of a GPU has come.
            uncounted: around what no plan has bytes for.
        """
        self._layout, self._transport, self._tag, self._told = layout, transport, tag, told
        self._hosted, self._last, self._teller, self._lag = hosted, last, teller, lag
        self._settle, self._uncounted = settle, uncounted
        self._open: dict[int, _RankReport] = {}
        self._sent: deque[tuple[Tensor, Pending]] = deque()

    def add(
        self,
        names: Mapping[nn.Parameter, str],
        weights: Weights,
        decision: StepDecision | None,
    ) -> None:
        """Take what a stage knows of the step by which it updates `weights` next.

        Args:
            names: of the stage's parameters in the user's model.
            weights: gradients are finished and not yet clipped.
            decision: about the step; None where nothing clips.
        """
        step, places = weights.version, self._layout.place
        with self._uncounted():
            norms, there = None, None
            if decision is None and weights.parameters:
                norms, there = _to_host(norms_of(weights.gradients(step)))
            found = [places[names[parameter]] for parameter in weights.parameters]
            report = self._open.setdefault(step, _RankReport())
            report.stages.append(_StageReport(found, norms, there, weights.learning_rates()))
            if decision is not None:
                report.norm, report.there = _to_host(decision.norm)

    def reach(self, stage: int, step: int) -> None:
        """Say that `stage` begins a forward of `step`."""
        if self._transport.rank != self._teller or stage == self._last:
            self._tell(step - self._lag)

    def finish(self) -> None:
        """Tell of all steps; the pipeline is empty."""
        self._tell(max(self._open, default=0))
        wait_for(self._teller, [pending for _, pending in self._sent])
        self._sent.clear()

    def _tell(self, newest: int) -> None:
        """Tell of steps up to `newest`, as far as all stages of this rank have updated."""
        for step in sorted(self._open):
            if step > newest or len(self._open[step].stages) < self._hosted:
                return
            with self._uncounted():
                report = self._open.pop(step)
                if self._transport.rank == self._teller:
                    self._told(step, *self._heard(report))
                else:
                    self._send(report)

    def _send(self, report: _RankReport) -> None:
        """To the teller, which has received all but the last few."""
        row = self._row(report)
        if row.numel():
            if len(self._sent) > self._lag:
                wait_for(self._teller, [self._sent.popleft()[1]])
            self._sent.append((row, self._transport.send(row, self._teller, self._tag)))

    def _heard(self, report: _RankReport) -> tuple[float, tuple[float, ...]]:
        """Norm and learning rates of a step."""
        rows = {self._teller: self._row(report)}
        for rank in self._layout.hosts:
            if rank != self._teller:
                rows[rank] = torch.empty(2, len(self._layout.ranks[rank]), dtype=torch.float64)
        others = [
            (rank, row) for rank, row in rows.items() if rank != self._teller and row.numel()
        ]
        pending = [(rank, self._transport.receive(row, rank, self._tag)) for rank, row in others]
        for rank, message in pending:
            wait_for(rank, [message])
        rates = {rate for row in rows.values() for rate in row[1].tolist()}
        if report.there is not None:
            self._settle(report.there)
        norm = report.norm
        if norm is None:
            norm = self._layout.total({rank: row[0] for rank, row in rows.items()})
        return float(norm), tuple(sorted((x for x in rates if not math.isnan(x)), reverse=True))

    def _row(self, report: _RankReport) -> Tensor:
        """Norms and learning rates of this rank's parameters by ascending place; float64."""
        own = self._layout.ranks[self._transport.rank]
        index = {place: number for number, place in enumerate(own)}
        row = torch.full((2, len(own)), _NONE, dtype=torch.float64)
        for stage in report.stages:
            numbers = [index[place] for place in stage.places]
            if stage.norms is not None:
                if stage.there is not None:
                    self._settle(stage.there)
                row[0, numbers] = stage.norms
            row[1, numbers] = torch.tensor(stage.rates, dtype=torch.float64)
        return row


def _to_host(norms: Tensor) -> tuple[Tensor, Any]:
    """`norms` on the host, and the event behind which they are there; None on the processor."""
    if not norms.is_cuda:
        return norms, None
    host = torch.empty_like(norms, device="cpu", pin_memory=True)
    host.copy_(norms, non_blocking=True)
    return host, torch.cuda.current_stream(norms.device).record_event()
