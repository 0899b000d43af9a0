"""Messages that are not what the program says: who, where and what is told, at once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeplan.capture import split
from pipeplan.errors import InputError, InternalError, RankError
from pipeplan.runtime.build import build
from pipeplan.runtime.data.feed import TaskFeed, Uses
from pipeplan.runtime.transport.base import PeerLostError, Pending, Transport
from pipeplan.task import Task
from pipeplan.testing.in_process import run_ranks
from tests import pipelines


class _Grows(nn.Module):
    """Returns twice the rows from its `after`-th call on."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 5)
        self.calls, self.after = 0, after

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.layer(x)
        return torch.cat([out, out]) if self.calls > self.after else out


class _Wrapped:
    """A transport of which one method is another."""

    def __init__(self, transport: Transport, name: str, method: Callable[..., Any]) -> None:
        self._transport = transport
        setattr(self, name, method)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def trained(
    layer: nn.Module,
    around: Callable[[Transport], Any],
    behind: nn.Module | None = None,
    gpus: Sequence[int] = (0, 1),
) -> None:
    """One step of two stages."""
    task = Task(
        model=[layer, behind or nn.Linear(5, 2)],
        loss=lambda output, target: (output - target[: len(output)]).square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        data=lambda _: (torch.ones(2, 3), torch.ones(2, 2)),
    )
    model, plan = split(task), pipelines.plan_of([1], gpus, "flush", 4, layers=2)
    layer.calls = 0  # those of the split are over
    pattern = pipelines.pattern_of(plan, period=3)

    def work(transport: Transport) -> None:
        feed = TaskFeed(task, model, Uses.of(plan, model, transport.rank))
        words = feed, around(transport), pipelines.Listener()
        build(plan, pattern, model, task, *words, seed=0).executor.run(0, 1)

    run_ranks(len(set(gpus)), work)


def test_another_size_than_planned_is_not_sent() -> None:
    """The rank whose layer returns it says so; the other end could not tell it from silence."""
    with pytest.raises(RankError) as caught:
        trained(_Grows(after=2), lambda transport: transport)
    message = str(caught.value)
    assert message.startswith("rank 0: action 0SEND_F2 (stage 0, micro-batch 2, peer rank 1) ")
    assert "tensor 0: got (4, 5) torch.float32, need (2, 5) torch.float32" in message


class _Turns(nn.Module):
    """Returns other numbers of as many bytes, or one with a graph, from its third call on."""

    def __init__(
        self, other: Callable[[Tensor], Tensor], usual: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 5)
        self.calls, self.other, self.usual = 0, other, usual

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        out: Tensor = self.layer(x)
        return out, (self.other if self.calls > 2 else self.usual)(out)


class _First(nn.Linear):
    """Works on the first of two tensors."""

    def forward(self, x: Tensor, _: Tensor) -> Tensor:
        return super().forward(x)


KINDS: dict[str, tuple[_Turns, str]] = {
    "dtype": (
        _Turns(lambda x: (x > 0).float(), lambda x: (x > 0).int()),
        r"action 0SEND_F2 \(.*tensor 1: got \(2, 5\) torch.float32, need \(2, 5\) torch.int32",
    ),
    "shape": (
        _Turns(lambda x: x.detach().t(), lambda x: x.detach()),
        r"action 0SEND_F2 \(.*tensor 1: got \(5, 2\) torch.float32, need \(2, 5\) torch.float32",
    ),
    "gradient": (
        _Turns(lambda x: x, lambda x: x.detach()),
        r"layer 0 \(_Turns\): output 1: got one with a gradient, need none",
    ),
}


@pytest.mark.parametrize(
    ("kind", "gpus"), [*((kind, (0, 1)) for kind in KINDS), ("gradient", (0, 0))]
)
def test_another_kind_than_at_the_split_is_not_handed_on(kind: str, gpus: Sequence[int]) -> None:
    """As many bytes would be read as other numbers, and a gradient would be lost."""
    layer, says = copy.deepcopy(KINDS[kind])
    with pytest.raises((InputError, RankError), match=says):
        trained(layer, lambda transport: transport, _First(5, 2), gpus)


class _Disagrees:
    def wait(self) -> None:
        raise InternalError("message: got 16 bytes, need 20")


def test_a_disagreement_names_rank_and_action() -> None:
    """A transport does not know what its messages are for; the executor adds it."""

    def around(transport: Transport) -> Any:
        def receive(*_: object) -> Pending:
            return _Disagrees()

        return _Wrapped(transport, "receive", receive) if transport.rank else transport

    expected = r"^rank 1: action 1F0 \(stage 1, .*, peer rank 0\): message: got 16 bytes, need 20$"
    with pytest.raises(InternalError, match=expected):
        trained(_Grows(after=9), around)


def test_what_has_not_left_by_the_end_is_a_lost_peer() -> None:
    """A run does not return before all that it sent has left."""

    def around(transport: Transport) -> Any:
        def flush() -> None:
            raise PeerLostError("no message read within 300 ms")

        return transport if transport.rank else _Wrapped(transport, "flush", flush)

    expected = "^rank 0: the end of a run lost its peer: no message read within 300 ms$"
    with pytest.raises(RankError, match=expected):
        trained(_Grows(after=9), around)
