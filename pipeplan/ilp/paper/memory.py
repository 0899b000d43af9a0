"""Constraints (22)-(36): bytes on the GPU of each task while it runs, and (R6) on request.

Also the second slot of a message buffer (P5): the paper reserves one slot whatever the wait, but
a message that waits longer than a period shares its buffer with the next one.
"""

from __future__ import annotations

from ortools.math_opt.python import mathopt

from pipeplan.ilp.paper.instance import PaperInstance
from pipeplan.ilp.paper.scheduling import cut, message_length
from pipeplan.ilp.paper.variables import PaperVariables, Term


def add(model: mathopt.Model, instance: PaperInstance[float], x: PaperVariables) -> None:
    """Add (22)-(36), the second slots that `x` has variables for, and the in-flight limit."""
    _shifts(model, instance, x)
    _direct(model, instance, x)
    _stored(model, instance, x)
    _buffers(model, instance, x)
    for message in x.second_slot:
        _second_slots(model, instance, x, message)
    for task in instance.tasks:
        model.add_linear_constraint(_bytes_during(instance, x, task) <= instance.memory)


def _shifts(model: mathopt.Model, instance: PaperInstance[float], x: PaperVariables) -> None:
    """(23)-(30): v = 1 if an op starts before its input is there, v' = 1 if a period before.

    Inside a GPU tau~ is free and could split a wait into one period too many, which (22) does not
    count; the last row (ours) keeps the shift there at what the order needs.
    """
    H, T = instance.horizon, x.period
    for q, (v, v2, vc, vc2) in x.late.items():
        following = x.task_start[q + 1]
        slack = x.message_start[q] - (x.task_start[q] + instance.duration[q])
        transfer, compute = instance.transfer[q], instance.duration[q + 1]
        slack_next = following - (x.message_start[q] + message_length(instance, x, q))
        for gap, first, second, length in (
            (slack, v, v2, transfer),
            (slack_next, vc, vc2, compute),
        ):
            model.add_linear_constraint(-gap + H * (1 - first) >= 0)
            model.add_linear_constraint(gap + (H + length) * first >= 0)
            model.add_linear_constraint(gap + T + length * second >= 0)
            model.add_linear_constraint(-gap - T + 2 * H * (1 - second) >= 0)
        wraps = x.before(instance, q + 1, q)
        model.add_linear_constraint(x.lateness(q) <= wraps + 4 * cut(instance, x, q))


def _direct(model: mathopt.Model, instance: PaperInstance[float], x: PaperVariables) -> None:
    """(22): the output of T_r waits for T_{r+1} on the GPU while T_q runs there."""
    for (q, r), waits in x.direct.items():
        model.add_linear_constraint(
            waits
            >= x.before(instance, r, q)
            + x.before(instance, q, r + 1)
            + x.before(instance, r + 1, r)
            - 1
        )


def _delay(instance: PaperInstance[float], x: PaperVariables, layer: int) -> Term:
    """Periods between F_layer and B_layer: copies stored when the window of their GPU opens."""
    back = instance.backward(layer)
    return mathopt.fast_sum(x.lateness(q) for q in range(layer, back))


def _stored(model: mathopt.Model, instance: PaperInstance[float], x: PaperVariables) -> None:
    """(31), (32), with 8L replaced by four periods a message; (R6) from the same counts."""
    delays = {layer: _delay(instance, x, layer) for layer in x.first_of_gpu}
    for (here, layer), count in x.stored.items():
        most = 4 * (instance.backward(layer) - layer)
        elsewhere = most * (1 - x.together(instance, here, layer))
        model.add_linear_constraint(count <= most - elsewhere)
        model.add_linear_constraint(count >= delays[layer] - elsewhere)
    if instance.in_flight_limit is None:
        return
    for layer, delay in delays.items():
        inside = x.before(instance, layer, instance.backward(layer))
        model.add_linear_constraint(delay + inside <= instance.in_flight_limit)


def _buffers(model: mathopt.Model, instance: PaperInstance[float], x: PaperVariables) -> None:
    """(34), (35); one variable serves a boundary's activation and gradient."""
    for (here, boundary), needed in x.buffer.items():
        before = x.together(instance, here, boundary)
        behind = x.together(instance, here, boundary + 1)
        model.add_linear_constraint(needed >= before - behind)
        model.add_linear_constraint(needed >= behind - before)


def _second_slots(
    model: mathopt.Model, instance: PaperInstance[float], x: PaperVariables, message: int
) -> None:
    """(P5), ours: without a second slot a message may occupy its buffer for at most T.

    The wait is its distance in the window plus T for each v, so the row depends on v and v'.
    """
    v, v2, vc, vc2 = x.late[message]
    sender, receiver = x.second_slot[message]
    H, T = instance.horizon, x.period
    free = 1 - cut(instance, x, message)
    start = x.message_start[message]
    sent = start + message_length(instance, x, message)
    produced = x.task_start[message] + instance.duration[message]
    consumed = x.task_start[message + 1]
    transfer = instance.transfer[message]
    model.add_linear_constraint(sent - produced <= H * (1 - v + v2 + sender + free))
    model.add_linear_constraint(sent + T - produced <= 2 * H * (1 - v2 + sender + free))
    model.add_linear_constraint(consumed - start - T <= transfer * (vc + receiver + free))
    safe = H + transfer
    model.add_linear_constraint(consumed - start <= safe * (1 - vc + vc2 + receiver + free))
    model.add_linear_constraint(consumed + T - start <= (H + safe) * (1 - vc2 + receiver + free))
    for here in x.first_of_gpu:
        sends, receives = x.second_slot_here[here, message]
        at_sender = x.together(instance, here, message)
        at_receiver = x.together(instance, here, message + 1)
        model.add_linear_constraint(sends >= sender + at_sender - 1)
        model.add_linear_constraint(receives >= receiver + at_receiver - 1)


def _bytes_during(instance: PaperInstance[float], x: PaperVariables, task: int) -> Term:
    """Left side of (36): (33) + Lemma 10 + Lemma 8 + Lemma 11, with st_l for a_{l-1}."""
    here = instance.layer(task)
    terms = [instance.working[task]]
    for layer in x.first_of_gpu:
        back = instance.backward(layer)
        inside = x.before(instance, layer, task) - x.before(instance, back, task)
        terms.append(instance.states[layer] * x.together(instance, here, layer))
        terms.append(instance.stored[layer] * (x.stored[here, layer] + inside))
    for message in instance.messages:
        if task not in (message, message + 1):
            terms.append(instance.size[message] * x.direct[task, message])
    for boundary in range(1, instance.layers):
        terms.append(2 * instance.size[boundary] * x.buffer[here, boundary])
    for message in x.second_slot:
        terms.extend(instance.size[message] * y for y in x.second_slot_here[here, message])
    return mathopt.fast_sum(terms)
