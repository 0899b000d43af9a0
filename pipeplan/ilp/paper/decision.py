"""What a solution of the ILP decides once its real times are dropped: GPUs, orders, shifts, slots.

Only these are read from a solver's floats; exact times follow from them (times.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipeplan.ilp.paper.instance import PaperInstance
from pipeplan.ilp.paper.variables import Pair, PaperVariables, Term


@dataclass(frozen=True)
class PaperDecision:
    """Integers of a solution; layers, tasks and messages are numbered from 1.

    Attributes:
        gpu: GPU of each layer, numbered in chain order.
        task_pairs: (q, r) on one GPU, q first in its window.
        message_pairs: (q, r) on one link, q first in its window.
        task_shift: periods by which T_q runs behind T_1.
        message_shift: the same for each message that crosses GPUs.
        slots: (sender, receiver) slots that bytes are reserved for, by message.
    """

    gpu: Mapping[int, int]
    task_pairs: tuple[Pair, ...]
    message_pairs: tuple[Pair, ...]
    task_shift: Mapping[int, int]
    message_shift: Mapping[int, int]
    slots: Mapping[int, Pair]


def read(
    instance: PaperInstance[float], x: PaperVariables, values: Mapping[Term, float]
) -> PaperDecision:
    """Round the integer variables of a solution."""

    def whole(variable: Term) -> int:
        return round(values[variable])

    def ordered(order: Mapping[Pair, Term]) -> dict[Pair, Pair]:
        return {
            (q, r): (q, r) if whole(variable) else (r, q) for (q, r), variable in order.items()
        }

    gpu = _gpus(instance.layers, {pair: whole(flag) for pair, flag in x.same_gpu.items()})
    here = {q: gpu[instance.layer(q)] for q in instance.tasks}
    links = {
        q: frozenset((here[q], here[q + 1])) for q in instance.messages if here[q] != here[q + 1]
    }
    task_shift, message_shift = {1: 0}, {}
    for q, (v, v2, vc, vc2) in x.late.items():
        message_shift[q] = task_shift[q] + whole(v) + whole(v2)
        task_shift[q + 1] = message_shift[q] + whole(vc) + whole(vc2)
    return PaperDecision(
        gpu=gpu,
        task_pairs=tuple(
            pair for (q, r), pair in ordered(x.task_order).items() if here[q] == here[r]
        ),
        message_pairs=tuple(
            pair
            for (q, r), pair in ordered(x.message_order).items()
            if q in links and links[q] == links.get(r)
        ),
        task_shift=task_shift,
        message_shift={q: message_shift[q] for q in links},
        slots={
            q: (1 + whole(sender), 1 + whole(receiver))
            for q, (sender, receiver) in x.second_slot.items()
            if q in links
        },
    )


def _gpus(layers: int, same_gpu: Mapping[Pair, int]) -> dict[int, int]:
    """Number the classes of z by their first layer."""
    gpu: dict[int, int] = {}
    count = 0
    for layer in range(1, layers + 1):
        mate = next((i for i in range(1, layer) if same_gpu[i, layer]), None)
        gpu[layer] = count if mate is None else gpu[mate]
        count += mate is None
    return gpu
