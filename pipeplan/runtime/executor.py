"""The executor: one thread walks a rank's list of actions. It decides nothing.

Every tensor is alive exactly between two actions that the program names (docs/reference/model.md,
M4, M5): a received one from its RECV to its F, B or I, a sent one from its F, B or I to its FREE,
one between two stages of this rank from producer to consumer, one that is offloaded (H6) not from
FREE_O to PREFETCH. So the bytes follow from the list, not from the clock (O7).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

from torch import Tensor

from pipeplan.errors import InternalError, PipeplanError, RankError
from pipeplan.program import Action, ActionKind, Pattern
from pipeplan.runtime.data.feed import Feed
from pipeplan.runtime.interfaces import HostedStage, ImmediateSteps, Observer, StepPolicy
from pipeplan.runtime.losses import Losses
from pipeplan.runtime.supervision.failure_attribution import RankActivity
from pipeplan.runtime.supervision.flight_recorder import FlightRecorder
from pipeplan.runtime.supervision.run_ahead import RunAhead
from pipeplan.runtime.supervision.stop_consensus import StopConsensus
from pipeplan.runtime.transport.base import PeerLostError, Pending, Transport, wait_all
from pipeplan.runtime.transport.endpoints import Endpoint, StageEndpoints, empty
from pipeplan.units import format_ns


@dataclass(slots=True)
class _Message:
    """Tensors of one boundary and, while they travel, the messages that carry them."""

    tensors: list[Tensor]
    pending: list[Pending] = field(default_factory=list)

    def arrived(self) -> list[Tensor]:
        """The tensors, once all have travelled; the message forgets what carried them."""
        wait_all(self.pending)
        self.pending.clear()
        return self.tensors


_COMPUTES = (ActionKind.F, ActionKind.B, ActionKind.I, ActionKind.W, ActionKind.OPT)
_BACKWARDS = (ActionKind.B, ActionKind.I)
"""What gives the gradients of a stage's inputs."""
_Key = tuple[int, int]
"""(stage, micro-batch)."""


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
        self.recorder = recorder or FlightRecorder()
        self._pattern = pattern
        self._stages = stages
        self._endpoints = endpoints
        self._feed = feed
        self._transport = transport
        self._observer = observer
        self._losses = Losses(pattern.microbatches, observer.loss, settle=self.ahead.settle)
        self._consensus = consensus
        self._updates = updates or ImmediateSteps(stages, observer)
        self._last = max(max(hosted, default=-1) for hosted in pattern.hosted)
        self._missing = False  # stays true where a peer was waited for in vain
        self._inputs: dict[_Key, _Message] = {}
        self._outputs: dict[_Key, _Message] = {}
        self._output_gradients: dict[_Key, _Message] = {}
        self._input_gradients: dict[_Key, _Message] = {}
        self._table: dict[ActionKind, Callable[[int, int], None]] = {
            ActionKind.F: self._forward,
            ActionKind.B: self._backward,
            ActionKind.I: self._input_backward,
            ActionKind.W: self._weight_backward,
            ActionKind.RECV_F: self._receive_input,
            ActionKind.RECV_B: self._receive_gradient,
            ActionKind.SEND_F: self._send_output,
            ActionKind.SEND_B: self._send_gradient,
            ActionKind.FREE_F: self._free_output,
            ActionKind.FREE_B: self._free_gradient,
            ActionKind.OFFLOAD: self._offload,
            ActionKind.FREE_O: self._free,
            ActionKind.PREFETCH: self._prefetch,
        }

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
                begun = max(begun, step + 1)
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
        boxes = (self._inputs, self._outputs, self._output_gradients, self._input_gradients)
        left = sum(map(len, boxes)) + sum(stage.in_flight for stage in self._stages.values())
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
        start = self.recorder.begin(action)
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
        end = self.recorder.end(start)
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
        inputs = self._arrived(self._inputs.pop((stage, microbatch))) if stage else None
        if self._dropped(microbatch):
            outputs = _anything(self._endpoints[stage].output)
        else:
            if inputs is None:
                inputs = self._feed.input(microbatch)
            outputs = self._stages[stage].forward(microbatch, inputs, self._feed.target)
            if stage == self._last:
                self._losses.add(microbatch, outputs[0])
        if stage != self._last:
            key, next_key = (stage, microbatch), (stage + 1, microbatch)
            endpoint = self._endpoints[stage].output
            self._hand_on(outputs, endpoint, self._inputs, next_key, self._outputs, key)

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
        key = (stage, microbatch)
        last = stage == self._last
        gradients = [] if last else self._arrived(self._output_gradients.pop(key))
        if self._dropped(microbatch):
            arrived = _anything(self._endpoints[stage].input_gradient)
        else:
            arrived = self._stages[stage].backward(microbatch, gradients)
        if stage:
            endpoint, next_key = self._endpoints[stage].input_gradient, (stage - 1, microbatch)
            self._hand_on(
                arrived, endpoint, self._output_gradients, next_key, self._input_gradients, key
            )

    def _offload(self, stage: int, microbatch: int) -> None:
        if not self._dropped(microbatch):
            self._stages[stage].offload(microbatch)

    def _free(self, stage: int, microbatch: int) -> None:
        if not self._dropped(microbatch):
            self._stages[stage].free(microbatch)

    def _prefetch(self, stage: int, microbatch: int) -> None:
        if not self._dropped(microbatch):
            self._stages[stage].prefetch(microbatch)

    @staticmethod
    def _hand_on(
        tensors: list[Tensor],
        endpoint: Endpoint | None,
        local: dict[_Key, _Message],
        local_key: _Key,
        outbox: dict[_Key, _Message],
        key: _Key,
    ) -> None:
        """To the neighbour on this rank directly, else into the outbox until it is sent."""
        if endpoint is None:
            local[local_key] = _Message(tensors)
        else:
            outbox[key] = _Message([tensor.contiguous() for tensor in tensors])

    def _receive_input(self, stage: int, microbatch: int) -> None:
        self._inputs[stage, microbatch] = self._receive(self._endpoints[stage].input)

    def _receive_gradient(self, stage: int, microbatch: int) -> None:
        endpoint = self._endpoints[stage].output_gradient
        self._output_gradients[stage, microbatch] = self._receive(endpoint)

    def _receive(self, endpoint: Endpoint | None) -> _Message:
        assert endpoint is not None
        buffers = [empty(spec, endpoint.device) for spec in endpoint.specs]
        pairs = zip(buffers, endpoint.tags, strict=True)
        return _Message(
            buffers, [self._transport.receive(buffer, endpoint.peer, tag) for buffer, tag in pairs]
        )

    def _send_output(self, stage: int, microbatch: int) -> None:
        self._send(self._outputs[stage, microbatch], self._endpoints[stage].output)

    def _send_gradient(self, stage: int, microbatch: int) -> None:
        self._send(self._input_gradients[stage, microbatch], self._endpoints[stage].input_gradient)

    def _send(self, message: _Message, endpoint: Endpoint | None) -> None:
        assert endpoint is not None
        endpoint.check(message.tensors)
        for tensor, tag in zip(message.tensors, endpoint.tags, strict=True):
            message.pending.append(self._transport.send(tensor, endpoint.peer, tag))

    def _free_output(self, stage: int, microbatch: int) -> None:
        self._arrived(self._outputs.pop((stage, microbatch)))

    def _free_gradient(self, stage: int, microbatch: int) -> None:
        self._arrived(self._input_gradients.pop((stage, microbatch)))

    def _arrived(self, message: _Message) -> list[Tensor]:
        self._missing = True
        tensors = message.arrived()
        self._missing = False
        return tensors

    def doing(self, waits: bool) -> RankActivity:
        """What this rank does now, for others to read; `waits`: for other ranks."""
        action = self.ahead.missing or self.recorder.current
        if action is None:
            others = [rank for rank in range(self._transport.size) if rank != self._transport.rank]
            return RankActivity("between the steps", tuple(others) if waits else ())
        elapsed = format_ns(self.recorder.elapsed_ns())
        waits = waits or self._missing or self.ahead.missing is not None
        peers = self._peers(action) if waits else ()
        return RankActivity(f"{self._place(action)} for {elapsed}", peers)

    def _peers(self, action: Action) -> tuple[int, ...]:
        """The rank at the other end of an action's message."""
        endpoints = self._endpoints[action.stage]
        endpoint = {
            ActionKind.F: endpoints.input,
            ActionKind.RECV_F: endpoints.input,
            ActionKind.SEND_F: endpoints.output,
            ActionKind.FREE_F: endpoints.output,
            ActionKind.B: endpoints.output_gradient,
            ActionKind.I: endpoints.output_gradient,
            ActionKind.RECV_B: endpoints.output_gradient,
            ActionKind.SEND_B: endpoints.input_gradient,
            ActionKind.FREE_B: endpoints.input_gradient,
        }.get(action.kind)
        return (endpoint.peer,) if endpoint else ()

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
        return f"rank {self._transport.rank}: {place} {what} {cause}"


def _anything(endpoint: Endpoint | None) -> list[Tensor]:
    """What travels over `endpoint` for a micro-batch that is dropped; nothing to the own rank."""
    return [] if endpoint is None else [empty(spec, endpoint.device) for spec in endpoint.specs]
