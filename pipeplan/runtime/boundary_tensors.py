"""The tensors of a rank's boundaries: on their way to it, from it, and between two of its stages.

Each is alive exactly between two actions (docs/reference/model.md, M4, M5): a received one from
its RECV to the op that takes it, a sent one from the op that gives it to its FREE, one between two
stages of this rank from producer to consumer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from pipeplan.layout import travelling
from pipeplan.memory_terms import Purpose
from pipeplan.program import ActionKind
from pipeplan.runtime.interfaces import MemoryMeter
from pipeplan.runtime.transport.base import Pending, Transport, wait_all
from pipeplan.runtime.transport.endpoints import Endpoint, StageEndpoints, empty
from pipeplan.split_model import TensorSpec


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


_Key = tuple[int, int]
"""(stage, micro-batch)."""


class BoundaryTensors:
    """What the actions of messages do, and what ops take and give."""

    def __init__(
        self,
        endpoints: Mapping[int, StageEndpoints],
        transport: Transport,
        now: Callable[[], int],
    ) -> None:
        """Holds nothing yet.

        Args:
            endpoints: messages of the stages of this rank, by index.
            transport: to the other ranks.
            now: tells the time, in ns.
        """
        self._now = now
        self.waited_ns = 0
        """How long messages were waited for, in all."""
        self._endpoints = endpoints
        self._transport = transport
        self.meter = MemoryMeter()
        """Told of what stages give while it samples."""
        self.missing = False
        """Whether a peer is waited for; it stays true where that was in vain."""
        self._inputs: dict[_Key, _Message] = {}
        self._outputs: dict[_Key, _Message] = {}
        self._output_gradients: dict[_Key, _Message] = {}
        self._input_gradients: dict[_Key, _Message] = {}
        self.actions: dict[ActionKind, Callable[[int, int], None]] = {
            ActionKind.RECV_F: self._receive_input,
            ActionKind.RECV_B: self._receive_gradient,
            ActionKind.SEND_F: self._send_output,
            ActionKind.SEND_B: self._send_gradient,
            ActionKind.FREE_F: self._free_output,
            ActionKind.FREE_B: self._free_gradient,
        }
        """What messages do, for a stage and a micro-batch."""

    @property
    def held(self) -> int:
        """Boundaries of micro-batches whose tensors are held."""
        boxes = (self._inputs, self._outputs, self._output_gradients, self._input_gradients)
        return sum(map(len, boxes))

    def take_inputs(self, stage: int, microbatch: int) -> list[Tensor]:
        """What the stage before gave, once it is there; it is held no more."""
        return self._arrived(self._inputs.pop((stage, microbatch)))

    def take_gradients(self, stage: int, microbatch: int) -> list[Tensor]:
        """Gradients that the stage behind gave, once they are there; they are held no more."""
        return self._arrived(self._output_gradients.pop((stage, microbatch)))

    def give_outputs(self, stage: int, microbatch: int, tensors: list[Tensor]) -> None:
        """To the stage behind: directly on this rank, else kept until they are sent."""
        output = self._endpoints[stage].output
        if output is None:
            purpose = Purpose.DIRECT_F
            given = self._inputs[stage + 1, microbatch] = _Message(tensors)
        else:
            purpose = Purpose.SENT_F
            given = self._outputs[stage, microbatch] = _to_send(tensors, output.specs)
        if self.meter.samples:
            self.meter.hand_on(purpose, stage, microbatch, given.tensors)

    def give_gradients(self, stage: int, microbatch: int, tensors: list[Tensor]) -> None:
        """To the stage before: directly on this rank, else kept until they are sent."""
        input_gradient = self._endpoints[stage].input_gradient
        if input_gradient is None:
            purpose = Purpose.DIRECT_B
            given = self._output_gradients[stage - 1, microbatch] = _Message(tensors)
        else:
            purpose = Purpose.SENT_B
            sent = _to_send(tensors, input_gradient.specs)
            given = self._input_gradients[stage, microbatch] = sent
        if self.meter.samples:
            self.meter.hand_on(purpose, stage, microbatch, given.tensors)

    def dropped_outputs(self, stage: int) -> list[Tensor]:
        """What travels in place of outputs of a micro-batch that is dropped."""
        return _anything(self._endpoints[stage].output)

    def dropped_gradients(self, stage: int) -> list[Tensor]:
        """What travels in place of gradients of a micro-batch that is dropped."""
        return _anything(self._endpoints[stage].input_gradient)

    def peers(self, kind: ActionKind, stage: int) -> tuple[int, ...]:
        """The rank at the other end of an action's message."""
        endpoints = self._endpoints[stage]
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
        }.get(kind)
        return (endpoint.peer,) if endpoint else ()

    def _receive_input(self, stage: int, microbatch: int) -> None:
        self._inputs[stage, microbatch] = self._receive(self._endpoints[stage].input)

    def _receive_gradient(self, stage: int, microbatch: int) -> None:
        endpoint = self._endpoints[stage].output_gradient
        self._output_gradients[stage, microbatch] = self._receive(endpoint)

    def _receive(self, endpoint: Endpoint | None) -> _Message:
        assert endpoint is not None
        buffers = [empty(spec, endpoint.device) for spec in endpoint.specs]
        rows = zip(buffers, endpoint.specs, endpoint.tags, strict=True)
        return _Message(
            buffers,
            [
                self._transport.receive(travelling(buffer, spec.order), endpoint.peer, tag)
                for buffer, spec, tag in rows
            ],
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
        self.missing = True
        begin = self._now()
        tensors = message.arrived()
        self.waited_ns += self._now() - begin
        self.missing = False
        return tensors


def _to_send(tensors: list[Tensor], specs: tuple[TensorSpec, ...]) -> _Message:
    pairs = zip(tensors, specs, strict=True)
    return _Message([travelling(tensor, spec.order) for tensor, spec in pairs])


def _anything(endpoint: Endpoint | None) -> list[Tensor]:
    """What travels over `endpoint` for a micro-batch that is dropped; nothing to the own rank."""
    return [] if endpoint is None else [empty(spec, endpoint.device) for spec in endpoint.specs]
