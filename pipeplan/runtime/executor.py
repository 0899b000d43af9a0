"""The executor: one thread walks a rank's list of actions. It decides nothing.

Every tensor is alive exactly between two actions that the program names (docs/reference/model.md,
M4, M5): those of boundaries as `boundary_tensors` says, one that is offloaded (H6) not from FREE_O
to PREFETCH. So the bytes follow from the list, not from the clock (O7).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice

from pipeplan.errors import InternalError, PipeplanError, RankError, is_out_of_memory
from pipeplan.program import Action, ActionKind, Pattern
from pipeplan.runtime.boundary_tensors import BoundaryTensors
from pipeplan.runtime.data.feed import Feed
from pipeplan.runtime.interfaces import (
    HostedStage,
    ImmediateSteps,
    MemoryMeter,
    Observer,
    StepPolicy,
)
from pipeplan.runtime.losses import Losses
from pipeplan.runtime.supervision.failure_attribution import RankActivity
from pipeplan.runtime.supervision.flight_recorder import FlightRecorder
from pipeplan.runtime.supervision.run_ahead import RunAhead
from pipeplan.runtime.supervision.stop_consensus import StopConsensus
from pipeplan.runtime.transport.base import PeerLostError, Transport
from pipeplan.runtime.transport.endpoints import StageEndpoints
from pipeplan.units import format_ns

_COMPUTES = (ActionKind.F, ActionKind.B, ActionKind.I, ActionKind.W, ActionKind.OPT)
_BACKWARDS = (ActionKind.B, ActionKind.I)
"""What gives the gradients of a stage's inputs."""
_OUT_OF_MEMORY = (
    "The plan has room for what it counts: compare with `pipeplan show PLAN`, and plan with a"
    " larger --reserve, or with --recompute auto."
)
_STEPS, _LEAST = 4, 4096
"""How many steps, and how many actions at least, a recorder keeps for the report of a run."""


def _recorded(pattern: Pattern, rank: int) -> int:
    """How many of its last actions a rank keeps."""
    return max(_LEAST, _STEPS * len(pattern.ranks[rank]) * pattern.microbatches // pattern.k)


class Executor:
    """Runs one rank of a pattern."""

    def __init__(
        self,
        pattern: Pattern,
        stages: Mapping[int, HostedStage],
        endpoints: Mapping[int, StageEndpoints],
        feed: Feed,
        transport: Transport,
        observer: Observer,
        consensus: StopConsensus,
        recorder: FlightRecorder | None = None,
        updates: StepPolicy | None = None,
        ahead: RunAhead | None = None,
    ) -> None:
        """Takes what the rank hosts.

        Args:
            pattern: of all ranks.
            stages: those this rank hosts, by index.
            endpoints: their messages, by index.
            feed: gives inputs and targets.
            transport: to the other ranks.
            observer: is told losses, backwards and updates.
            consensus: asked before each step whether all ranks shall stop there.
            recorder: keeps the last actions, if not in real time.
            updates: when stages update, if not always at their OPT.
            ahead: how far this process may be ahead of a GPU, if one computes.
        """
        self.ahead = ahead or RunAhead(lambda: None)
        self.recorder = recorder or FlightRecorder(_recorded(pattern, transport.rank))
        self._pattern = pattern
        self._stages = stages
        self._feed = feed
        self._transport = transport
        self._observer = observer
        self._losses = Losses(pattern.microbatches, observer.loss, settle=self.ahead.settle)
        self._consensus = consensus
        self._updates = updates or ImmediateSteps(stages, observer)
        self._last = max(max(hosted, default=-1) for hosted in pattern.hosted)
        self._boundaries = BoundaryTensors(endpoints, transport, self.recorder.now)
        self._meter = MemoryMeter()
        self._table: dict[ActionKind, Callable[[int, int], None]] = {
            ActionKind.F: self._forward,
            ActionKind.B: self._backward,
            ActionKind.I: self._input_backward,
            ActionKind.W: self._weight_backward,
            ActionKind.OFFLOAD: self._offload,
            ActionKind.FREE_O: self._free,
            ActionKind.PREFETCH: self._prefetch,
            **self._boundaries.actions,
        }

    def watch(self, meter: MemoryMeter) -> None:
        """Tell `meter` of the steps from now on, and of the actions of those that it samples."""
        self._meter = self._boundaries.meter = meter

    def run(self, first: int, steps: int) -> int:
        """Train steps first..first+steps-1, from an empty pipeline to an empty one.

        Returns:
            The number of steps done: fewer than `steps` if the consensus stopped the ranks. One
            without stages does nothing and asks nobody: it returns `steps`.

        Raises:
            RankError: if an action failed; names rank, action, micro-batch and peer.
        """
        executed, begun = 0, first
        actions = self._unrolled(first, steps)
        self._updates.begin(first)
        while (action := next(actions, None)) is not None:
            if action.microbatch is not None:
                step = action.microbatch // self._pattern.microbatches
                if step >= begun and not self._consensus.begin_step(step):
                    steps = step - first
                    actions = islice(self._unrolled(first, steps), executed, None)
                    continue
                if step >= begun:
                    self._meter.begin_step(step)
                    begun = step + 1
            if self._meter.samples:
                self._meter.begin(action)
                self._execute(action)
                self._meter.end(action)
            else:
                self._execute(action)
            executed += 1
        self._catch_up()
        self._losses.tell()
        self._updates.finish()
        self.recorder.current = None
        kept = self._consensus.kept(first + steps)
        if kept == first + steps:
            self._check_empty()
        else:
            self._updates.turn_back(kept)
        self._flush()
        return kept - first

    def _unrolled(self, first: int, steps: int) -> Iterator[Action]:
        size = self._pattern.microbatches
        return self._pattern.actions(self._transport.rank, steps * size, first * size)

    def _check_empty(self) -> None:
        """A program runs from empty to empty; anything left over is a bug of the program."""
        in_flight = sum(stage.in_flight for stage in self._stages.values())
        left = self._boundaries.held + in_flight
        if left:
            raise InternalError(
                f"rank {self._transport.rank}: the program ended with {left} tensors or graphs"
                " still held. Report this plan."
            )

    def _catch_up(self) -> None:
        """What comes behind a run may wait inside of CUDA: then there is nothing to wait for."""
        try:
            self.ahead.drain()
        except PeerLostError as error:
            raise self._lost(error) from error

    def _lost(self, error: PeerLostError, action: Action | None = None) -> RankError:
        """Names the action that the GPU or this process was at, and whom that waited for."""
        action = self.ahead.missing or action
        assert action is not None
        return RankError(self._failure(self._place(action), error), self._peers(action))

    def _flush(self) -> None:
        """What this rank sent must arrive also if its process ends now."""
        try:
            self._transport.flush()
        except PeerLostError as error:
            raise RankError(self._failure("the end of a run", error)) from error

    def _execute(self, action: Action) -> None:
        start, waited = self.recorder.begin(action), self._boundaries.waited_ns
        try:
            if action.microbatch is None:
                if action.stage == self._last:
                    self._losses.tell()
                self._updates.end_step(action.stage)
            else:
                self._table[action.kind](action.stage, action.microbatch)
            if action.kind in _COMPUTES:
                self.ahead.computed(action)
        except InternalError as error:
            place = self._place(action)
            raise InternalError(f"rank {self._transport.rank}: {place}: {error}") from error
        except PipeplanError:
            raise
        except PeerLostError as error:
            raise self._lost(error, action) from error
        except Exception as error:
            raise RankError(self._failure(self._place(action), error)) from error
        end = self.recorder.end(start, self._boundaries.waited_ns - waited)
        if action.kind in _BACKWARDS and action.stage == self._last:
            assert action.microbatch is not None
            if self._dropped(action.microbatch):
                return
            self._observer.backward(action.microbatch, end)

    def _dropped(self, microbatch: int) -> bool:
        return self._consensus.dropped(microbatch // self._pattern.microbatches)

    def _forward(self, stage: int, microbatch: int) -> None:
        if not self._dropped(microbatch):
            self._updates.before_forward(stage, microbatch // self._pattern.microbatches)
        inputs = self._boundaries.take_inputs(stage, microbatch) if stage else None
        if self._dropped(microbatch):
            outputs = self._boundaries.dropped_outputs(stage)
        else:
            if inputs is None:
                inputs = self._feed.input(microbatch)
            outputs = self._stages[stage].forward(microbatch, inputs, self._feed.target)
            if stage == self._last:
                self._losses.add(microbatch, outputs[0])
        if stage != self._last:
            self._boundaries.give_outputs(stage, microbatch, outputs)

    def _backward(self, stage: int, microbatch: int) -> None:
        self._input_backward(stage, microbatch)
        self._added(stage, microbatch)

    def _weight_backward(self, stage: int, microbatch: int) -> None:
        if not self._dropped(microbatch):
            self._stages[stage].weight_backward(microbatch)
        self._added(stage, microbatch)

    def _added(self, stage: int, microbatch: int) -> None:
        """All gradients of weights of `microbatch` are there."""
        step, left = divmod(microbatch + 1, self._pattern.microbatches)
        if not left:
            self._updates.after_backwards(stage, step - 1)

    def _input_backward(self, stage: int, microbatch: int) -> None:
        last = stage == self._last
        gradients = [] if last else self._boundaries.take_gradients(stage, microbatch)
        if self._dropped(microbatch):
            arrived = self._boundaries.dropped_gradients(stage)
        else:
            arrived = self._stages[stage].backward(microbatch, gradients)
        if stage:
            self._boundaries.give_gradients(stage, microbatch, arrived)

    def _offload(self, stage: int, microbatch: int) -> None:
        if not self._dropped(microbatch):
            self._stages[stage].offload(microbatch)

    def _free(self, stage: int, microbatch: int) -> None:
        if not self._dropped(microbatch):
            self._stages[stage].free(microbatch)

    def _prefetch(self, stage: int, microbatch: int) -> None:
        if not self._dropped(microbatch):
            self._stages[stage].prefetch(microbatch)

    def doing(self, waits: bool) -> RankActivity:
        """What this rank does now, for others to read; `waits`: for other ranks."""
        action = self.ahead.missing or self.recorder.current
        if action is None:
            others = [rank for rank in range(self._transport.size) if rank != self._transport.rank]
            return RankActivity("between the steps", tuple(others) if waits else ())
        elapsed = format_ns(self.recorder.elapsed_ns())
        waits = waits or self._boundaries.missing or self.ahead.missing is not None
        peers = self._peers(action) if waits else ()
        return RankActivity(f"{self._place(action)} for {elapsed}", peers)

    def _peers(self, action: Action) -> tuple[int, ...]:
        """The rank at the other end of an action's message."""
        return self._boundaries.peers(action.kind, action.stage)

    def _place(self, action: Action) -> str:
        """Action, stage, micro-batch, peer."""
        number = "" if action.microbatch is None else f", micro-batch {action.microbatch}"
        peer = "".join(f", peer rank {peer}" for peer in self._peers(action))
        return f"action {action} (stage {action.stage}{number}{peer})"

    def _failure(self, place: str, error: Exception) -> str:
        """One line: rank, place, cause."""
        cause = " ".join(str(error).split("\n")[0].split())[:300]
        what = f"failed: {type(error).__name__}:"
        if isinstance(error, PeerLostError):
            what, cause = "lost its peer:", cause.partition(". ")[0]
        elif is_out_of_memory(error):
            cause = f"{cause} {_OUT_OF_MEMORY}"
        return f"rank {self._transport.rank}: {place} {what} {cause}"
