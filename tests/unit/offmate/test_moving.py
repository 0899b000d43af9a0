"""Lanes beside the device: what is behind a job that has ended."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from pipeplan.offmate.moving import Moving


def test_a_job_that_has_ended_keeps_nothing_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread lets go of its job some time after others hear that it has ended."""
    jobs: list[Callable[[], None]] = []
    submit = ThreadPoolExecutor.submit

    def kept(lane: ThreadPoolExecutor, job: Callable[[], None]) -> Future[None]:
        jobs.append(job)
        return submit(lane, job)

    monkeypatch.setattr(ThreadPoolExecutor, "submit", kept)
    room = SimpleNamespace(take=lambda storage, parts: parts[0].add_(storage))
    moving = Moving(room, duplex=True)  # type: ignore[arg-type]
    part = torch.zeros(3)
    left = weakref.ref(part)
    moving.out(7, [part])
    moving.wait(7)
    assert part.tolist() == [7] * 3
    del part
    assert jobs
    assert left() is None
    moving.close()
