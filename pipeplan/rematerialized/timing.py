"""How long each operation takes, in the machinery that will run it.

Two schedules are run on the sample, as the handed out module runs its own: every layer keeps its
input and runs again before its backward. In the first one layers that run again get their random
numbers and buffers back, in the second one not, which is what a layer pays that runs once. Both
hold what measuring may hold: all boundaries and one tape. What a call takes beside its operations
(checks, making its pass, the ends of autograd) is counted with the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from pipeplan.capture.measured import times
from pipeplan.capture.place import Clock, Place
from pipeplan.remat import Costs, Op, OpKind
from pipeplan.remat.periodic import periodic
from pipeplan.rematerialized.measured import Sample
from pipeplan.rematerialized.script import Script, script_of
from pipeplan.rematerialized.steps import Watch

Run = Callable[[Script, Tensor, Watch], Tensor]
"""Calls the module with a script and an input; each operation runs inside of the watch."""
WARMUP = 2


def timed(costs: Costs, run: Run, sample: Sample, place: Place, repeats: int) -> Costs:
    """`costs` with the times of all operations, the loss's among them.

    A light forward is charged what comes of it: keeping random numbers and buffers, and putting
    them back when the layer runs again.

    Args:
        costs: sizes; the last layer is the loss.
        run: the module.
        sample: its input, and the loss.
        place: gives the clock.
        repeats: calls of each schedule, after `WARMUP` ones.
    """
    again = script_of(periodic(costs, costs.layers))
    once = replace(again, again=frozenset())
    layers = range(costs.layers - 1)

    def call(_: int) -> tuple[list[int], ...]:
        first, second = (_Call.of(run, script, sample, place.clock) for script in (again, once))
        return (
            [second.ns(OpKind.KEEP_ALL, layer) for layer in layers] + [second.forward_rest],
            [second.ns(OpKind.BACKWARD, layer) for layer in layers] + [second.backward_rest],
            [first.ns(OpKind.KEEP_INPUT, layer) for layer in layers] + [second.forward_rest],
            [first.ns(OpKind.KEEP_ALL, layer) for layer in layers] + [second.forward_rest],
        )

    (forward, backward, light, restored), _ = times(call, repeats, WARMUP, lambda _: None)
    rows = zip(light, restored, forward, strict=True)
    return replace(
        costs,
        forward=tuple(forward),
        light=tuple(max(0, first + more - plain) for first, more, plain in rows),
        backward=tuple(backward),
    )


@dataclass
class _Call:
    """One forward and backward of the module, watched."""

    clock: Clock
    marks: dict[Op, tuple[Any, Any]] = field(default_factory=dict)
    ends: list[Any] = field(default_factory=list)
    """Before the forward, between it and the backward, behind that."""

    @classmethod
    def of(cls, run: Run, script: Script, sample: Sample, clock: Clock) -> _Call:
        """A call by `script`, with its loss."""
        one = cls(clock)
        source = sample.source.detach().requires_grad_(sample.source.requires_grad)
        one.ends.append(clock.mark())
        result = run(script, source, one.watch)
        if sample.loss is not None:
            result = sample.loss[0](result, sample.loss[1])
        one.ends.append(clock.mark())
        result.backward(torch.ones_like(result))
        one.ends.append(clock.mark())
        return one

    @contextmanager
    def watch(self, op: Op) -> Iterator[None]:
        """Marks what lies around `op`; each runs once in these schedules."""
        begin = self.clock.mark()
        yield
        self.marks[op] = begin, self.clock.mark()

    def ns(self, kind: OpKind, layer: int) -> int:
        """Time of one operation."""
        return self.clock.between(*self.marks[Op(kind, layer)])

    @property
    def forward_rest(self) -> int:
        """What the forward took beside its operations; the loss is part of it."""
        return self._rest(0, OpKind.KEEP_INPUT)

    @property
    def backward_rest(self) -> int:
        """The same of the backward."""
        return self._rest(1, OpKind.KEEP_ALL, OpKind.BACKWARD)

    def _rest(self, part: int, *kinds: OpKind) -> int:
        whole = self.clock.between(self.ends[part], self.ends[part + 1])
        pairs = [pair for op, pair in self.marks.items() if op.kind in kinds]
        return max(0, whole - sum(self.clock.between(*pair) for pair in pairs))
