"""A schedule as values of all variables of the paper's ILP, for a solver to start from.

Only the schedule's stages, and its times modulo the period, are taken over. How many periods an op
runs behind follows from these by (23)-(30). A schedule that waits a period longer than it must
becomes one that does not, which needs no more bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from pipeplan.ilp.paper.instance import PaperInstance
from pipeplan.ilp.paper.variables import PaperVariables, Term
from pipeplan.ilp.schedule import Schedule
from pipeplan.plan import OpKind

_Key = TypeVar("_Key")


@dataclass(frozen=True, slots=True)
class _Window:
    """The period as the paper draws it: F_1 starts at 0, all ends lie in (0, T].

    Times are in ns; layers, tasks and messages are numbered from 1.

    Attributes:
        instance: In ns and bytes.
        period: T.
        gpu: GPU of each layer.
        start: tau_q.
        sent: tau~_q; of a message that stays on its GPU, the end of T_q.
    """

    instance: PaperInstance[int]
    period: int
    gpu: Mapping[int, int]
    start: Mapping[int, int]
    sent: Mapping[int, int]

    def together(self, task: int, other: int) -> bool:
        """(4): both run on one GPU."""
        instance = self.instance
        return self.gpu[instance.layer(task)] == self.gpu[instance.layer(other)]

    def before(self, task: int, other: int) -> bool:
        """(5)-(7): `task` is first in the window of their GPU."""
        return self.together(task, other) and self.start[task] < self.start[other]

    def link(self, message: int) -> frozenset[int]:
        """The GPUs that a message is on: two if it crosses a link."""
        instance = self.instance
        return frozenset(self.gpu[instance.layer(task)] for task in (message, message + 1))

    def same_link(self, message: int, other: int) -> bool:
        """(8)-(13): both cross one link."""
        return len(self.link(message)) == 2 and self.link(message) == self.link(other)

    def produced(self, message: int) -> int:
        """The end of the task before a message."""
        return self.start[message] + self.instance.duration[message]

    def arrived(self, message: int) -> int:
        """The end of a message."""
        crosses = len(self.link(message)) == 2
        return self.sent[message] + crosses * self.instance.transfer[message]

    def late(self, message: int) -> tuple[int, int, int, int]:
        """(v, v', v~, v~') of (23)-(30)."""
        wait = self.sent[message] - self.produced(message)
        next_wait = self.start[message + 1] - self.arrived(message)
        T = self.period
        return wait < 0, wait < -T, next_wait < 0, next_wait < -T

    def second_slots(self, message: int) -> tuple[bool, bool]:
        """Whether it occupies a buffer for longer than a period: (sender's, receiver's) (P5)."""
        v, v2, vc, vc2 = self.late(message)
        at_sender = self.arrived(message) - self.produced(message) + (v + v2) * self.period
        at_receiver = self.start[message + 1] - self.sent[message] + (vc + vc2) * self.period
        crosses = len(self.link(message)) == 2
        return crosses and at_sender > self.period, crosses and at_receiver > self.period

    def copies(self, layer: int) -> int:
        """Periods between F_layer and B_layer."""
        return sum(sum(self.late(q)) for q in range(layer, self.instance.backward(layer)))


def start_values(
    instance: PaperInstance[int], x: PaperVariables, schedule: Schedule, ns_per_unit: float
) -> dict[Term, float]:
    """The values of all variables of `x` that say `schedule`.

    Args:
        instance: In ns and bytes.
        x: The variables of its model.
        schedule: One micro-batch a period, in ns, nothing on the host.
        ns_per_unit: Of the model's times.
    """
    window = _window(instance, schedule)
    values: dict[Term, float] = {x.period: window.period / ns_per_unit}

    def say(variables: Mapping[_Key, Term], value: Callable[[_Key], float]) -> None:
        values.update((variable, float(value(key))) for key, variable in variables.items())

    def say_all(
        groups: Mapping[_Key, tuple[Term, ...]], value: Callable[[_Key], tuple[int, ...]]
    ) -> None:
        for key, variables in groups.items():
            values.update(zip(variables, map(float, value(key)), strict=True))

    say(x.task_start, lambda q: window.start[q] / ns_per_unit)
    say(x.message_start, lambda q: window.sent[q] / ns_per_unit)
    say(x.same_gpu, lambda pair: window.together(*pair))
    say(x.first_of_gpu, lambda layer: not any(window.together(i, layer) for i in range(1, layer)))
    say(x.task_order, lambda pair: window.before(*pair))
    say(x.same_link, lambda pair: window.same_link(*pair))
    say(x.message_order, lambda pair: _sent_first(window, *pair))
    say_all(x.late, window.late)
    copies = {layer: window.copies(layer) for layer in x.first_of_gpu}
    say(x.stored, lambda pair: copies[pair[1]] * window.together(*pair))
    say(x.direct, lambda pair: _waits(window, *pair))
    say(x.buffer, lambda pair: window.together(*pair) != window.together(pair[0], pair[1] + 1))
    say_all(x.second_slot, window.second_slots)
    say_all(x.second_slot_here, lambda pair: _second_slots_here(window, *pair))
    return values


def _sent_first(window: _Window, message: int, other: int) -> bool:
    """(14)-(16); one without length that is sent as another one begins goes first."""
    times = [(window.sent[q], window.arrived(q)) for q in (message, other)]
    return window.same_link(message, other) and times[0] < times[1]


def _waits(window: _Window, running: int, message: int) -> bool:
    """(22): the output of T_message waits on its GPU for the next task while another runs."""
    producer, consumer = message, message + 1
    orders = (
        window.before(producer, running),
        window.before(running, consumer),
        window.before(consumer, producer),
    )
    return sum(orders) > 1


def _second_slots_here(window: _Window, here: int, message: int) -> tuple[bool, bool]:
    sender, receiver = window.second_slots(message)
    return (
        sender and window.together(here, message),
        receiver and window.together(here, message + 1),
    )


def _window(instance: PaperInstance[int], schedule: Schedule) -> _Window:
    """The schedule's layers one by one, moved into one period."""
    gpu = {
        layer + 1: stage.gpu
        for stage in schedule.stages
        for layer in range(stage.first, stage.last + 1)
    }
    tasks, messages = _absolute(instance, schedule)
    origin, period = tasks[1], schedule.period

    def placed(time: int, length: int) -> int:
        """The start whose end lies in (0, T]."""
        return (time - origin + length - 1) % period + 1 - length

    start = {q: placed(time, instance.duration[q]) for q, time in tasks.items()}
    sent = {q: start[q] + instance.duration[q] for q in range(1, 2 * instance.layers)}
    sent |= {q: placed(time, instance.transfer[q]) for q, time in messages.items()}
    return _Window(instance, period, gpu, start, sent)


def _absolute(
    instance: PaperInstance[int], schedule: Schedule
) -> tuple[dict[int, int], dict[int, int]]:
    """When each task, and each message that crosses GPUs, of one micro-batch starts."""
    tasks: dict[int, int] = {}
    messages: dict[int, int] = {}
    for stage in schedule.stages:
        first, last = stage.first + 1, stage.last + 1
        for kind, send, begin, end in (
            (OpKind.F, OpKind.SEND_F, first, last),
            (OpKind.B, OpKind.SEND_B, instance.backward(last), instance.backward(first)),
        ):
            (time,) = schedule.times[kind, stage.id]
            for task in range(begin, end + 1):
                tasks[task] = time
                time += instance.duration[task]
            if (send, stage.id) in schedule.times:
                (messages[end],) = schedule.times[send, stage.id]
    return tasks, messages
