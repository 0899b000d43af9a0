"""Which streams copies wait for and which wait for copies, with streams that only take notes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import local

import pytest
import torch
from torch import Tensor

from pipeplan.host_copy import CopyEngine, thread_of_caller

_HERE = local()


class Stream:
    """In place of `torch.cuda.Stream`."""

    def __init__(self, name: object = "lane") -> None:
        self.name = str(name)
        self.waited: list[object] = []

    def record_event(self) -> str:
        """The event says whose it is."""
        return f"event of {self.name}"

    def wait_event(self, event: object) -> None:
        """Remembers it."""
        self.waited.append(event)

    def wait_stream(self, stream: Stream) -> None:
        """Remembers whose."""
        self.waited.append(stream)

    def synchronize(self) -> None:
        """Remembers that somebody waited for it."""
        self.waited.append("settled")


@contextmanager
def entered(stream: Stream) -> Iterator[None]:
    """In place of `torch.cuda.stream`: current in this thread alone."""
    before = current()
    _HERE.stream = stream
    try:
        yield
    finally:
        _HERE.stream = before


def current(_: object = None) -> Stream:
    """In place of `torch.cuda.current_stream`; each thread begins with its default stream."""
    return getattr(_HERE, "stream", None) or DEFAULT


DEFAULT = Stream("default")


@pytest.fixture
def way(monkeypatch: pytest.MonkeyPatch) -> Iterator[CopyEngine]:
    """Built on the default stream."""
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", entered)
    monkeypatch.setattr(torch.cuda, "current_stream", current)
    monkeypatch.setattr(CopyEngine, "_buffer", lambda _, part: torch.empty_like(part))
    made = CopyEngine(torch.device("cuda", 0), duplex=True)
    yield made
    made.close()


def test_copies_follow_the_stream_of_whoever_asks(way: CopyEngine) -> None:
    """Not the one that was current when the way was built, nor the worker's own."""
    mine, then, first = Stream("mine"), Stream("then"), Stream("first")
    seen: list[Stream] = []
    with entered(mine):
        copies = way.out([torch.ones(3)], lambda: seen.append(current()))
    assert torch.equal(copies.result()[0], torch.ones(3))
    with entered(then):
        room: list[Tensor] = [torch.zeros(3)]
        way.back(room, copies.result, lambda: seen.append(current())).result()
    assert seen == [mine, then]
    out, back = way._out.stream, way._back.stream
    assert out.waited[0] == "event of mine"
    assert back.waited[:2] == [then, "event of then"]
    with entered(first):
        way.join()
        way.settle()
    assert first.waited == [out, back, "settled"]
    assert not mine.waited
    assert not DEFAULT.waited


def test_on_a_processor_there_are_no_streams() -> None:
    """The same calls copy, and nobody asks CUDA."""
    way = CopyEngine(torch.device("cpu"), duplex=False)
    target = torch.zeros(3)
    copies = way.out([torch.ones(3)])
    way.back([target], copies.result).result()
    way.join()
    way.settle()
    way.close()
    assert torch.equal(target, torch.ones(3))


@pytest.mark.parametrize("initialized", [True, False])
def test_a_thread_is_on_the_callers_gpu(
    initialized: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the first one it would take memory there; where CUDA does nothing, nothing is asked."""
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    with thread_of_caller("test") as worker:
        assert worker.submit(torch.get_num_threads).result() == torch.get_num_threads()
    assert taken == ([3] if initialized else [])
