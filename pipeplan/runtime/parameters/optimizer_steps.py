"""When the stages of a rank update: at once, or when other stages have told what they must.

An OPT ends a step of its stage: the gradients of the step are complete. Where nothing crosses
stages the update follows at once. Clipping by global norm and loss scaling need the gradients of
all stages, and a copy of a shared parameter needs its owner's. Then under flush the update follows
when all stages of the rank have ended the step; under 2bw just before the stage's first forward
that reads its result, two steps later. Nothing waits in a circle: every stage ends step t, in
the order of the plan, before any stage begins the step that reads version t+1
(docs/explanation/runtime.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn

from pipeplan.errors import InternalError, RankError
from pipeplan.runtime.interfaces import Observer, StepPolicy
from pipeplan.runtime.parameters.buffer_snapshots import BufferSnapshots
from pipeplan.runtime.parameters.gradient_clipping import StepDecision, StepDecisions
from pipeplan.runtime.parameters.replicas import Replicas
from pipeplan.runtime.parameters.step_reports import StepReports
from pipeplan.runtime.parameters.tied_gradients import TiedGradients
from pipeplan.runtime.parameters.weights import Weights
from pipeplan.runtime.supervision.stop_consensus import NeverStop, StopConsensus
from pipeplan.runtime.transport.base import PeerLostError


class StageLayers(Protocol):
    """What a stage is made of, as far as its updates need it."""

    @property
    def layers(self) -> tuple[nn.Module, ...]:
        """Its layers, in chain order."""


class SteppedStage(Protocol):
    """A stage as its updates see it."""

    names: dict[nn.Parameter, str]
    """Name in the user's model of each parameter."""

    @property
    def spec(self) -> StageLayers:
        """What it is made of."""

    @property
    def weights(self) -> Weights:
        """The parameters it owns."""

    @property
    def units(self) -> tuple[Weights, ...]:
        """What is updated, each by optimizers of its own."""

    def begin(self) -> None:
        """A run starts from an empty pipeline."""

    def end_step(self) -> None:
        """The gradients of a step are complete."""


class OptimizerSteps(StepPolicy):
    """The updates of one rank."""

    def __init__(
        self,
        stages: Mapping[int, SteppedStage],
        tied: TiedGradients,
        decisions: StepDecisions | None,
        observer: Observer,
        rank: int,
        replicas: Replicas | None = None,
        consensus: StopConsensus | None = None,
        reports: StepReports | None = None,
    ) -> None:
        """Takes the hosted stages.

        Args:
            stages: by index.
            tied: gradients of shared parameters.
            decisions: None where nothing depends on all gradients.
            observer: is told of each stage's update.
            rank: this rank, for messages.
            replicas: None where there is one.
            consensus: asked before each update; None: nobody stops.
            reports: tell of whole steps; None: nobody wants to hear of them.
        """
        self._consensus = consensus or NeverStop()
        self._past = {index: BufferSnapshots(stage.spec.layers) for index, stage in stages.items()}
        self._replicas = replicas
        self._stages = stages
        self._tied = tied
        self._decisions = decisions
        self._observer = observer
        self._reports = reports
        self._rank = rank
        self._ended: dict[int, int] = {}
        self._open: list[tuple[int, int]] = []
        """Stages and steps whose averages may still travel."""
        self._shares: dict[tuple[int, int], Tensor | None] = {}
        """Of these, which share of the replicas each gradient has reached."""
        self._completed: set[int] = set()
        """Stages whose gradients of the open step are complete before its OPT."""
        self._drains = all(stage.weights.versions == 1 for stage in stages.values())
        self._consensus.expect(sum(past.copy_s for past in self._past.values()))
        if not self._drains and self._share_buffers():
            self._consensus.finish_all()

    def begin(self, first: int) -> None:
        """Say that a run starts from an empty pipeline at step `first`."""
        self._ended = dict.fromkeys(self._stages, first)
        self._tied.check_hooks()
        for stage in self._stages.values():
            stage.begin()

    def before_forward(self, stage: int, step: int) -> None:
        """Make the version that a forward of `step` reads, unless the consensus drops it."""
        with self._naming_peers(stage):
            if not self._make_version(stage, step):
                return
            self._tied.post(stage)
            if self._reports:
                self._reports.reach(stage, step)
        if self._consensus.may_drop(step):
            self._past[stage].remember(step, since=self._stages[stage].weights.version)

    def after_backwards(self, stage: int, step: int) -> None:
        """Begin to average what needs nothing of other stages while the pipeline drains."""
        if self._replicas and self._drains and not self._tied.has(stage):
            with self._naming_peers(stage):
                self._complete(stage, step)
            self._completed.add(stage)

    def end_step(self, stage: int) -> None:
        """The gradients of the oldest open step of `stage` are complete."""
        step = self._ended[stage]
        self._ended[stage] = step + 1
        with self._naming_peers(stage):
            # A dropped step has no forward that made it, and its gradients lie where those do
            # which it is made of.
            self._make_version(stage, step)
            if stage not in self._completed:
                self._complete(stage, step)
            self._open.append((stage, step))
            drained = self._drained(step)
            if drained or not (self._replicas and self._drains):
                self._conclude(step)
        if drained:
            self._settle_all()

    def _drained(self, step: int) -> bool:
        """Whether no stage of this rank has begun the next step: then waiting costs nothing."""
        return self._drains and all(ended > step for ended in self._ended.values())

    def finish(self) -> None:
        """Make all updates that are still to come, and tell of them; the pipeline is empty."""
        self._settle_all()
        for stage in self._stages.values():
            for weights in stage.units:
                weights.settle()
        if self._reports:
            with self._naming_peers(min(self._stages, default=0)):
                self._reports.finish()

    def _settle_all(self) -> None:
        """Make all updates that are still to come; nothing is in flight on this rank."""
        for stage in sorted(self._stages, reverse=True):
            with self._naming_peers(stage):
                for weights in self._stages[stage].units:
                    while weights.version < self._ended[stage]:
                        if not self._settle(stage, weights):
                            break
        with self._naming_peers(min(self._stages, default=0)):
            self._tied.finish()

    def turn_back(self, step: int) -> None:
        """Leave the stages as they were before `step`, which the consensus has dropped.

        Raises:
            InternalError: if one of them has other weights.
        """
        for index, stage in self._stages.items():
            for weights in stage.units:
                if weights.version != step:
                    raise InternalError(
                        f"stage {index}: dropped step {step} with weights of {weights.version}"
                        " steps. Report this plan."
                    )
            self._past[index].turn_back(step)
        if self._decisions:
            with self._naming_peers(min(self._stages, default=0)):
                self._decisions.forget()

    def _make_version(self, stage: int, step: int) -> bool:
        """Make the version that a forward of `step` reads; False if the consensus drops it."""
        return all(
            self._settle(stage, weights)
            for weights in self._stages[stage].units
            for _ in range(weights.version, step - (weights.versions - 1))
        )

    def _share_buffers(self) -> bool:
        """Whether two stages have a buffer in common: then each is at another step."""
        owners: dict[int, int] = {}
        return any(
            owners.setdefault(id(tensor), index) != index
            for index, past in self._past.items()
            for tensor in past.buffers().values()
        )

    def _complete(self, stage: int, step: int) -> None:
        """Make the mean gradients of `stage`, and begin to average them over the replicas."""
        self._stages[stage].end_step()
        weights = self._stages[stage].weights
        self._tied.offer(stage, step)
        self._tied.collect(stage, step)
        scaler = self._decisions.scaler if self._decisions else None
        known = scaler and not self._consensus.dropped(step)
        weights.finish(step, scaler.of(step) if scaler and known else 1.0)
        if self._replicas:
            gradients = weights.gradients(step)
            self._shares[stage, step] = shares = _shares(gradients, weights.reached(step))
            self._replicas.begin(gradients if shares is None else [*gradients, shares])

    def _conclude(self, last: int) -> None:
        """Go on with the gradients of the stages that have ended a step, `last` the newest.

        Under flush averages have until the rank has drained: they travel beside its backwards.
        """
        if self._replicas:
            self._replicas.settle()
        for stage, step in self._open:
            self._hear(stage, step)
            self._tied.share(stage, step)
            self._go_on(stage, step)
        self._open.clear()
        self._completed.clear()
        if self._decisions and all(ended > last for ended in self._ended.values()):
            self._decisions.send(last)

    def _hear(self, stage: int, step: int) -> None:
        """A gradient that has reached one replica has reached all."""
        shares = self._shares.pop((stage, step), None)
        if shares is not None:
            self._stages[stage].weights.say_reached(step, (shares > 0).tolist())

    def _go_on(self, stage: int, step: int) -> None:
        weights = self._stages[stage].weights
        if self._decisions is None:
            if self._consensus.begin_update(step):
                self._update(stage, weights, None)
            return
        names = self._stages[stage].names
        pairs = zip(weights.parameters, weights.gradients(step), strict=True)
        self._decisions.add(step, {names[parameter]: gradient for parameter, gradient in pairs})

    def _settle(self, stage: int, weights: Weights) -> bool:
        """Make the next version; False if the consensus has dropped its step."""
        step = weights.version
        if not self._consensus.begin_update(step):
            return False
        if weights is not self._stages[stage].weights:
            self._tied.await_totals(stage, step)
        self._update(stage, weights, self._decisions.wait(step) if self._decisions else None)
        return True

    def _update(self, stage: int, weights: Weights, decision: StepDecision | None) -> None:
        """Make the next version as decided; None where nothing depends on other stages."""
        step, own = weights.version, weights is self._stages[stage].weights
        if own and self._reports:
            self._reports.add(self._stages[stage].names, weights, decision)
        if decision is None:
            weights.apply(step)
        else:
            weights.apply(step, decision.factor, skip=decision.skip)
        if own:
            self._observer.updated(stage, step)

    @contextmanager
    def _naming_peers(self, stage: int) -> Iterator[None]:
        try:
            yield
        except PeerLostError as error:
            cause = str(error).partition(". ")[0]
            whom, peers = "a peer", tuple[int, ...]()
            if error.peer is not None:
                whom, peers = f"peer rank {error.peer}", (error.peer,)
            raise RankError(
                f"rank {self._rank}: the update of stage {stage} lost {whom}: {cause}", peers
            ) from error


def _shares(gradients: Sequence[Tensor], reached: Sequence[bool]) -> Tensor | None:
    """Numbers whose mean over replicas tells which of `gradients` any was `reached` by."""
    if not gradients:
        return None
    return torch.tensor(reached, dtype=torch.float32, device=gradients[0].device)
